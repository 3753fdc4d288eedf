//! Texts from files of every format become the same samples, and what is wrong with a file is said with its row.

use std::fs;
use std::path::PathBuf;

use paceline_data::text::{
    FORMATS, TextError, TextFiles, TextReport, TextRows, TextSettings, TextSource, Tokenizer,
};
use paceline_data::{Dataset, OwnedSample, Split};
use parquet::basic::Compression;
use tempfile::TempDir;

use crate::common::{TEXTS, TOKENIZER, settings, source, write, write_parquet};

const LABELS: [i64; 5] = [1, 0, 1, 1, 0];

fn csv() -> String {
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let rows =
        TEXTS.iter().zip(LABELS).map(|(text, label)| format!("{label},{},x\n", quoted(text)));
    ["label,text,other\n".to_owned()].into_iter().chain(rows).collect()
}

fn jsonl() -> String {
    let rows = TEXTS.iter().zip(LABELS);
    rows.map(|(text, label)| format!("{{\"text\": {text:?}, \"label\": {label}}}\n"))
        .collect::<String>()
        // Rust writes it in another way than JSON.
        .replace("\\u{e4}", "\\u00e4")
}

#[test]
fn every_format_has_the_same_rows() {
    let folder = TempDir::new().unwrap();
    let mut paths = vec![write(&folder, "a.csv", csv()), write(&folder, "a.jsonl", jsonl())];
    for (name, compression) in [
        ("plain", Compression::UNCOMPRESSED),
        ("snappy", Compression::SNAPPY),
        ("gzip", Compression::GZIP(Default::default())),
    ] {
        let path = folder.path().join(format!("{name}.parquet"));
        write_parquet(&path, compression, &TEXTS, &LABELS);
        paths.push(path);
    }
    for path in &paths {
        let rows = TextRows::read(std::slice::from_ref(path), 2).unwrap();
        assert_eq!(rows.texts, TEXTS, "{path:?}");
        assert_eq!(rows.labels, LABELS, "{path:?}");
    }
    let all = TextRows::read(&paths, 2).unwrap();
    assert_eq!(all.texts.len(), 25);
}

#[test]
fn the_page_about_texts_names_every_format() {
    let page = include_str!("../../../../docs/language-models.md");
    for format in FORMATS {
        assert!(page.contains(&format!("`.{}`", format.ending)), "{}", format.ending);
    }
}

#[test]
fn an_error_names_the_file_and_the_row() {
    let folder = TempDir::new().unwrap();
    let message = |name: &str, contents: &[u8], classes| {
        let path = write(&folder, name, contents);
        let error = TextRows::read(&[path], classes).unwrap_err().to_string();
        let folder = folder.path().display().to_string();
        let error = error.replace(&format!("{folder}/"), "");
        error.strip_prefix(&format!("{name}: ")).expect("it names the file").to_owned()
    };
    let csv = csv();
    let parquet = folder.path().join("whole.parquet");
    write_parquet(&parquet, Compression::SNAPPY, &TEXTS, &LABELS);
    let parquet = fs::read(parquet).unwrap();
    let damaged = "is the file damaged or cut off, or not a Parquet file?";
    for (name, contents, expected) in [
        (
            "a.csv",
            "text,stars\nx,1\n".as_bytes(),
            "has no column label; its columns are text, stars",
        ),
        ("a.csv", b"text,label\nx,1\ny,one\n", "row 2: the label \"one\" is not an integer"),
        ("a.csv", b"text,label\nx,1.0\n", "row 1: the label \"1.0\" is not an integer"),
        (
            "a.csv",
            b"text,label\nx,2\n",
            "row 1: the label is 2, not one of the 2 classes from 0 to 1",
        ),
        ("a.csv", b"text,label\nx,-1\n", "row 1: the label is -1, not one of the 2 classes"),
        (
            "a.csv",
            b"text,label\nx\n",
            "1: has 1 fields, and the header has 2; is the file cut off?",
        ),
        ("a.csv", b"label,text\n0,\"x\n1,y\n", "has an odd number of quotes: it is cut off"),
        ("a.csv", b"text,label\n", "has no rows"),
        ("a.csv", b"", "has no column text"),
        ("a.csv", b"text,label\n\xff,1\n", "row 1: "),
        ("a.csv", &csv.as_bytes()[..csv.len() - 8], "row 5: has 2 fields"),
        ("a.jsonl", b"{\"text\": \"x\"}\n", "has no column label; its columns are text"),
        ("a.jsonl", b"{\"text\": 3, \"label\": 1}\n", "row 1: the text 3 is not a string"),
        (
            "a.jsonl",
            b"\n{\"text\": \"x\", \"label\": 0.5}",
            "row 2: the label 0.5 is not an integer",
        ),
        ("a.jsonl", b"{\"text\": \"x\", \"la", "; is the file cut off?"),
        ("a.jsonl", b"[1]\n", "row 1: is not a JSON object"),
        ("a.parquet", b"PAR1", damaged),
        ("a.parquet", &parquet[..parquet.len() - 9], damaged),
        ("a.txt", b"x", "plain text has no labels"),
    ] {
        let message = message(name, contents, 2);
        assert!(message.contains(expected), "{message}\nlacks {expected}");
    }
    let one_class = message("a.parquet", &parquet, 1);
    assert_eq!(one_class, "row 1: the label is 1, not one of the 1 classes from 0 to 0");
}

