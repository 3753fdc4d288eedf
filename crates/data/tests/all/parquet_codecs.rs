//! Parquet files as pyarrow writes them with Zstandard, LZ4 and Brotli (`fixtures/make_parquet.py`), and damaged ones.

use std::fs;
use std::path::{Path, PathBuf};

use paceline_data::text::{TableSettings, TextError, TextRows};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet");
    folder.join(format!("{name}.parquet"))
}

/// The rows of a file. Those without a text are left out, and the one with an empty text.
fn read(path: PathBuf) -> Result<TextRows, TextError> {
    let label_names = vec!["bad".to_owned(), "good".to_owned()];
    let table = TableSettings { label_names, skip_bad_rows: true, ..TableSettings::default() };
    TextRows::read_table(&[path], 2, &table, &mut |_| {})
}

#[test]
fn files_with_zstandard_and_lz4_are_read() {
    let long = "good ".repeat(300);
    let texts =
        ["good food", "bad food", "gutes Essen, süß", "good food", &long, "bad food", "good food"];
    for codec in ["zstd", "lz4"] {
        for version in ["v1", "v2", "v1_dictionary", "v2_dictionary"] {
            let name = format!("{codec}_{version}");
            let rows = read(fixture(&name)).unwrap();
            assert_eq!(rows.texts, texts, "{name}");
            assert_eq!(rows.labels, [1, 0, 1, 1, 1, 0, 1], "{name}");
        }
    }
}

#[test]
fn damaged_files_are_refused_with_their_name_and_the_fix() {
    let folder = TempDir::new().unwrap();
    let damage = |name: &str, change: fn(&mut [u8])| {
        let mut contents = fs::read(fixture(name)).unwrap();
        change(&mut contents);
        let path = folder.path().join("a.parquet");
        fs::write(&path, contents).unwrap();
        let error = read(path).unwrap_err().to_string();
        let folder = folder.path().display().to_string();
        error.replace(&format!("{folder}/"), "")
    };
    // The frames of pyarrow have their length after a byte of flags, and then a block, whose lowest bit says that it is the last.
    let cut_off = damage("zstd_v1", |file| frame(file)[6] &= !1);
    let too_large = damage("zstd_v1", |file| {
        frame(file)[4] = 0xe0;
        frame(file)[5..13].copy_from_slice(&10_000_000_000u64.to_le_bytes());
    });
    let checksum = damage("zstd_v1", |file| {
        let at = file.windows(9).position(|bytes| bytes == b"good food").unwrap();
        file[at] = b'f';
    });
    let brotli = damage("brotli_v1", |_| {});
    for (message, begin, end) in [
        (
            &cut_off,
            "a.parquet: column text: a page does not unpack (",
            "; the file is damaged, so write it again",
        ),
        (&too_large, "a.parquet: column text: a page does not unpack (", "so write it again"),
        (
            &checksum,
            "a.parquet: Page CRC checksum mismatch",
            "; is the file damaged or cut off, or not a Parquet file?",
        ),
        (
            &brotli,
            "a.parquet: column label is compressed by Brotli, which is not read",
            "write the file with Zstandard, Snappy, gzip, LZ4 or without compression",
        ),
    ] {
        assert!(message.starts_with(begin) && message.ends_with(end), "{message}");
    }
    assert!(too_large.contains("10000000000"), "{too_large}");
}

/// The frame with the first text, from its magic number.
fn frame(file: &mut [u8]) -> &mut [u8] {
    let text = file.windows(9).position(|bytes| bytes == b"good food").unwrap();
    let begin = file[..text].windows(4).rposition(|bytes| bytes == [0x28, 0xb5, 0x2f, 0xfd]);
    &mut file[begin.unwrap()..]
}
