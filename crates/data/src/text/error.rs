//! The errors of text files and tokenizers.

use std::fmt;
use std::path::{Path, PathBuf};

/// An error in text files, in a tokenizer, or in the cache of tokens.
#[derive(thiserror::Error)]
pub enum TextError {
    /// The folder has no files for a part of the data.
    #[error("found no {wanted} in {}", folder.display())]
    NoFiles {
        /// The folder.
        folder: PathBuf,
        /// The names of such files.
        wanted: String,
    },
    /// The folder has no text at all.
    #[error("found no {wanted} file in {} and its subfolders", folder.display())]
    NoTexts {
        /// The folder.
        folder: PathBuf,
        /// The endings of such files.
        wanted: String,
    },
    /// The text is too short for one sequence.
    #[error(
        "{}: the {part} part has {num_tokens} tokens, too few for a sequence of {seq_len} and the token after it",
        path.display()
    )]
    TooShort {
        /// The folder or the file.
        path: PathBuf,
        /// `training` or `test`.
        part: &'static str,
        /// The tokens that are there.
        num_tokens: usize,
        /// The tokens of a sequence.
        seq_len: usize,
    },
    /// The folder has nothing to train on, and several of its subfolders have.
    #[error("{} and {} both have files to train on; pass one of these folders", first.display(), second.display())]
    Subfolders {
        /// A subfolder.
        first: PathBuf,
        /// Another one.
        second: PathBuf,
    },
    /// The folder has files of several formats for a part of the data.
    #[error("{} and {} have different formats; leave one format in the folder", first.display(), second.display())]
    Formats {
        /// A file.
        first: PathBuf,
        /// A file of another format.
        second: PathBuf,
    },
    /// A file lacks a column.
    #[error("{}: has no column {name}; its columns are {}", path.display(), present.join(", "))]
    Column {
        /// The file.
        path: PathBuf,
        /// The column that is missing.
        name: String,
        /// The columns that are there, or the first of them.
        present: Vec<String>,
    },
    /// A row has a label that is not one of the classes.
    #[error(
        "{}: row {row}: the label is {label}, not one of the {num_classes} classes from 0 to {}",
        path.display(), num_classes.saturating_sub(1)
    )]
    Label {
        /// The file.
        path: PathBuf,
        /// The row, counted from one. A header is no row.
        row: usize,
        /// The label.
        label: i64,
        /// The number of classes.
        num_classes: usize,
    },
    /// The tokenizer's special tokens fill up a text.
    #[error(
        "{}: adds {added} special tokens to each text, so {max_length} tokens leave no room for the text itself",
        path.display()
    )]
    NoRoom {
        /// The file of the tokenizer.
        path: PathBuf,
        /// The special tokens of a text.
        added: usize,
        /// The tokens that a text may have.
        max_length: usize,
    },
    /// A row cannot be used.
    #[error("{}: row {row}: {problem}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The row, counted from one. A header is no row.
        row: usize,
        /// The problem.
        problem: String,
    },
    /// A file or a folder cannot be used.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// More samples are wanted than there are.
    #[error("{wanted} {part} samples are wanted, and {} has {available} for them; ask for fewer", folder.display())]
    TooFew {
        /// `training` or `test`.
        part: &'static str,
        /// The number that is wanted.
        wanted: usize,
        /// The number that is there.
        available: usize,
        /// The folder.
        folder: PathBuf,
    },
}

impl fmt::Debug for TextError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TextError {
    pub(crate) fn file(path: &Path, problem: impl ToString) -> Self {
        Self::File { path: path.into(), problem: problem.to_string() }
    }

    pub(crate) fn row(path: &Path, row: usize, problem: impl Into<String>) -> Self {
        Self::Row { path: path.into(), row, problem: problem.into() }
    }
}

/// The beginning of a text that others wrote, escaped, for a message.
pub(super) fn excerpt(text: &str) -> String {
    const MOST: usize = 160;
    let mut words: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().nth(MOST).is_some() {
        words += "...";
    }
    words.replace("\\'", "'").replace("\\\"", "\"")
}
