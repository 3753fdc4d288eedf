//! Any text is trained on: files of any names, tables with columns of any names, and what is refused.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use paceline_data::text::{
    TableSettings, TextError, TextFiles, TextReport, TextRows, TextSource, TokenBlocks,
    TokenizerSource,
};
use paceline_data::{Dataset, OwnedSample, Split};
use parquet::basic::Compression;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

use crate::common::{write, write_parquet};

fn names(path: &Path) -> Vec<String> {
    let files = TextFiles::find_any(path).unwrap();
    let name = |file: &PathBuf| file.strip_prefix(path).unwrap_or(file).display().to_string();
    files.of(Split::Train).iter().map(name).collect()
}

/// The blocks of a part, and what was warned of.
fn blocks(
    path: &Path,
    table: &TableSettings,
    split: Split,
    test_samples: Option<usize>,
) -> Result<(TokenBlocks, Vec<String>), TextError> {
    let tokenizer = TokenizerSource::Bytes.load()?;
    let source = TextSource::new(TextFiles::find_any(path)?, tokenizer, None);
    let mut warnings = Vec::new();
    let report = TextReport { progress: &mut |_, _| (), warn: &mut |text| warnings.push(text) };
    let blocks = source.with_table(table.clone()).blocks(split, 4, test_samples, report)?;
    Ok((blocks, warnings))
}

/// The text of all blocks, without the tokens after the last whole one.
fn text(blocks: &TokenBlocks) -> String {
    let block = |at| OwnedSample::read(blocks, 0, at).unwrap().i64("inputs").to_vec();
    let bytes = (0..blocks.len()).flat_map(block).map(|token| token as u8);
    String::from_utf8(bytes.collect()).unwrap()
}

fn read(path: &Path, table: &TableSettings) -> Result<(String, Vec<String>), TextError> {
    let (blocks, warnings) = blocks(path, table, Split::Train, None)?;
    Ok((text(&blocks), warnings))
}

#[test]
fn a_folder_has_texts_of_any_names() {
    let folder = TempDir::new().unwrap();
    let empty = TextFiles::find_any(folder.path()).unwrap_err().to_string();
    assert!(empty.starts_with("found no .txt, .md, .jsonl, .csv or .parquet file in "), "{empty}");
    for name in ["b/c", ".hidden"] {
        fs::create_dir_all(folder.path().join(name)).unwrap();
    }
    for name in ["z.md", "b/c/a.txt", "b/1.jsonl", ".hidden/x.txt", ".x.txt", "picture.png"] {
        write(&folder, name, "");
    }
    symlink(folder.path(), folder.path().join("b/round")).unwrap();
    symlink(folder.path().join("z.md"), folder.path().join("linked.md")).unwrap();
    assert_eq!(names(folder.path()), ["b/1.jsonl", "b/c/a.txt", "linked.md", "z.md"]);
    let one = folder.path().join("picture.png");
    assert_eq!(names(&one), [""], "one file may have any name");
    // The usual names come first.
    write(&folder, "train.txt", "");
    assert_eq!(names(folder.path()), ["train.txt"]);
    let gone = TextFiles::find_any(&folder.path().join("gone")).unwrap_err().to_string();
    assert!(gone.contains("gone: No such file"), "{gone}");
}

