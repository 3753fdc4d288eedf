//! Texts in files of one text per line.
//!
//! Input: the contents of a file. Output: rows without a label. Long lines are cut. An empty line is an empty text.

use std::io::{BufRead, Read};
use std::path::Path;

use crate::text::TextError;
use crate::text::row::{MAX_ROW_BYTES, MAX_TEXT_BYTES, Sink, TextRow, not_utf8};

/// Reads the lines of a file. Errors name the file `path`.
pub(in crate::text) fn read(
    path: &Path,
    mut contents: impl BufRead,
    sink: Sink<'_>,
) -> Result<(), TextError> {
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = contents.by_ref().take(MAX_ROW_BYTES as u64 + 1).read_until(b'\n', &mut line);
        if read.map_err(|error| TextError::file(path, error))? == 0 {
            break;
        }
        let refused = |problem: String| TextError::file(path, format!("line {number}: {problem}"));
        if line.len() > MAX_ROW_BYTES {
            return Err(refused(format!("has more than {} MiB", MAX_ROW_BYTES >> 20)));
        }
        let text = str::from_utf8(&line);
        let text = text.map_err(|error| refused(not_utf8(error)))?.trim_end_matches(['\n', '\r']);
        let text = text[..text.ceil_char_boundary(MAX_TEXT_BYTES)].to_owned();
        sink(number, Ok(TextRow { text, label: None }))?;
    }
    Ok(())
}
