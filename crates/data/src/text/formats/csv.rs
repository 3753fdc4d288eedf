//! Texts with labels in CSV files.
//!
//! Input: the contents of a file. Fields may be in quotes. Output: rows. Long fields are cut while
//! they are read. This module checks no label's range.

use std::io::{self, BufRead, Read};
use std::path::Path;

use crate::text::row::{Label, MAX_TEXT_BYTES, RowBytes, Sink, TextRow, begins_character, column};
use crate::text::{TableSettings, TextError};

/// Reads the rows of a file. Errors name the file `path`.
pub(in crate::text) fn read(
    path: &Path,
    contents: impl BufRead,
    table: &TableSettings,
    sink: Sink<'_>,
) -> Result<(), TextError> {
    let contents = CutFields::new(contents, MAX_TEXT_BYTES);
    let mut reader = csv::ReaderBuilder::new().has_headers(table.has_header).from_reader(contents);
    // Without a header, this is the first row, which is read again.
    let first = reader.headers().map_err(|error| TextError::file(path, error))?;
    let names: Vec<String> = if table.has_header {
        first.iter().map(str::to_owned).collect()
    } else {
        (1..=first.len()).map(|number| number.to_string()).collect()
    };
    let text = column(path, &names, &table.text_column)?;
    let label = table.label_column.as_ref().map(|name| column(path, &names, name)).transpose()?;
    let first_line = if table.has_header { "the header" } else { "the first row" };
    let mut record = csv::StringRecord::new();
    for number in 1.. {
        let row = match reader.read_record(&mut record) {
            Ok(false) => break,
            Ok(true) => Ok(TextRow {
                text: record[text].to_owned(),
                label: label.map(|at| label_of(record[at].trim())),
            }),
            // Without the position of the crate, which counts the header.
            Err(error) => match error.kind() {
                csv::ErrorKind::UnequalLengths { expected_len, len, .. } => Err(format!(
                    "has {len} fields, and {first_line} has {expected_len}; is the file cut off?"
                )),
                csv::ErrorKind::Utf8 { pos, err } => Err(format!(
                    "byte {} of field {} is not UTF-8 (the row begins in line {})",
                    err.valid_up_to() + 1,
                    err.field() + 1,
                    pos.as_ref().map_or(0, csv::Position::line)
                )),
                // Nothing can be read after it.
                _ => return Err(TextError::row(path, number, error.to_string())),
            },
        };
        sink(number, row)?;
    }
    // The reader takes the end of the file for the end of a quoted field.
    if reader.get_ref().quotes % 2 == 1 {
        let problem =
            "has an odd number of quotes: it is cut off, or a quote in a field is not doubled";
        return Err(TextError::file(path, problem));
    }
    Ok(())
}

fn label_of(field: &str) -> Label {
    field.parse().map_or_else(|_| Label::Word(field.to_owned()), Label::Number)
}

/// Contents whose long fields are cut, before anything keeps them.
struct CutFields<R> {
    contents: R,
    /// The most bytes of a field, unless its last character reaches beyond.
    most: usize,
    /// Bytes that are ready, and how many of them have been given out.
    ready: Vec<u8>,
    given: usize,
    state: ScanState,
    /// All quotes.
    quotes: usize,
    /// Bytes of the field, without quotes around it.
    field_bytes: usize,
    is_cut: bool,
    kept: RowBytes,
}

/// A position in a file, as the library divides it into fields.
#[derive(Clone, Copy, PartialEq)]
enum ScanState {
    /// Before a field.
    Start,
    /// In a field, or a part of it, without quotes around it.
    Plain,
    /// Between two quotes.
    Quoted,
    /// After a quote that ends the quoted part, or is the first of a doubled quote. It is held back until then.
    Quote,
}

impl<R: BufRead> CutFields<R> {
    fn new(contents: R, most: usize) -> Self {
        Self {
            contents,
            most,
            ready: Vec::new(),
            given: 0,
            state: ScanState::Start,
            quotes: 0,
            field_bytes: 0,
            is_cut: false,
            kept: RowBytes::default(),
        }
    }

    fn push(&mut self, byte: u8) -> Result<(), String> {
        use ScanState::{Plain, Quote, Quoted, Start};
        self.quotes += usize::from(byte == b'"');
        let before = self.state;
        self.state = match (before, byte) {
            (Start | Quote, b'"') => Quoted,
            (Quoted, b'"') => Quote,
            (Quoted, _) => Quoted,
            (_, b',' | b'\r' | b'\n') => Start,
            _ => Plain,
        };
        match (before, self.state) {
            (Quoted, Quote) => return Ok(()),
            (Quote, Quoted) => return self.content(b"\"\""),
            (Quote, _) => self.mark(b'"')?,
            _ => {}
        }
        if self.state == Start {
            (self.field_bytes, self.is_cut) = (0, false);
            if byte != b',' {
                self.kept = RowBytes::default();
            }
        }
        if self.state == Start || before == Start && byte == b'"' {
            self.mark(byte)
        } else {
            self.content(&[byte])
        }
    }

    /// A byte between fields.
    fn mark(&mut self, byte: u8) -> Result<(), String> {
        self.ready.push(byte);
        self.kept.mark()
    }

    /// A byte of a field, or a doubled quote.
    fn content(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.is_cut |= self.field_bytes >= self.most && begins_character(bytes[0]);
        if self.is_cut {
            return Ok(());
        }
        self.field_bytes += 1;
        self.ready.extend_from_slice(bytes);
        self.kept.field(bytes.len())
    }
}

impl<R: BufRead> Read for CutFields<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.given == self.ready.len() {
            self.ready.clear();
            self.given = 0;
            let piece = self.contents.fill_buf()?.to_vec();
            if piece.is_empty() {
                return Ok(0);
            }
            for &byte in &piece {
                self.push(byte).map_err(io::Error::other)?;
            }
            self.contents.consume(piece.len());
        }
        let len = (&self.ready[self.given..]).read(buffer)?;
        self.given += len;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::row::tests::{beginning, sequences};

    fn records(contents: impl Read) -> Vec<Vec<String>> {
        let mut reader =
            csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(contents);
        let records = reader.records().map(|record| record.unwrap());
        records.map(|record| record.iter().map(str::to_owned).collect()).collect()
    }

    /// Whatever is in a file, the library finds the same fields in it, and each of them is cut.
    #[test]
    fn fields_are_those_of_the_library() {
        for contents in sequences(&["a", "\u{20ac}", "\"", ",", "\n", "\r"], 5) {
            let whole = records(contents.as_bytes());
            for most in 1..4 {
                let cut = records(CutFields::new(contents.as_bytes(), most));
                let expected = whole.iter().map(|record| {
                    record.iter().map(|field| beginning(field, most).to_owned()).collect()
                });
                assert_eq!(cut, expected.collect::<Vec<Vec<_>>>(), "{contents:?}, {most}");
            }
        }
    }
}
