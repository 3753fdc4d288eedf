//! Texts with labels in CSV files.
//!
//! Input: a file or its contents, with a header line. Fields may be in quotes. Output: rows. Long fields are cut while
//! they are read. This module checks no label's range.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::TextError;
use super::rows::{Kept, MAX_TEXT_BYTES, Row, Sink, begins_character, column, no_integer};

/// Reads the rows of a file.
pub(super) fn read(path: &Path, sink: Sink<'_>) -> Result<(), TextError> {
    let file = paceline_files::open(path).map_err(|error| TextError::file(path, error))?;
    read_contents(path, file, sink)
}

/// Reads the rows of a file's contents. Errors name the file `path`.
pub(super) fn read_contents(
    path: &Path,
    contents: impl Read,
    sink: Sink<'_>,
) -> Result<(), TextError> {
    let mut reader = csv::Reader::from_reader(Cut::new(contents));
    let header = reader.headers().map_err(|error| TextError::file(path, error))?;
    let header: Vec<String> = header.iter().map(str::to_owned).collect();
    let (text, label) = (column(path, &header, "text")?, column(path, &header, "label")?);
    let mut record = csv::StringRecord::new();
    for number in 1.. {
        let read = reader.read_record(&mut record).map_err(|error| {
            // Without the position of the crate, which counts the header.
            let problem = match error.kind() {
                csv::ErrorKind::UnequalLengths { expected_len, len, .. } => format!(
                    "has {len} fields, and the header has {expected_len}; is the file cut off?"
                ),
                _ => error.to_string(),
            };
            TextError::row(path, number, problem)
        })?;
        if !read {
            break;
        }
        let given = record[label].trim();
        let label = given
            .parse()
            .map_err(|_| TextError::row(path, number, no_integer(format!("{given:?}"))))?;
        sink(number, Row { text: record[text].to_owned(), label })?;
    }
    // The reader takes the end of the file for the end of a quoted field.
    if reader.get_ref().quotes % 2 == 1 {
        let problem =
            "has an odd number of quotes: it is cut off, or a quote in a field is not doubled";
        return Err(TextError::file(path, problem));
    }
    Ok(())
}

/// Contents whose long fields are cut, before anything keeps them.
struct Cut<R> {
    contents: BufReader<R>,
    /// Bytes that are ready, and how many of them have been given out.
    ready: Vec<u8>,
    given: usize,
    place: Place,
    /// All quotes.
    quotes: usize,
    /// Bytes of the field, without quotes around it.
    field_bytes: usize,
    is_cut: bool,
    kept: Kept,
}

/// A place in a file, as the library divides it into fields.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// Before a field.
    Start,
    /// In a field, or a part of it, without quotes around it.
    Plain,
    /// Between two quotes.
    Quoted,
    /// Behind a quote that ends the quoted part, or that is the first one of a doubled quote. It is held back until then.
    Quote,
}

impl<R: Read> Cut<R> {
    fn new(contents: R) -> Self {
        Self {
            contents: BufReader::new(contents),
            ready: Vec::new(),
            given: 0,
            place: Place::Start,
            quotes: 0,
            field_bytes: 0,
            is_cut: false,
            kept: Kept::default(),
        }
    }

    fn push(&mut self, byte: u8) -> Result<(), String> {
        use Place::{Plain, Quote, Quoted, Start};
        self.quotes += usize::from(byte == b'"');
        let before = self.place;
        self.place = match (before, byte) {
            (Start | Quote, b'"') => Quoted,
            (Quoted, b'"') => Quote,
            (Quoted, _) => Quoted,
            (_, b',' | b'\r' | b'\n') => Start,
            _ => Plain,
        };
        match (before, self.place) {
            (Quoted, Quote) => return Ok(()),
            (Quote, Quoted) => return self.content(b"\"\""),
            (Quote, _) => self.mark(b'"')?,
            _ => {}
        }
        if self.place == Start {
            (self.field_bytes, self.is_cut) = (0, false);
            if byte != b',' {
                self.kept = Kept::default();
            }
        }
        match self.place == Start || before == Start && byte == b'"' {
            true => self.mark(byte),
            false => self.content(&[byte]),
        }
    }

    /// A byte between fields.
    fn mark(&mut self, byte: u8) -> Result<(), String> {
        self.ready.push(byte);
        self.kept.mark()
    }

    /// A byte of a field, or a doubled quote.
    fn content(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.is_cut |= self.field_bytes >= MAX_TEXT_BYTES && begins_character(bytes[0]);
        if self.is_cut {
            return Ok(());
        }
        self.field_bytes += 1;
        self.ready.extend_from_slice(bytes);
        self.kept.field(bytes.len())
    }
}

impl<R: Read> Read for Cut<R> {
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
