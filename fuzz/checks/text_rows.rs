//! Rows of texts, read from arbitrary bytes.
//!
//! Input: bytes, and the ending of a format. Output: whether its reader accepts them, and otherwise its message. Only
//! [`crate::fuzzing`] calls this.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::row::TextRow;
use super::{TableSettings, TextError, TextFormat};

/// Reads rows, and keeps none of them.
pub fn rows(ending: &str, contents: &[u8]) -> Result<(), String> {
    let (mut last, table) = (0, TableSettings::default());
    let mut sink = |number: usize, row: Result<TextRow, String>| -> Result<(), TextError> {
        assert!(number > last, "rows are counted");
        last = number;
        let class = row.and_then(|row| table.class_of(row.label));
        class.map(drop).map_err(|problem| TextError::row(Path::new("file"), number, problem))
    };
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("paceline-fuzz-{}-{count}.{ending}", std::process::id());
    let path = std::env::temp_dir().join(name);
    fs::write(&path, contents).expect("a folder for temporary files");
    let read = TextFormat::of(&path).and_then(|format| format.read).expect("a format of tables");
    let outcome = read(&path, &table, &mut sink);
    fs::remove_file(&path).expect("the file that was written");
    outcome.map_err(|error| {
        let message = error.to_string();
        assert!((10..2000).contains(&message.len()), "a message is a sentence: {message}");
        message
    })
}