#[test]
fn files_are_found_by_the_beginning_of_their_names() {
    let folder = TempDir::new().unwrap();
    let find = || TextFiles::find(folder.path());
    let error = find().unwrap_err().to_string();
    assert!(error.starts_with("found no train*.parquet, train*.csv or train*.jsonl"), "{error}");
    for name in ["train-1.csv", "train-0.csv", "test.csv", "validation.csv", "train.md"] {
        write(&folder, name, "");
    }
    let files = find().unwrap();
    let names = |split| -> Vec<_> {
        files.of(split).iter().map(|path| path.file_name().unwrap().to_string_lossy()).collect()
    };
    assert_eq!(names(Split::Train), ["train-0.csv", "train-1.csv"]);
    assert_eq!(names(Split::Test), ["test.csv"]);
    write(&folder, "train-2.jsonl", "");
    let error = find().unwrap_err().to_string();
    assert!(error.contains("train-2.jsonl have different formats"), "{error}");
}

#[test]
fn files_may_be_in_the_only_subfolder_that_has_them() {
    let folder = TempDir::new().unwrap();
    for name in ["tokens", "yelp", "other"] {
        std::fs::create_dir(folder.path().join(name)).unwrap();
    }
    write(&folder, "yelp/train-00000-of-00001.csv", "");
    write(&folder, "yelp/test.csv", "");
    write(&folder, "other/test.csv", "");
    let files = TextFiles::find(folder.path()).unwrap();
    assert_eq!(files.folder(), folder.path().join("yelp"));
    assert_eq!((files.of(Split::Train).len(), files.of(Split::Test).len()), (1, 1));
    write(&folder, "other/train.csv", "");
    let error = TextFiles::find(folder.path()).unwrap_err().to_string();
    assert!(error.contains("/other and ") && error.contains("/yelp both have files"), "{error}");
    // The folder itself comes first.
    write(&folder, "train.csv", "");
    assert_eq!(TextFiles::find(folder.path()).unwrap().folder(), folder.path());
}

/// A folder with the files of both parts, `train` with 40 rows and, unless it is empty, `test` with 8.
fn folder_of_rows(has_test: bool) -> TempDir {
    let folder = TempDir::new().unwrap();
    let row = |at: usize| format!("good{},{}\n", " food".repeat(at), at % 2);
    let rows = |range: std::ops::Range<usize>| range.map(row).collect::<String>();
    write(&folder, "train-0.csv", format!("text,label\n{}", rows(0..20)));
    write(&folder, "train-1.csv", format!("text,label\n{}", rows(20..40)));
    if has_test {
        write(&folder, "test.csv", format!("text,label\n{}", rows(0..8)));
    }
    write(&folder, "tokenizer.json", TOKENIZER);
    folder
}

/// The lengths of the samples of a part, whether progress was reported, and the warnings.
fn open(
    folder: &TempDir,
    split: Split,
    settings: &TextSettings,
) -> Result<(Vec<u32>, bool, Vec<String>), TextError> {
    let cache = Some(folder.path().join("cache"));
    let tokenizer = Tokenizer::load(&folder.path().join("tokenizer.json"))?;
    let source = TextSource::new(TextFiles::find(folder.path())?, tokenizer, cache);
    let (mut made, mut warnings) = (false, Vec::new());
    let report =
        TextReport { progress: &mut |_, _| made = true, warn: &mut |text| warnings.push(text) };
    let data = source.classified(split, settings, report)?;
    for index in 0..data.len() {
        let mut sample = OwnedSample::read(&data, 0, index).unwrap();
        let (tokens, length) = (sample.i64("inputs"), sample.length().unwrap());
        assert_eq!(tokens.len(), length);
        assert_eq!(tokens[..2], [6, 1]);
        assert!(tokens[2..].iter().all(|token| *token == 3));
        // A row has as many words `food` as its number says.
        assert_eq!(sample.i64("targets"), [(length as i64 - 2) % 2]);
    }
    Ok((data.lengths().unwrap(), made, warnings))
}

