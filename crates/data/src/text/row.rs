//! A row of a text file, and how much of it is kept.
//!
//! Input: bytes, labels and columns as a file has them. Output: the limits of a row, and errors. This module knows no format.

use std::path::Path;
use std::str::Utf8Error;

use super::TextError;
use super::error::excerpt;

/// A longer text is cut after the character that reaches this many bytes. A book has 3 MB.
///
/// Texts are cut again, to `max_length` tokens, and the tokens are those of the whole text in all but two cases. First,
/// spaces may have no token, and a word without end may be one unknown token.
/// So a text that is cut here may have fewer tokens than `max_length`, which is warned of. Second, where a tokenizer does
/// not divide a text into words, its last tokens before the cut may be others. That matters only if `max_length` tokens
/// take all of these bytes: at the usual 4 bytes for a token, with a `max_length` of two million.
pub(super) const MAX_TEXT_BYTES: usize = 8 << 20;
/// The most bytes of a row, without what is cut from its fields.
pub(super) const MAX_ROW_BYTES: usize = 4 * MAX_TEXT_BYTES;
/// The most bytes of a row between fields. Each may take many times its memory when it is parsed.
pub(super) const MAX_MARK_BYTES: usize = 8 << 20;

/// A row as a file has it.
#[derive(Debug)]
pub(super) struct TextRow {
    pub text: String,
    /// Nothing if only texts are read.
    pub label: Option<Label>,
}

/// A label as a file has it.
#[derive(Debug)]
pub(super) enum Label {
    Number(i64),
    Word(String),
}

/// Takes the rows of a file in order, each with its number, counted from one; or what is wrong with a row that
/// others may follow.
pub(super) type Sink<'a> =
    &'a mut dyn FnMut(usize, Result<TextRow, String>) -> Result<(), TextError>;

/// Bytes of a row that are kept while it is read.
#[derive(Debug, Default)]
pub(super) struct RowBytes {
    in_fields: usize,
    between: usize,
}

impl RowBytes {
    /// Counts bytes of a field that are kept.
    pub fn field(&mut self, bytes: usize) -> Result<(), String> {
        self.in_fields += bytes;
        self.check()
    }

    /// Counts a byte between fields.
    pub fn mark(&mut self) -> Result<(), String> {
        self.between += 1;
        self.check()
    }

    fn check(&self) -> Result<(), String> {
        if self.in_fields + self.between <= MAX_ROW_BYTES && self.between <= MAX_MARK_BYTES {
            return Ok(());
        }
        let [row, field, marks] =
            [MAX_ROW_BYTES, MAX_TEXT_BYTES, MAX_MARK_BYTES].map(|bytes| bytes >> 20);
        Err(format!(
            "has more than {row} MiB although each of its fields is cut to {field} MiB, or {marks} MiB between its \
             fields; leave only the columns text and label in the file"
        ))
    }
}

/// Whether a character begins with this byte of UTF-8.
pub(super) fn begins_character(byte: u8) -> bool {
    byte & 0b1100_0000 != 0b1000_0000
}

/// The error of a text that is not UTF-8.
pub(super) fn not_utf8(error: Utf8Error) -> String {
    format!("byte {} is not UTF-8", error.valid_up_to() + 1)
}

/// The error of a label that is a word or another value.
pub(super) fn no_integer(label: impl std::fmt::Display) -> String {
    format!(
        "the label {} is not an integer; labels are the numbers of the classes from 0, or words that are listed",
        excerpt(&label.to_string())
    )
}

/// The column of this name.
pub(super) fn column(path: &Path, present: &[String], name: &str) -> Result<usize, TextError> {
    present.iter().position(|column| column == name).ok_or_else(|| TextError::Column {
        path: path.into(),
        name: excerpt(name),
        present: vec![excerpt(&present.join(", "))],
    })
}

#[cfg(test)]
pub(super) mod tests {
    /// All sequences of at most `len` parts.
    pub fn sequences(parts: &[&str], len: u32) -> Vec<String> {
        let mut all = vec![String::new()];
        let mut longest = 0..1;
        for _ in 0..len {
            let more: Vec<String> = all[longest.clone()]
                .iter()
                .flat_map(|begin| parts.iter().map(move |part| format!("{begin}{part}")))
                .collect();
            longest = all.len()..all.len() + more.len();
            all.extend(more);
        }
        all
    }

    /// The beginning of a text that is cut.
    pub fn beginning(text: &str, most: usize) -> &str {
        &text[..text.ceil_char_boundary(most)]
    }
}
