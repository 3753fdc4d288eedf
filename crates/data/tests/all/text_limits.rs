//! How much of a file of texts is read, and in which encodings.

use std::fmt::Write;
use std::fs;

use paceline_data::text::{TextReport, TextRows, TextSettings};
use paceline_data::{OwnedSample, Split};
use parquet::basic::{Compression, Encoding};
use parquet::file::properties::{WriterProperties, WriterVersion};
use tempfile::TempDir;

use crate::common::{settings, source, write, write_parquet, write_parquet_with};

/// The most bytes of a text, unless its last character reaches beyond.
const MOST: usize = 8 << 20;

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

/// As Python writes it by default: all other characters than those of ASCII are escapes.
fn escaped(text: &str) -> String {
    let mut written = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => written += "\\\"",
            '\n' => written += "\\n",
            ' '..='~' => written.push(character),
            _ => {
                let mut units = [0; 2];
                for unit in character.encode_utf16(&mut units) {
                    write!(written, "\\u{unit:04x}").unwrap();
                }
            }
        }
    }
    written + "\""
}

/// The kept part is the same wherever the cut falls, and the fields and rows after it are read.
#[test]
fn a_long_text_keeps_its_beginning() {
    let folder = TempDir::new().unwrap();
    let unit = "\u{e4}\"\u{20ac}\u{1f600}\n";
    for shift in 0..unit.len() {
        let text = "x".repeat(MOST - 300 + shift) + &unit.repeat(200);
        let kept = &text[..text.ceil_char_boundary(MOST)];
        assert!(kept.len() < text.len());
        let parquet = folder.path().join("a.parquet");
        write_parquet(&parquet, Compression::SNAPPY, &["good", &text, "bad"], &[1, 0, 1]);
        let csv = format!("text,label,more\ngood,1,\n{},0,x\nbad,1,\"\"\n", quoted(&text));
        let lines = |long: String| {
            format!(
                "{{\"text\":\"good\",\"label\":1}}\n{{\"text\":{long},\"label\":0}}\n{{\"label\":1,\"text\":\"bad\"}}"
            )
        };
        for path in [
            write(&folder, "a.csv", csv),
            write(&folder, "a.jsonl", lines(escaped(&text))),
            write(&folder, "b.jsonl", lines(escaped(&text).replace("\\u20ac", "\u{20ac}"))),
            parquet,
        ] {
            let rows = TextRows::read(std::slice::from_ref(&path), 2).unwrap();
            assert_eq!(rows.labels, [1, 0, 1], "{path:?}");
            let lens: Vec<usize> = rows.texts.iter().map(String::len).collect();
            assert_eq!(lens, [4, kept.len(), 3], "{path:?}, moved by {shift}");
            assert!(rows.texts[1] == kept, "{path:?}, moved by {shift}");
        }
    }
}

/// More than a row may have: what is not kept is not held either.
#[test]
fn a_text_may_have_any_size() {
    let folder = TempDir::new().unwrap();
    let text = "good ".repeat(7 << 20);
    let markup = "a b\"\"".repeat(7 << 20);
    for path in [
        write(&folder, "a.csv", format!("html,text,label\n\"{markup}\",{text},0\n,bad,1\n")),
        write(
            &folder,
            "a.jsonl",
            format!(
                "{{\"html\":\"{markup}\",\"text\":\"{text}\",\"label\":0}}\n{{\"text\":\"bad\",\"label\":1}}",
                markup = markup.replace('"', "\\\"")
            ),
        ),
    ] {
        let rows = TextRows::read(std::slice::from_ref(&path), 2).unwrap();
        assert_eq!((rows.texts[0].len(), rows.texts[1].as_str()), (MOST, "bad"), "{path:?}");
        assert!(text.starts_with(&rows.texts[0]));
    }
}

/// The mark hides no quote: a field that seems to have no end would be cut with all rows in it.
#[test]
fn a_mark_of_byte_order_moves_no_field() {
    let folder = TempDir::new().unwrap();
    let rows = "x,good food,1\n".repeat(700_000);
    let path = write(&folder, "a.csv", format!("\u{feff}\"a,\",text,label\n{rows}"));
    assert_eq!(TextRows::read(&[path], 2).unwrap().texts.len(), 700_000);
}

