//! Texts with labels, read from files.
//!
//! Input: files. Output: their rows, checked. The formats are in `parquet.rs`, `csv.rs` and `jsonl.rs`. This module knows
//! nothing of tokens.

use std::path::{Path, PathBuf};

use super::error::excerpt;
use super::{TextError, TextFormat, csv, jsonl, parquet};

/// No row of a file is longer, in bytes. Texts are cut to a number of tokens after they were read, and a book has 3 MB.
pub(super) const MAX_ROW_BYTES: usize = 8 << 20;

/// Rows with a text and a class each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextRows {
    /// The texts. Some may be empty.
    pub texts: Vec<String>,
    /// The class of each text.
    pub labels: Vec<i64>,
}

/// A row as a file has it.
#[derive(Debug)]
pub(super) struct Row {
    pub text: String,
    pub label: i64,
}

/// Takes the rows of a file one after the other, each with its number, counted from one.
pub(super) type Sink<'a> = &'a mut dyn FnMut(usize, Row) -> Result<(), TextError>;

impl TextRows {
    /// Reads the files one after the other. Errors name the file and the row: a file that is cut off, a column that is
    /// missing, a row of more than 8 MiB, and a label that is not one of `num_classes` classes.
    pub fn read(paths: &[PathBuf], num_classes: usize) -> Result<Self, TextError> {
        let mut rows = Self::default();
        for path in paths {
            let before = rows.texts.len();
            rows.read_file(path, num_classes)?;
            if rows.texts.len() == before {
                return Err(TextError::file(path, "has no rows"));
            }
        }
        Ok(rows)
    }

    /// Reads the contents of a CSV file that a program carries. Errors name it by `name`.
    pub fn from_csv(name: &Path, contents: &[u8], num_classes: usize) -> Result<Self, TextError> {
        let mut rows = Self::default();
        csv::read_contents(name, contents, &mut rows.checked(name, num_classes))?;
        match rows.texts.is_empty() {
            true => Err(TextError::file(name, "has no rows")),
            false => Ok(rows),
        }
    }

    fn read_file(&mut self, path: &Path, num_classes: usize) -> Result<(), TextError> {
        let mut sink = self.checked(path, num_classes);
        match TextFormat::of(path) {
            Some(TextFormat::Parquet) => parquet::read(path, &mut sink),
            Some(TextFormat::Csv) => csv::read(path, &mut sink),
            Some(TextFormat::JsonLines) => jsonl::read(path, &mut sink),
            Some(TextFormat::Plain) => Err(TextError::file(path, "plain text has no labels")),
            None => Err(TextError::file(path, "is not a .parquet, .csv or .jsonl file")),
        }
    }

    /// Adds each row that it is given, after a check.
    fn checked<'a>(
        &'a mut self,
        path: &'a Path,
        num_classes: usize,
    ) -> impl FnMut(usize, Row) -> Result<(), TextError> + 'a {
        move |number, Row { text, label }| {
            if usize::try_from(label).map_or(true, |label| label >= num_classes) {
                return Err(TextError::Label {
                    path: path.into(),
                    row: number,
                    label,
                    num_classes,
                });
            }
            self.texts.push(text);
            self.labels.push(label);
            Ok(())
        }
    }
}

/// What is wrong with a row that is too long.
pub(super) fn too_long() -> String {
    let most = MAX_ROW_BYTES >> 20;
    format!(
        "has more than {most} MiB; texts are cut to a number of tokens after they were read, so shorten it in the file"
    )
}

/// What is wrong with a label that is a word or another value.
pub(super) fn no_integer(label: impl std::fmt::Display) -> String {
    format!(
        "the label {} is not an integer; labels are the numbers of the classes from 0",
        excerpt(&label.to_string())
    )
}

/// The column of this name.
pub(super) fn column(
    path: &Path,
    present: &[String],
    name: &'static str,
) -> Result<usize, TextError> {
    present.iter().position(|column| column == name).ok_or_else(|| TextError::Column {
        path: path.into(),
        name,
        present: vec![excerpt(&present.join(", "))],
    })
}
