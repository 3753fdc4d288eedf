//! Texts with labels in files of one JSON object per line.
//!
//! Input: a file. Output: rows. This module checks no label's range.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde_json::{Map, Value};

use super::TextError;
use super::rows::{Row, Sink, column};

/// Reads the rows of a file. Empty lines are left out, but counted.
pub(super) fn read(path: &Path, sink: Sink<'_>) -> Result<(), TextError> {
    let file = File::open(path).map_err(|error| TextError::file(path, error))?;
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let line = line.map_err(|error| TextError::row(path, number, error.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        let problem = |problem: String| TextError::row(path, number, problem);
        let object: Map<String, Value> = serde_json::from_str(&line).map_err(|error| {
            let hint = if error.is_eof() { "; is the file cut off?" } else { "" };
            problem(format!("is not a JSON object ({error}){hint}"))
        })?;
        let present: Vec<String> = object.keys().cloned().collect();
        column(path, &present, "text")?;
        column(path, &present, "label")?;
        let Some(text) = object["text"].as_str() else {
            return Err(problem(format!("the text {} is not a string", object["text"])));
        };
        let Some(label) = object["label"].as_i64() else {
            return Err(problem(format!("the label {} is not an integer", object["label"])));
        };
        sink(number, Row { text: text.to_owned(), label })?;
    }
    Ok(())
}