#[test]
fn what_is_no_text_is_refused() {
    let folder = TempDir::new().unwrap();
    write(&folder, "a.txt", b"good \xff\xfe food");
    let refusal = || read(folder.path(), &TableSettings::default()).unwrap_err().to_string();
    assert!(refusal().contains("a.txt: ") && refusal().contains("UTF-8"), "{}", refusal());
    write(&folder, "a.txt", "abcd");
    let short = refusal();
    assert!(short.ends_with("has 4 tokens, too few for a sequence of 4 and the token after it"));
    // Nobody waits for its writer.
    fs::remove_file(folder.path().join("a.txt")).unwrap();
    mknodat(CWD, folder.path().join("a.txt"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    assert!(refusal().contains("a.txt: ") && refusal().contains("FIFO"), "{}", refusal());
    let one = folder.path().join("a.txt");
    assert!(read(&one, &TableSettings::default()).is_err());
}

#[test]
fn files_of_all_formats_are_one_running_text() {
    let folder = TempDir::new().unwrap();
    write(&folder, "a.md", "\u{feff}begin\n");
    write(&folder, "b.csv", "\u{feff}id,body\n1,one\n2,\"two,\nthree\"\n");
    write(&folder, "c.jsonl", "{\"body\": \"four\"}\n\n{\"body\": \"five\", \"x\": 1}\n");
    let table = TableSettings { text_column: "body".into(), ..TableSettings::default() };
    let (text, warnings) = read(folder.path(), &table).unwrap();
    let all = "begin\none\ntwo,\nthree\nfour\nfive\n";
    assert_eq!(text, all[..(all.len() - 1) / 4 * 4]);
    assert_eq!(warnings, Vec::<String>::new());
    let error = read(folder.path(), &TableSettings::default()).unwrap_err().to_string();
    assert!(error.ends_with("b.csv: has no column text; its columns are id, body"), "{error}");

    let parquet = folder.path().join("d.parquet");
    write_parquet(&parquet, Compression::SNAPPY, &["six", "seven"], &[9, 9]);
    let text = read(&parquet, &TableSettings::default()).unwrap().0;
    assert_eq!(text, "six\nseve", "labels are not looked at");
}

#[test]
fn the_last_blocks_are_held_out() {
    let folder = TempDir::new().unwrap();
    write(&folder, "a.txt", "aaaabbbbccccddddee");
    let part = |split, count| {
        blocks(folder.path(), &TableSettings::default(), split, Some(count)).map(|(of, _)| of)
    };
    assert_eq!(text(&part(Split::Train, 1).unwrap()), "aaaabbbbcccc");
    assert_eq!(text(&part(Split::Test, 1).unwrap()), "dddd");
    assert_eq!(text(&part(Split::Train, 3).unwrap()), "aaaa");
    assert_eq!(text(&part(Split::Test, 3).unwrap()), "bbbbccccdddd");
    for split in [Split::Train, Split::Test] {
        let error = part(split, 4).unwrap_err().to_string();
        assert!(error.contains("4 test samples are wanted") && error.contains("has 3 for them"));
    }
}

#[test]
fn bad_and_empty_rows_are_left_out_and_counted() {
    let folder = TempDir::new().unwrap();
    let table = TableSettings { skip_bad_rows: true, ..TableSettings::default() };
    for (name, contents, count, first) in [
        ("a.csv", "text,label\ngood,1\n,0\nx,y,z\nbad,0\nworse,7\n", 3, "row 2: the text is empty"),
        (
            "b.csv",
            "text,label\ngood,1\nbad,0\nmore,none\n",
            1,
            "row 3: the label \"none\" is not an",
        ),
        (
            "c.jsonl",
            "{\"text\": \"good\", \"label\": 1}\n{\"te\n{\"text\": 3, \"label\": 1}\n{\"text\": \"bad\", \"label\": 0}\n",
            2,
            "row 2: is not a JSON object",
        ),
    ] {
        let path = write(&folder, name, contents);
        let mut warnings = Vec::new();
        let mut warn = |text| warnings.push(text);
        let rows = TextRows::read_table(std::slice::from_ref(&path), 2, &table, &mut warn).unwrap();
        assert_eq!((rows.texts, rows.labels), (vec!["good".into(), "bad".into()], vec![1, 0]));
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        let expected =
            format!("{count} bad or empty rows were left out, the first one because of ");
        assert!(warning.contains(&expected) && warning.contains(first), "{warning}");
        TextRows::read(&[path], 2).unwrap_err();
    }
    let nothing = write(&folder, "d.csv", "text,label\n,0\n");
    let error = TextRows::read_table(&[nothing], 2, &table, &mut |_| ()).unwrap_err().to_string();
    assert!(error.ends_with("d.csv: has no rows"), "{error}");
    // A file that is cut off within quotes is refused all the same.
    let cut = write(&folder, "e.csv", "text,label\ngood,1\n\"bad,0\n");
    TextRows::read_table(&[cut], 2, &table, &mut |_| ()).unwrap_err();
}

#[test]
fn labels_may_be_words_and_files_may_have_no_header() {
    let folder = TempDir::new().unwrap();
    let table = TableSettings {
        text_column: "2".into(),
        label_column: Some("1".into()),
        label_names: vec!["bad".into(), "good".into()],
        has_header: false,
        skip_bad_rows: false,
    };
    let rows = |contents: &str| {
        let path = write(&folder, "rows.csv", contents);
        TextRows::read_table(&[path], 2, &table, &mut |_| ())
    };
    let read = rows("good,nice food\nbad,\"cold, late\"\n").unwrap();
    assert_eq!(
        (read.texts, read.labels),
        (vec!["nice food".into(), "cold, late".into()], vec![1, 0])
    );
    for (contents, expected) in [
        ("good,a\nso so,b\n", "rows.csv: row 2: the label so so is none of bad, good"),
        ("1,a\n", "rows.csv: row 1: the label 1 is none of bad, good"),
        ("good\n", "rows.csv: has no column 2; its columns are 1"),
        (
            "good,a\nbad\n",
            "rows.csv: row 2: has 1 fields, and the first row has 2; is the file cut off?",
        ),
    ] {
        let error = rows(contents).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{error}");
    }
    let named = TableSettings {
        text_column: "text".into(),
        label_column: Some("label".into()),
        ..table.clone()
    };
    let path = write(&folder, "rows.jsonl", "{\"text\": \"a\", \"label\": \"good\"}\n");
    assert_eq!(TextRows::read_table(&[path], 2, &named, &mut |_| ()).unwrap().labels, [1]);
}
