//! Texts with labels, read from files.
//!
//! Input: files. Output: their rows, checked. The formats are in `parquet.rs`, `csv.rs` and `jsonl.rs`. This module knows
//! nothing of tokens.

use std::path::{Path, PathBuf};

use super::{TextError, TextFormat, csv, jsonl, parquet};

/// Rows with a text and a class each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextRows {
    /// The texts. None is empty.
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
    /// missing, a text without a word, and a label that is not one of `num_classes` classes.
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
            if text.trim().is_empty() {
                return Err(TextError::row(path, number, "the text is empty"));
            }
            if usize::try_from(label).map_or(true, |label| label >= num_classes) {
                let problem = format!(
                    "the label is {label}, not one of the {num_classes} classes from 0 to {}",
                    num_classes.saturating_sub(1)
                );
                return Err(TextError::row(path, number, problem));
            }
            self.texts.push(text);
            self.labels.push(label);
            Ok(())
        }
    }
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
        present: present.to_vec(),
    })
}
