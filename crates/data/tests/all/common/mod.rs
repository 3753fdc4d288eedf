//! Files of texts for tests.
#![allow(dead_code, reason = "no test uses all of it")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_data::text::{TextFiles, TextSettings, TextSource, Tokenizer};
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use tempfile::TempDir;

pub const TEXTS: [&str; 5] =
    ["good food", "bad, \"bad\" food\nand more", "good", "more good food", "\u{e4} good"];

/// A tokenizer of words, which puts a token in front of each text. It states a truncation and a padding of its own.
pub const TOKENIZER: &str = r#"{
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    "added_tokens": [
        {"id": 6, "content": "[CLS]", "single_word": false, "lstrip": false, "rstrip": false,
         "normalized": false, "special": true}
    ],
    "normalizer": null,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [6], "tokens": ["[CLS]"]}}
    },
    "decoder": null,
    "model": {"type": "WordLevel", "unk_token": "?",
              "vocab": {"?": 0, "good": 1, "bad": 2, "food": 3, "more": 4, "and": 5}}
}"#;

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
pub fn source(folder: &TempDir, tokenizer: &Path, cache: Option<PathBuf>) -> TextSource {
    let files = TextFiles::find(folder.path()).unwrap();
    TextSource::new(files, Tokenizer::load(tokenizer).unwrap(), cache)
}

pub fn settings(seed: u64, train: Option<usize>, test: Option<usize>) -> TextSettings {
    let (train_samples, test_samples) = (train, test);
    TextSettings { max_length: 64, num_classes: 2, seed, train_samples, test_samples }
}
