//! Which columns of a table hold the texts and their labels, and what happens to unusable rows.
//!
//! Input: labels as files have them. Output: classes. This module reads no file.

use std::path::Path;

use super::TextError;
use super::error::excerpt;
use super::row::{Label, no_integer};

/// How tables are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSettings {
    /// The column of the texts. Columns of a CSV file without a header have the names 1, 2 and so on.
    pub text_column: String,
    /// The column of the labels. Without one, all rows have class 0.
    pub label_column: Option<String>,
    /// The labels that are words, in the order of their classes. Empty if labels are numbers.
    pub label_names: Vec<String>,
    /// Whether CSV files begin with the names of their columns.
    pub has_header: bool,
    /// Whether rows without a text, and unusable rows, are left out and counted instead of refused.
    pub skip_bad_rows: bool,
}

impl Default for TableSettings {
    fn default() -> Self {
        Self {
            text_column: "text".into(),
            label_column: Some("label".into()),
            label_names: Vec::new(),
            has_header: true,
            skip_bad_rows: false,
        }
    }
}

impl TableSettings {
    /// The columns that are read.
    pub(super) fn columns(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.text_column.as_str()).chain(self.label_column.as_deref())
    }

    /// The class of a label, whose range is not checked. Errors if the label is not a class.
    pub(super) fn class_of(&self, label: Option<Label>) -> Result<i64, String> {
        let names = &self.label_names;
        let word = match label {
            None => return Ok(0),
            Some(Label::Number(number)) if names.is_empty() => return Ok(number),
            Some(Label::Number(number)) => number.to_string(),
            Some(Label::Word(word)) if names.is_empty() => {
                return Err(no_integer(format!("{word:?}")));
            }
            Some(Label::Word(word)) => word,
        };
        let class = names.iter().position(|name| *name == word);
        class.map(|class| class as i64).ok_or_else(|| {
            format!("the label {} is none of {}", excerpt(&word), excerpt(&names.join(", ")))
        })
    }
}

/// Rows of a file that were left out.
#[derive(Debug, Default)]
pub(super) struct SkippedRows {
    count: usize,
    first: Option<TextError>,
}

impl SkippedRows {
    pub fn add(&mut self, problem: TextError) {
        self.count += 1;
        self.first.get_or_insert(problem);
    }

    /// The warning about them, if there are any.
    pub fn warning(&self, path: &Path) -> Option<String> {
        let (path, count) = (path.display(), self.count);
        let first = self.first.as_ref()?;
        Some(format!(
            "{path}: {count} bad or empty rows were left out, the first one because of {first}"
        ))
    }
}
