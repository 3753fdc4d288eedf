//! Texts with labels in CSV files.
//!
//! Input: a file or its contents, with a header line. Fields may be in quotes. Output: rows. This module checks no label's
//! range.

use std::cell::Cell;
use std::io::{self, Read};
use std::path::Path;
use std::rc::Rc;

use super::TextError;
use super::rows::{MAX_ROW_BYTES, Row, Sink, column, no_integer, too_long};

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
    let (quotes, row_bytes) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let counting = Counting { contents, quotes: quotes.clone(), row_bytes: row_bytes.clone() };
    let mut reader = csv::Reader::from_reader(counting);
    let header = reader.headers().map_err(|error| TextError::file(path, error))?;
    let header: Vec<String> = header.iter().map(str::to_owned).collect();
    let (text, label) = (column(path, &header, "text")?, column(path, &header, "label")?);
    for (number, record) in (1..).zip(reader.records()) {
        row_bytes.set(0);
        let record = record.map_err(|error| {
            // Without the position of the crate, which counts the header.
            let problem = match error.kind() {
                csv::ErrorKind::UnequalLengths { expected_len, len, .. } => format!(
                    "has {len} fields, and the header has {expected_len}; is the file cut off?"
                ),
                _ => error.to_string(),
            };
            TextError::row(path, number, problem)
        })?;
        let given = record[label].trim();
        let label = given
            .parse()
            .map_err(|_| TextError::row(path, number, no_integer(format!("{given:?}"))))?;
        sink(number, Row { text: record[text].to_owned(), label })?;
    }
    // The reader takes the end of the file for the end of a quoted field.
    if quotes.get() % 2 == 1 {
        let problem =
            "has an odd number of quotes: it is cut off, or a quote in a field is not doubled";
        return Err(TextError::file(path, problem));
    }
    Ok(())
}

/// Counts the quotes that are read, and the bytes since the last row. Fails if these become too many.
struct Counting<R> {
    contents: R,
    quotes: Rc<Cell<usize>>,
    row_bytes: Rc<Cell<usize>>,
}

impl<R: Read> Read for Counting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.contents.read(buffer)?;
        let quotes = buffer[..len].iter().filter(|byte| **byte == b'"').count();
        self.quotes.set(self.quotes.get() + quotes);
        self.row_bytes.set(self.row_bytes.get() + len);
        match self.row_bytes.get() > MAX_ROW_BYTES {
            true => Err(io::Error::other(too_long())),
            false => Ok(len),
        }
    }
}
