//! Files of texts for tests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_data::text::{TextFiles, TextSource, Tokenizer};
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use tempfile::TempDir;

pub fn write(folder: &TempDir, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, contents).unwrap();
    path
}

pub fn write_parquet(path: &Path, compression: Compression, texts: &[&str], labels: &[i64]) {
    let properties = WriterProperties::builder().set_compression(compression).build();
    write_parquet_with(path, properties, false, texts, labels);
}

/// Texts that are optional have a level in front of them, as those of most programs do.
pub fn write_parquet_with(
    path: &Path,
    properties: WriterProperties,
    is_optional: bool,
    texts: &[&str],
    labels: &[i64],
) {
    let repetition = if is_optional { "optional" } else { "required" };
    let schema = format!(
        "message rows {{ required int64 label; {repetition} binary text (UTF8); required int64 other; }}"
    );
    let schema = Arc::new(parse_message_type(&schema).unwrap());
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    // Two row groups.
    for rows in [0..2, 2..texts.len()] {
        let mut group = writer.next_row_group().unwrap();
        let texts: Vec<ByteArray> = texts[rows.clone()].iter().map(|t| (*t).into()).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&labels[rows.clone()], None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let levels = vec![1; texts.len()];
        let levels = is_optional.then_some(&levels[..]);
        column.typed::<ByteArrayType>().write_batch(&texts, levels, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&labels[rows], None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// The texts of a folder, with the tokenizer of a file.
#[allow(dead_code, reason = "not every test has such a tokenizer")]
pub fn source(folder: &TempDir, tokenizer: &Path, cache: Option<PathBuf>) -> TextSource {
    let files = TextFiles::find(folder.path()).unwrap();
    TextSource::new(files, Tokenizer::load(tokenizer).unwrap(), cache)
}
