//! Texts with labels in Parquet files.
//!
//! Input: a file whose pages are uncompressed, or compressed by Snappy, gzip, LZ4 or Zstandard. Output: rows. This module
//! checks no label's range.

mod delta;
mod groups;
mod pages;

use std::fs::File;
use std::io::{self, BufReader, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::file::reader::RowGroupReader;
use parquet::record::Field;
use parquet::schema::types::Type;

use crate::text::error::excerpt;
use crate::text::guarded::guarded;
use crate::text::row::{Label, MAX_TEXT_BYTES, Sink, TextRow, column, no_integer};
use crate::text::{TableSettings, TextError};
use groups::RowGroup;

/// The most bytes of the texts of a file for each byte of the file, and how many are read of a small file. Texts compress
/// to a fifth; those of a few words that repeat, in a dictionary, to less.
const MOST_PER_BYTE: u64 = 64;
const ALWAYS_BYTES: u64 = 128 << 20;
/// Bytes of a row in addition to those of its text: where the text lies, the label, and the heap's overhead.
const ROW_BYTES: u64 = 64;

/// Reads the rows of a file. Other columns than those of `table` are not read.
pub(super) fn read(path: &Path, table: &TableSettings, sink: Sink<'_>) -> Result<(), TextError> {
    // The library panics on some damaged files.
    let broken = |error: String| TextError::file(path, library(&error));
    guarded(|| read_rows(path, table, sink)).map_err(broken)?
}

/// An error of the library, in words of this program.
fn library(error: &str) -> String {
    // The library says of some errors that they are its own.
    let error = error.strip_prefix("Parquet error: ").unwrap_or(error);
    format!("{}; is the file damaged or cut off, or not a Parquet file?", excerpt(error))
}

/// Checks the pages of these columns.
fn check_pages(
    file: &Arc<File>,
    metadata: &ParquetMetaData,
    columns: &[usize],
) -> Result<(), String> {
    let mut first_row = 1i64;
    let names = metadata.file_metadata().schema().get_fields();
    let wanted: Vec<&str> = columns.iter().map(|at| names[*at].name()).collect();
    for group in metadata.row_groups() {
        for (number, chunk) in group.columns().iter().enumerate() {
            // The parts of a nested column have its name first.
            let path = chunk.column_path().parts();
            if !path.first().is_some_and(|name| wanted.contains(&name.as_str())) {
                continue;
            }
            let start = chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset());
            let (start, len) = (u64::try_from(start), u64::try_from(chunk.compressed_size()));
            let (Ok(start), Ok(len)) = (start, len) else {
                return Err("a column has a negative offset or length; the file is damaged, so write it again".to_owned());
            };
            let codec = match chunk.compression() {
                Compression::BROTLI(_) => "Brotli",
                Compression::LZO => "LZO",
                _ => "",
            };
            if !codec.is_empty() {
                return Err(format!(
                    "column {} is compressed by {codec}, which is not read; write the file with Zstandard, Snappy, gzip, \
                     LZ4 or without compression",
                    path.join(".")
                ));
            }
            let mut bytes = BufReader::new(&**file);
            bytes.seek(SeekFrom::Start(start)).map_err(|error| error.to_string())?;
            let mut check = || {
                if pages::check(&mut bytes, len, chunk.compression(), first_row)? {
                    let group = RowGroup { file: file.clone(), metadata: group };
                    let pages = group.get_column_page_reader(number);
                    let mut pages = pages.map_err(|error| error.to_string())?;
                    delta::check(&mut *pages, chunk.column_descr())?;
                }
                Ok(())
            };
            check().map_err(|problem: String| format!("column {}: {problem}", path.join(".")))?;
        }
        first_row = first_row.saturating_add(group.num_rows());
    }
    Ok(())
}

fn read_rows(path: &Path, table: &TableSettings, sink: Sink<'_>) -> Result<(), TextError> {
    let broken =
        |error: parquet::errors::ParquetError| TextError::file(path, library(&error.to_string()));
    let open = || {
        let file = paceline_files::open(path)?;
        Ok::<_, io::Error>((file.metadata()?.len(), Arc::new(file)))
    };
    let (len, file) = open().map_err(|error| TextError::file(path, error))?;
    let most_bytes = len.saturating_mul(MOST_PER_BYTE).max(ALWAYS_BYTES);
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&*file).map_err(broken)?;
    let schema = metadata.file_metadata().schema();
    let present: Vec<String> =
        schema.get_fields().iter().map(|field| field.name().to_owned()).collect();
    let columns = table.columns().map(|name| column(path, &present, name));
    let columns = columns.collect::<Result<Vec<usize>, _>>()?;
    check_pages(&file, &metadata, &columns).map_err(|problem| TextError::file(path, problem))?;
    let mut num_bytes = 0;
    let fields = columns.iter().map(|at| schema.get_fields()[*at].clone()).collect();
    let projection = Type::group_type_builder(schema.name()).with_fields(fields).build();
    let projection = projection.map_err(broken)?;
    let mut number = 0;
    for metadata in metadata.row_groups() {
        let group = RowGroup { file: file.clone(), metadata };
        let rows = group.get_row_iter(Some(projection.clone())).map_err(broken)?;
        // A value keeps the page that it lies in, so of a column one value is read at a time.
        for row in rows.with_batch_size(1) {
            number += 1;
            let row = row.map_err(|error| {
                TextError::file(path, format!("row {number}: {}", library(&error.to_string())))
            })?;
            let row = row_of(row.get_column_iter(), table);
            num_bytes += row.as_ref().map_or(0, |row| row.text.len()) as u64 + ROW_BYTES;
            if num_bytes > most_bytes {
                let problem = format!(
                    "the rows up to here take {} MB, more than {MOST_PER_BYTE} times the file; divide the file",
                    num_bytes / 1_000_000
                );
                return Err(TextError::row(path, number, problem));
            }
            sink(number, row)?;
        }
    }
    Ok(())
}

/// The row that the values of its columns make.
fn row_of<'a>(
    columns: impl Iterator<Item = (&'a String, &'a Field)>,
    table: &TableSettings,
) -> Result<TextRow, String> {
    let (mut text, mut label) = (None, None);
    for (name, field) in columns {
        match (*name == table.text_column, field) {
            (_, Field::Null) => {}
            (true, Field::Str(value)) => {
                text = Some(value[..value.ceil_char_boundary(MAX_TEXT_BYTES)].to_owned());
            }
            (true, other) => {
                return Err(format!("the text {} is not a string", excerpt(&other.to_string())));
            }
            (false, Field::Str(word)) => label = Some(Label::Word(word.clone())),
            (false, other) => {
                let number = integer(other).ok_or_else(|| no_integer(other))?;
                label = Some(Label::Number(number));
            }
        }
    }
    match (text, label, &table.label_column) {
        (Some(text), label, None) => Ok(TextRow { text, label }),
        (Some(text), Some(label), _) => Ok(TextRow { text, label: Some(label) }),
        _ => Err("lacks its text or its label".to_owned()),
    }
}

/// The value of a field of integers, whatever their width.
fn integer(field: &Field) -> Option<i64> {
    match field {
        Field::Byte(value) => Some(i64::from(*value)),
        Field::Short(value) => Some(i64::from(*value)),
        Field::Int(value) => Some(i64::from(*value)),
        Field::Long(value) => Some(*value),
        Field::UByte(value) => Some(i64::from(*value)),
        Field::UShort(value) => Some(i64::from(*value)),
        Field::UInt(value) => Some(i64::from(*value)),
        Field::ULong(value) => i64::try_from(*value).ok(),
        _ => None,
    }
}
