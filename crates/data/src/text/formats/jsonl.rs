//! Texts with labels in files of one JSON object per line.
//!
//! Input: the contents of a file. Output: rows. Long strings are cut while they are read. This module checks no label's range.

use std::io::{self, BufRead};
use std::path::Path;

use serde_json::{Map, Value};

use crate::text::error::excerpt;
use crate::text::row::{
    Label, MAX_TEXT_BYTES, RowBytes, Sink, TextRow, begins_character, column, no_integer, not_utf8,
};
use crate::text::{TableSettings, TextError};

/// Reads the rows of a file. Errors name the file `path`. Empty lines are left out, but counted.
pub(super) fn read(
    path: &Path,
    mut contents: impl BufRead,
    table: &TableSettings,
    sink: Sink<'_>,
) -> Result<(), TextError> {
    for number in 1.. {
        // Nothing can be read after a line that is too long.
        let Some(line) = CutLine::read(&mut contents, MAX_TEXT_BYTES)
            .map_err(|error| TextError::row(path, number, error.to_string()))?
        else {
            break;
        };
        let line = match str::from_utf8(&line.bytes) {
            Ok(line) if line.trim().is_empty() => continue,
            Ok(line) => Ok(line),
            Err(error) => Err(not_utf8(error)),
        };
        let object = line.and_then(|line| {
            serde_json::from_str::<Map<String, Value>>(line).map_err(|error| {
                let hint = if error.is_eof() { "; is the file cut off?" } else { "" };
                format!("is not a JSON object ({error}){hint}")
            })
        });
        // A missing column is no bad row: with another name, no row would be left.
        if let Ok(object) = &object {
            let present: Vec<String> = object.keys().cloned().collect();
            table.columns().try_for_each(|name| column(path, &present, name).map(drop))?;
        }
        sink(number, object.and_then(|object| row(&object, table)))?;
    }
    Ok(())
}

/// The row of an object that has the columns.
fn row(object: &Map<String, Value>, table: &TableSettings) -> Result<TextRow, String> {
    let Some(text) = object[&table.text_column].as_str() else {
        let text = excerpt(&object[&table.text_column].to_string());
        return Err(format!("the text {text} is not a string"));
    };
    let label = table.label_column.as_ref().map(|name| match &object[name] {
        Value::String(word) => Ok(Label::Word(word.clone())),
        other => other.as_i64().map(Label::Number).ok_or_else(|| no_integer(other)),
    });
    Ok(TextRow { text: text.to_owned(), label: label.transpose()? })
}

/// A line whose long strings are cut, before anything keeps them.
#[derive(Default)]
struct CutLine {
    bytes: Vec<u8>,
    /// The most bytes of a string, unless its last character reaches beyond.
    most: usize,
    state: ScanState,
    /// Bytes that the string has when its escapes are resolved.
    string_bytes: usize,
    is_cut: bool,
    /// Whether the first half of a pair of escapes lies before the next byte. The pair is one character.
    is_in_pair: bool,
    kept: RowBytes,
}

#[derive(Clone, Copy, Default)]
enum ScanState {
    #[default]
    Outside,
    InString,
    /// After a backslash.
    Escape,
    /// In an escape of four hexadecimal digits, with those that were read.
    Digits {
        len: u8,
        value: u32,
    },
}

impl CutLine {
    /// The next line. Nothing at the end of a file.
    fn read(contents: &mut impl BufRead, most: usize) -> io::Result<Option<Self>> {
        let mut line = Self { most, ..Self::default() };
        let mut is_empty = true;
        loop {
            let piece = contents.fill_buf()?;
            let end = piece.iter().position(|byte| *byte == b'\n');
            let piece = &piece[..end.unwrap_or(piece.len())];
            is_empty &= piece.is_empty() && end.is_none();
            for &byte in piece {
                line.push(byte).map_err(io::Error::other)?;
            }
            let len = piece.len();
            contents.consume(len + usize::from(end.is_some()));
            if end.is_some() || len == 0 {
                return Ok((!is_empty).then_some(line));
            }
        }
    }

    fn push(&mut self, byte: u8) -> Result<(), String> {
        match (self.state, byte) {
            (ScanState::Outside, _) => {
                if byte == b'"' {
                    self.state = ScanState::InString;
                    (self.string_bytes, self.is_cut, self.is_in_pair) = (0, false, false);
                }
                self.bytes.push(byte);
                return self.kept.mark();
            }
            (ScanState::InString, b'"') => {
                self.state = ScanState::Outside;
                self.bytes.push(byte);
                return self.kept.mark();
            }
            (ScanState::InString, _) => {
                let is_whole = begins_character(byte) && !self.is_in_pair;
                self.is_cut |= self.string_bytes >= self.most && is_whole;
                match byte {
                    b'\\' => self.state = ScanState::Escape,
                    _ => self.resolved(1),
                }
            }
            (ScanState::Escape, b'u') => self.state = ScanState::Digits { len: 0, value: 0 },
            (ScanState::Escape, _) => self.resolved(1),
            (ScanState::Digits { len, value }, _) => {
                // What is no digit is refused when the line is parsed.
                let digit = char::from(byte).to_digit(16).unwrap_or(0);
                let (len, value) = (len + 1, value << 4 | digit);
                match (len, value) {
                    (..4, _) => self.state = ScanState::Digits { len, value },
                    (_, 0xd800..0xdc00) => {
                        self.resolved(0);
                        self.is_in_pair = true;
                    }
                    (_, 0xdc00..0xe000) => self.resolved(4),
                    (_, value) => self.resolved(char::from_u32(value).map_or(0, char::len_utf8)),
                }
            }
        }
        if self.is_cut {
            return Ok(());
        }
        self.bytes.push(byte);
        self.kept.field(1)
    }

    /// Continues after a character, or a byte of one, of this many bytes.
    fn resolved(&mut self, bytes: usize) {
        self.string_bytes += bytes;
        self.is_in_pair = false;
        self.state = ScanState::InString;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::row::tests::{beginning, sequences};

    /// Whatever characters and escapes a string has, it is cut between two of them, and nothing else changes.
    #[test]
    fn strings_are_cut_between_characters() {
        let parts =
            ["a", "\u{20ac}", "\\n", "\\\"", "\\u0061", "\\u00E4", "\\u20ac", "\\ud83d\\ude00"];
        for string in sequences(&parts, 4) {
            let whole: String = serde_json::from_str(&format!("\"{string}\"")).unwrap();
            for most in 0..8 {
                let mut contents: &[u8] =
                    &format!("{{\"{string}\": [\"{string}\"]}}\n1").into_bytes();
                let line = CutLine::read(&mut contents, most).unwrap().unwrap();
                let cut = beginning(&whole, most);
                let expected = serde_json::json!({ cut: [cut] });
                let read: Value = serde_json::from_slice(&line.bytes).unwrap();
                assert_eq!(read, expected, "{string}, {most}");
                assert_eq!(contents, b"1");
            }
        }
    }
}
