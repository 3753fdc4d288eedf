//! The formats of text files: how they are named, and how they are read.
//!
//! To add a format, add a reader of rows, a file of its own, and a line to [`FORMATS`]. Messages, the choice of files and the fuzz
//! target follow.

pub(super) mod csv;
mod jsonl;
pub(super) mod lines;
#[cfg(feature = "parquet")]
mod parquet;

use std::path::Path;

use super::row::Sink;
use super::rows::open;
use super::{TableSettings, TextError};

/// Reads the rows of a file. Errors name the file.
type Read = fn(&Path, &TableSettings, Sink<'_>) -> Result<(), TextError>;

/// A format of text files.
#[derive(Debug)]
pub struct TextFormat {
    /// The end of a file's name, without the dot.
    pub ending: &'static str,
    /// Reads rows with the columns `text` and `label`. `None` for running text without labels.
    pub(super) read: Option<Read>,
    /// Whether files of this format can be a part of a data set, `train*` or `test*`.
    is_part: bool,
}

/// All formats.
pub const FORMATS: &[TextFormat] = &[
    #[cfg(feature = "parquet")]
    TextFormat { ending: "parquet", read: Some(parquet::read), is_part: true },
    TextFormat {
        ending: "csv",
        read: Some(|path, table, sink| csv::read(path, open(path)?, table, sink)),
        is_part: true,
    },
    TextFormat {
        ending: "jsonl",
        read: Some(|path, table, sink| jsonl::read(path, open(path)?, table, sink)),
        is_part: true,
    },
    TextFormat { ending: "md", read: None, is_part: false },
    TextFormat { ending: "txt", read: None, is_part: true },
];

impl TextFormat {
    /// The format of a file, by the end of its name.
    pub fn of(path: &Path) -> Option<&'static Self> {
        let ending = path.extension()?;
        FORMATS.iter().find(|format| ending == format.ending)
    }

    /// The format of a file that can be a part of a data set.
    pub fn of_part(path: &Path) -> Option<&'static Self> {
        Self::of(path).filter(|format| format.is_part)
    }

    /// The endings of the parts of data sets, in words: `.parquet, .csv, ... or .txt`.
    pub fn of_parts() -> String {
        either(FORMATS.iter().filter(|format| format.is_part), "")
    }

    /// The endings of tables, in words, each after `begin`.
    pub(super) fn of_tables(begin: &str) -> String {
        either(FORMATS.iter().filter(|format| format.read.is_some()), begin)
    }

    /// The error about a folder without files for a part, `train` or `test`.
    pub(super) fn no_files(folder: &Path, part: &str) -> TextError {
        let tables = Self::of_tables(&format!("{part}*"));
        let wanted = format!("{tables} (for language models, {part}*.txt)");
        TextError::NoFiles { folder: folder.into(), wanted }
    }

    /// All endings, in words, with those of running text first.
    pub(super) fn of_texts() -> String {
        either(FORMATS.iter().rev(), "")
    }
}

fn either<'a>(formats: impl Iterator<Item = &'a TextFormat>, begin: &str) -> String {
    let names: Vec<String> = formats.map(|format| format!("{begin}.{}", format.ending)).collect();
    match names.split_last() {
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}
