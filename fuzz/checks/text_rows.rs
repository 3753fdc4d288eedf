//! Rows of texts, read from arbitrary bytes.
//!
//! Input: bytes, and the name of a format. Output: whether its reader accepts them, and otherwise its message. Only
//! [`crate::fuzzing`] calls this.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::row::{Sink, TextRow};
use super::rows::unmarked;
use super::{TableSettings, TextError, csv, jsonl, parquet};

/// Reads rows, and keeps none of them.
pub fn rows(format: &str, contents: &[u8]) -> Result<(), String> {
    let mut last = 0;
    let (path, table) = (Path::new("file"), TableSettings::default());
    let mut sink = |number: usize, row: Result<TextRow, String>| -> Result<(), TextError> {
        assert!(number > last, "rows are counted");
        last = number;
        let class = row.and_then(|row| table.class_of(row.label));
        class.map(drop).map_err(|problem| TextError::row(path, number, problem))
    };
    let read = match format {
        "csv" => unmarked(path, contents)
            .and_then(|contents| csv::read(path, contents, &table, &mut sink)),
        "jsonl" => unmarked(path, contents)
            .and_then(|contents| jsonl::read(path, contents, &table, &mut sink)),
        _ => parquet_file(contents, &table, &mut sink),
    };
    read.map_err(|error| {
        let message = error.to_string();
        assert!((10..2000).contains(&message.len()), "a message is a sentence: {message}");
        message
    })
}

/// The reader of Parquet reads files only.
fn parquet_file(contents: &[u8], table: &TableSettings, sink: Sink<'_>) -> Result<(), TextError> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("paceline-fuzz-{}-{count}.parquet", std::process::id());
    let path = std::env::temp_dir().join(name);
    fs::write(&path, contents).expect("a folder for temporary files");
    let outcome = parquet::read(&path, table, sink);
    fs::remove_file(&path).expect("the file that was written");
    outcome
}