#[test]
fn the_seed_and_the_numbers_choose_the_rows() {
    let folder = folder_of_rows(true);
    let lengths = |split, settings| open(&folder, split, &settings).unwrap().0;
    let sorted = |mut lengths: Vec<u32>| {
        lengths.sort_unstable();
        lengths
    };
    let all = lengths(Split::Train, settings(1, None, None));
    assert_eq!(sorted(all.clone()), (2..42).collect::<Vec<_>>());
    assert_eq!(lengths(Split::Train, settings(1, Some(10), None)), all[..10]);
    assert_ne!(lengths(Split::Train, settings(2, Some(10), None)), all[..10]);
    assert_eq!(lengths(Split::Test, settings(1, Some(3), None)).len(), 8);
    assert_eq!(lengths(Split::Test, settings(1, None, Some(5))).len(), 5);
    let error =
        open(&folder, Split::Train, &settings(1, Some(41), None)).err().unwrap().to_string();
    assert!(error.starts_with("41 training samples are wanted, and "), "{error}");
    let error = open(&folder, Split::Test, &settings(1, None, Some(9))).err().unwrap().to_string();
    assert!(error.contains("has 8 for them; ask for fewer"), "{error}");
}

#[test]
fn without_test_files_the_parts_share_no_row() {
    let folder = folder_of_rows(false);
    for (train, test) in [(None, 10), (Some(25), 10), (Some(30), 10)] {
        let settings = settings(3, train, Some(test));
        let [train_rows, test_rows] =
            [Split::Train, Split::Test].map(|split| open(&folder, split, &settings).unwrap().0);
        assert_eq!((train_rows.len(), test_rows.len()), (train.unwrap_or(30), test));
        assert!(test_rows.iter().all(|length| !train_rows.contains(length)));
    }
    let error = open(&folder, Split::Train, &settings(3, Some(31), Some(10))).err().unwrap();
    assert!(error.to_string().starts_with("31 training samples are wanted"), "{error}");
}

#[test]
fn tokens_are_made_once_and_again_if_anything_changes_or_is_damaged() {
    let folder = folder_of_rows(true);
    let chosen = settings(1, Some(20), None);
    let open_with = |settings: &TextSettings| open(&folder, Split::Train, settings).unwrap();
    let (first, made, warnings) = open_with(&chosen);
    assert_eq!((made, warnings.len()), (true, 0));
    assert_eq!(open_with(&chosen), (first.clone(), false, vec![]));
    assert!(open_with(&settings(2, Some(20), None)).1, "another seed");
    assert!(open_with(&TextSettings { max_length: 50, ..chosen.clone() }).1, "another length");
    assert!(!open_with(&chosen).1, "the first one is still there");

    let cached = |at: usize| {
        let files = fs::read_dir(folder.path().join("cache")).unwrap();
        let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        assert!(files.iter().all(|path| path.extension().unwrap() == "tokens"), "{files:?}");
        files.swap_remove(at)
    };
    let only = |settings: &TextSettings| {
        fs::remove_dir_all(folder.path().join("cache")).unwrap();
        assert!(open_with(settings).1);
        cached(0)
    };
    let path = only(&chosen);
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [&flipped[..], &whole[..whole.len() - 1], &whole[..10], &[]] {
        fs::write(&path, damaged).unwrap();
        let (lengths, made, warnings) = open_with(&chosen);
        assert_eq!((&lengths, made), (&first, true));
        assert!(warnings.len() == 1 && warnings[0].ends_with("the texts are tokenized again"));
        assert_eq!(fs::read(&path).unwrap(), whole);
    }
    // The right bytes under a wrong name.
    let other = only(&settings(2, Some(20), None));
    fs::write(&other, &whole).unwrap();
    let (_, made, warnings) = open_with(&settings(2, Some(20), None));
    assert!(made && warnings[0].contains("it holds other tokens"), "{warnings:?}");

    fs::write(folder.path().join("tokenizer.json"), format!("{TOKENIZER} ")).unwrap();
    assert!(open_with(&chosen).1, "another tokenizer");
    let text = fs::read_to_string(folder.path().join("train-1.csv")).unwrap();
    fs::write(folder.path().join("train-1.csv"), text.trim_end()).unwrap();
    assert!(open_with(&chosen).1, "other files");
}

