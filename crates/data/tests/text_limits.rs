//! How much of a file of texts is read.

mod common;

use std::fs;

use paceline_data::text::TextRows;
use parquet::basic::Compression;
use tempfile::TempDir;

use common::{write, write_parquet};

#[test]
fn rows_have_a_largest_size() {
    let folder = TempDir::new().unwrap();
    let text = "good ".repeat((8 << 20) / 5 + 4000);
    let parquet = folder.path().join("a.parquet");
    write_parquet(&parquet, Compression::SNAPPY, &["good", &text, "bad"], &[1, 0, 1]);
    for path in [
        write(&folder, "a.csv", format!("text,label\ngood,1\n{text},0\n")),
        write(&folder, "a.jsonl", format!("{{\"text\":\"a\",\"label\":1}}\n{{\"text\":\"{text}\"")),
        parquet,
    ] {
        let error = TextRows::read(&[path], 2).unwrap_err().to_string();
        assert!(error.contains("row 2: "), "{error}");
        assert!(
            error.contains("has more than 8 MiB; texts are cut to a number of tokens"),
            "{error}"
        );
    }
}

/// A small file whose texts repeat has much more text than bytes.
#[test]
fn a_parquet_file_has_a_budget_of_memory() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.parquet");
    let text = "good food ".repeat(4_000);
    let rows = vec![text.as_str(); 4_000];
    write_parquet(&path, Compression::GZIP(Default::default()), &rows, &vec![1; 4_000]);
    assert!(fs::metadata(&path).unwrap().len() < 1_000_000);
    let error = TextRows::read(&[path], 2).unwrap_err().to_string();
    assert!(error.contains("MB, more than 64 times the file; divide the file"), "{error}");
}

/// Rows without text take memory, too.
#[test]
fn rows_of_a_parquet_file_count_even_if_their_texts_are_empty() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.parquet");
    let num_rows = 2_200_000;
    write_parquet(&path, Compression::SNAPPY, &vec![""; num_rows], &vec![1; num_rows]);
    let error = TextRows::read(&[path], 2).unwrap_err().to_string();
    assert!(error.contains("MB, more than 64 times the file; divide the file"), "{error}");
}
