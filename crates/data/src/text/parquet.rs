//! Texts with labels in Parquet files.
//!
//! Input: a file whose pages are uncompressed, or compressed by Snappy or gzip. Output: rows. This module checks no
//! label's range.

use std::fs::File;
use std::path::Path;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;

use super::TextError;
use super::rows::{Row, Sink, column};

/// Reads the rows of a file. Columns other than `text` and `label` are not read.
pub(super) fn read(path: &Path, sink: Sink<'_>) -> Result<(), TextError> {
    let broken = |error: parquet::errors::ParquetError| {
        let error = error.to_string();
        // The library says of some errors that they are its own.
        let error = error.strip_prefix("Parquet error: ").unwrap_or(&error);
        TextError::file(path, format!("{error}; is the file cut off, or not a Parquet file?"))
    };
    let file = File::open(path).map_err(|error| TextError::file(path, error))?;
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    let schema = reader.metadata().file_metadata().schema();
    let present: Vec<String> =
        schema.get_fields().iter().map(|field| field.name().to_owned()).collect();
    let columns = [column(path, &present, "text")?, column(path, &present, "label")?];
    let fields = columns.map(|at| schema.get_fields()[at].clone()).to_vec();
    let projection = Type::group_type_builder(schema.name()).with_fields(fields).build();
    let rows = projection.and_then(|projection| reader.get_row_iter(Some(projection)));
    for (number, row) in (1..).zip(rows.map_err(broken)?) {
        let problem = |problem: String| TextError::row(path, number, problem);
        let row = row.map_err(|error| problem(error.to_string()))?;
        let (mut text, mut label) = (None, None);
        for (name, field) in row.get_column_iter() {
            match (name.as_str(), field) {
                ("text", Field::Str(value)) => text = Some(value.clone()),
                ("text", other) => {
                    return Err(problem(format!("the text {other} is not a string")));
                }
                (_, field) => {
                    let Some(integer) = integer(field) else {
                        return Err(problem(format!("the label {field} is not an integer")));
                    };
                    label = Some(integer);
                }
            }
        }
        let (Some(text), Some(label)) = (text, label) else {
            return Err(problem("lacks its text or its label".to_owned()));
        };
        sink(number, Row { text, label })?;
    }
    Ok(())
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
