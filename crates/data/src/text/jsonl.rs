//! Texts with labels in files of one JSON object per line.
//!
//! Input: a file. Output: rows. This module checks no label's range.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::{Map, Value};

use super::TextError;
use super::error::excerpt;
use super::rows::{MAX_ROW_BYTES, Row, Sink, column, no_integer, too_long};

/// What some programs write in front of the first line.
pub(super) const BYTE_ORDER_MARK: &str = "\u{feff}";

/// Reads the rows of a file.
pub(super) fn read(path: &Path, sink: Sink<'_>) -> Result<(), TextError> {
    let file = paceline_files::open(path).map_err(|error| TextError::file(path, error))?;
    read_contents(path, file, sink)
}

/// Reads the rows of a file's contents. Errors name the file `path`. Empty lines are left out, but counted.
pub(super) fn read_contents(
    path: &Path,
    contents: impl Read,
    sink: Sink<'_>,
) -> Result<(), TextError> {
    let mut contents = BufReader::new(contents);
    let mut line = Vec::new();
    for number in 1.. {
        let problem = |problem: String| TextError::row(path, number, problem);
        line.clear();
        let read = contents.by_ref().take(MAX_ROW_BYTES as u64 + 1).read_until(b'\n', &mut line);
        match read.map_err(|error| problem(error.to_string()))? {
            0 => break,
            len if len > MAX_ROW_BYTES => return Err(problem(too_long())),
            _ => {}
        }
        let line = str::from_utf8(&line).map_err(|error| problem(error.to_string()))?;
        let line = line.strip_prefix(BYTE_ORDER_MARK).filter(|_| number == 1).unwrap_or(line);
        if line.trim().is_empty() {
            continue;
        }
        let object: Map<String, Value> = serde_json::from_str(line).map_err(|error| {
            let hint = if error.is_eof() { "; is the file cut off?" } else { "" };
            problem(format!("is not a JSON object ({error}){hint}"))
        })?;
        let present: Vec<String> = object.keys().cloned().collect();
        column(path, &present, "text")?;
        column(path, &present, "label")?;
        let Some(text) = object["text"].as_str() else {
            let text = excerpt(&object["text"].to_string());
            return Err(problem(format!("the text {text} is not a string")));
        };
        let Some(label) = object["label"].as_i64() else {
            return Err(problem(no_integer(&object["label"])));
        };
        sink(number, Row { text: text.to_owned(), label })?;
    }
    Ok(())
}