#[test]
fn running_text_is_cut_into_blocks() {
    let folder = TempDir::new().unwrap();
    let tokenizer = write(&folder, "tokenizer.json", TOKENIZER);
    write(&folder, "train-0.txt", "good food\nand more");
    write(&folder, "train-1.txt", "bad food good and");
    let cache = Some(folder.path().join("cache"));
    let source = source(&folder, &tokenizer, cache);
    let blocks = |seq_len| {
        let report = TextReport { progress: &mut |_, _| (), warn: &mut |text| panic!("{text}") };
        source.blocks(Split::Train, seq_len, None, report)
    };
    let data = blocks(3).unwrap();
    assert_eq!(data.len(), 2);
    let read = |index| {
        let mut sample = OwnedSample::read(&data, 0, index).unwrap();
        (sample.i64("inputs"), sample.i64("targets"))
    };
    assert_eq!(read(0), (vec![1, 3, 5], vec![3, 5, 4]));
    assert_eq!(read(1), (vec![4, 2, 3], vec![2, 3, 1]));
    // 8 tokens: a block of 7 has a token after it, a block of 8 has none.
    assert_eq!(blocks(7).unwrap().len(), 1);
    let error = blocks(8).err().unwrap().to_string();
    assert!(
        error.contains("the training part has 8 tokens, too few for a sequence of 8"),
        "{error}"
    );
}

#[test]
fn a_mark_of_byte_order_is_no_text() {
    let folder = TempDir::new().unwrap();
    let marked = |text: String| format!("\u{feff}{text}");
    for (name, contents) in [("a.csv", csv()), ("a.jsonl", jsonl())] {
        let path = write(&folder, name, marked(contents));
        assert_eq!(TextRows::read(&[path], 2).unwrap().texts, TEXTS, "{name}");
    }
    let tokenizer = write(&folder, "tokenizer.json", TOKENIZER);
    write(&folder, "train.txt", marked("good food more".to_owned()));
    let source = source(&folder, &tokenizer, None);
    let report = TextReport { progress: &mut |_, _| (), warn: &mut |_| () };
    let blocks = source.blocks(Split::Train, 2, None, report).unwrap();
    assert_eq!(OwnedSample::read(&blocks, 0, 0).unwrap().i64("inputs"), [1, 3]);
}

/// A text without tokens is a row of padding; with special tokens it has these.
#[test]
fn empty_texts_are_kept() {
    let folder = TempDir::new().unwrap();
    write(&folder, "train.csv", "text,label\n,1\ngood,0\n\" \",1\n");
    let padded = TOKENIZER.replace("\"pad_id\": 0", "\"pad_id\": 4");
    let bare = padded.replace(
        "[{\"SpecialToken\": {\"id\": \"[CLS]\", \"type_id\": 0}}, {\"Sequence\"",
        "[{\"Sequence\"",
    );
    for (tokenizer, rows, warnings) in [
        (&padded, [vec![6], vec![6], vec![6, 1]], vec![]),
        (
            &bare,
            [vec![4], vec![4], vec![1]],
            vec!["2 of 3 texts have no tokens; each of them is a row of padding, token 4"],
        ),
    ] {
        let tokenizer = write(&folder, "tokenizer.json", tokenizer);
        let source = source(&folder, &tokenizer, None);
        let settings = settings(1, None, None);
        let mut warned = Vec::new();
        let mut warn = |warning| warned.push(warning);
        let report = TextReport { progress: &mut |_, _| (), warn: &mut warn };
        let dataset = source.classified(Split::Train, &settings, report).unwrap();
        let read = |at| OwnedSample::read(&dataset, 0, at).unwrap().i64("inputs");
        let mut found: Vec<Vec<i64>> = (0..3).map(read).collect();
        found.sort_by_key(|row| (row.len(), row[0] == 1));
        assert_eq!(found, rows);
        assert_eq!(warned, warnings);
    }
}