/// Bytes outside of fields cannot be cut.
#[test]
fn rows_have_a_largest_size() {
    let folder = TempDir::new().unwrap();
    let commas = ",".repeat((8 << 20) + 1);
    for path in [
        write(&folder, "a.csv", format!("text,label\ngood,1\nbad,0{commas}\n")),
        write(
            &folder,
            "a.jsonl",
            format!(
                "{{\"text\":\"a\",\"label\":1}}\n{{\"text\":\"b\",\"label\":0,\"more\":[{commas}"
            ),
        ),
    ] {
        let error = TextRows::read(&[path], 2).unwrap_err().to_string();
        assert!(error.contains("row 2: has more than 32 MiB although"), "{error}");
        assert!(error.ends_with("leave only the columns text and label in the file"), "{error}");
    }
}

/// Tokens are those of the whole text, and a warning says where they cannot be.
#[test]
fn a_long_text_has_the_tokens_of_the_whole_text() {
    let folder = TempDir::new().unwrap();
    let tokenizer = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "Whitespace"}, "decoder": null, "truncation": null, "padding": null,
        "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "good": 1, "bad": 2}}}"#;
    let tokenizer = write(&folder, "tokenizer.json", tokenizer);
    let settings = TextSettings { max_length: 3, ..settings(1, None, None) };
    let check = |text: String, expected: &[i64], warnings: &[&str]| {
        write(&folder, "train.csv", format!("text,label\n{text},0\n"));
        let mut warned = Vec::new();
        let mut warn = |warning| warned.push(warning);
        let report = TextReport { progress: &mut |_, _| (), warn: &mut warn };
        let source = source(&folder, &tokenizer, None);
        let dataset = source.classified(Split::Train, &settings, report).unwrap();
        assert_eq!(OwnedSample::read(&dataset, 0, 0).unwrap().i64("inputs"), expected);
        assert_eq!(warned, warnings);
    };
    check("bad good ".repeat(MOST / 9 + 100), &[2, 1, 2], &[]);
    let spaces = " ".repeat(MOST);
    check(
        format!("good {spaces}bad"),
        &[1],
        &[
            "1 of 1 texts were cut to their first 8 MiB, which have fewer than 3 tokens; the rest of these texts is not \
           used",
        ],
    );
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

#[test]
fn texts_as_lengths_and_as_differences_are_read() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.parquet");
    // Several blocks of lengths of different widths, and a page whose last block is not full.
    let texts: Vec<String> =
        (0..1000).map(|n| format!("good {}", "f\u{f6}od ".repeat(n * n % 97))).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let labels = vec![1; texts.len()];
    for encoding in [Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY] {
        for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
            for compression in [
                Compression::UNCOMPRESSED,
                Compression::SNAPPY,
                Compression::GZIP(Default::default()),
            ] {
                for is_optional in [false, true] {
                    let properties = WriterProperties::builder()
                        .set_compression(compression)
                        .set_writer_version(version)
                        .set_dictionary_enabled(false)
                        .set_encoding(encoding)
                        .set_column_encoding("label".into(), Encoding::PLAIN)
                        .set_column_encoding("other".into(), Encoding::PLAIN)
                        .build();
                    write_parquet_with(&path, properties, is_optional, &texts, &labels);
                    let rows = TextRows::read(std::slice::from_ref(&path), 2).unwrap();
                    let what = (encoding, version, compression, is_optional);
                    assert!(rows.texts == texts, "{what:?}");
                    assert_eq!(rows.labels, labels, "{what:?}");
                }
            }
        }
    }
}

/// A page is read as a whole, and a text lies in one page.
#[test]
fn a_page_that_is_too_large_is_named_by_its_first_row() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.parquet");
    let text = "good ".repeat((65 << 20) / 5);
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_dictionary_enabled(false)
        .set_data_page_size_limit(1)
        .set_write_batch_size(1)
        .build();
    let texts = ["good", "bad", "good", &text, "bad"];
    write_parquet_with(&path, properties, false, &texts, &[1, 0, 1, 0, 0]);
    let error = TextRows::read(&[path], 2).unwrap_err().to_string();
    let expected = "the page that begins with row 4 has 65 MiB, and at most 64 MiB are read, because a page is read as \
                    a whole; write the file with smaller pages, or with shorter texts";
    assert!(error.ends_with(expected), "{error}");
}
