//! `--data text` up to the opened data set, and the mistakes that it refuses.

use std::fs;

use clap::Command;
use paceline_data::OwnedSample;
use tempfile::TempDir;

use super::*;
use crate::data::DataConfig;

const TOKENIZER: &str = r#"{
    "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "good": 1, "bad": 2, "food": 3}}
}"#;

const ROWS: &str = "text,label\ngood,1\nbad food,0\ngood food,1\nbad bad food,0\n";

fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, contents) in files {
        fs::write(folder.path().join(name), contents).unwrap();
    }
    folder
}

/// The data set for a model that trains on these samples.
fn resolve(samples: Samples, folder: Option<&TempDir>, flags: &str) -> Result<DataConfig> {
    resolve_named(samples, folder, flags, &[])
}

/// The same, for a model whose classes have names.
fn resolve_named(
    samples: Samples,
    folder: Option<&TempDir>,
    flags: &str,
    class_names: &[String],
) -> Result<DataConfig> {
    let folder = folder.map(|folder| folder.path().display().to_string());
    let folder = folder.map(|of| format!("--data-dir {of} --token-cache {of}/tokens "));
    let line = format!("text {}{flags}", folder.unwrap_or_default());
    let command = Command::new("text").args((TEXT.flags)());
    let settings = command.try_get_matches_from(line.split_whitespace()).unwrap();
    let needs = RunNeeds {
        model: "llama",
        samples,
        global_batch_size: 2,
        steps_per_epoch: None,
        on_device: false,
        tokenizer: None,
        class_names,
    };
    DataConfig::resolve("text", &settings, &needs)
}

const CLASSIFIES: Samples = Samples::Tokens { vocab: 4, classes: Some(2) };
const PREDICTS: Samples = Samples::Tokens { vocab: 4, classes: None };

#[test]
fn texts_with_classes_are_opened_for_the_model() {
    let folder = folder(&[("train.csv", ROWS), ("tokenizer.json", TOKENIZER)]);
    let data = resolve(CLASSIFIES, Some(&folder), "--max-length 2 --group-by-length").unwrap();
    let train = data.open_train(1).unwrap();
    assert_eq!((train.len(), train.num_classes(), train.input_shape()), (4, Some(2), vec![2]));
    assert_eq!((data.has_test(), data.groups_by_length()), (false, true));
    // 1 + 2 + 2 + 2 tokens of 4 bytes, and 16 bytes for each row.
    assert_eq!(data.resident_bytes(&*train), 28.0 + 64.0);

    let data = resolve(CLASSIFIES, Some(&folder), "--test-samples 1").unwrap();
    assert!(data.has_test());
    assert_eq!((data.open_train(1).unwrap().len(), data.open_test(1).unwrap().len()), (3, 1));
    let any = resolve(Samples::Any, Some(&folder), "--classes 2").unwrap();
    assert_eq!(any.open_train(1).unwrap().len(), 4);
    assert!(folder.path().join("tokens").is_dir());
}

#[test]
fn running_text_is_opened_for_a_language_model() {
    let folder = folder(&[("train.txt", "good food bad food good"), ("tok.json", TOKENIZER)]);
    let tokenizer = folder.path().join("tok.json");
    let flags = format!("--seq-len 2 --tokenizer {}", tokenizer.display());
    let data = resolve(PREDICTS, Some(&folder), &flags).unwrap();
    assert_eq!((data.open_train(1).unwrap().len(), data.has_test()), (2, false));
}

#[test]
fn labels_that_are_words_need_no_list() {
    let rows = "text,label\ngood,plus\nbad food,minus\ngood food,plus\n";
    let files = [("train.csv", rows), ("test.csv", "text,label\nbad,minus\n")];
    let folder = folder(&[files[0], files[1], ("tokenizer.json", TOKENIZER)]);
    let classes = |flags| {
        let data = resolve(CLASSIFIES, Some(&folder), flags).unwrap();
        let test = data.open_test(1).unwrap();
        let class = OwnedSample::read(&*test, 0, 0).unwrap().i64("targets")[0];
        (data.open_train(1).unwrap().class_names().join(" "), class)
    };
    // The test part alone has one class, which is the first one of the training part.
    assert_eq!(classes(""), ("minus plus".to_owned(), 0));
    assert_eq!(classes("--label-names plus minus"), ("plus minus".to_owned(), 1));
    let of_model = |names: [&str; 2]| {
        let names = names.map(str::to_owned);
        let data = resolve_named(CLASSIFIES, Some(&folder), "", &names).unwrap();
        data.open_train(1).unwrap().class_names().join(" ")
    };
    assert_eq!(of_model(["plus", "minus"]), "plus minus");
    assert_eq!(of_model(["plus", "other"]), "minus plus");
    let three = Samples::Tokens { vocab: 4, classes: Some(3) };
    let error = resolve(three, Some(&folder), "").unwrap_err().to_string();
    assert!(error.contains("are 2 words (minus, plus), and the model has 3 classes"), "{error}");
    fs::write(folder.path().join("test.csv"), "text,label\nbad,zero\n").unwrap();
    let data = resolve(CLASSIFIES, Some(&folder), "").unwrap();
    let error = data.open_test(1).map(|data| data.len()).unwrap_err().to_string();
    assert!(error.contains("test.csv: row 1: the label zero is none of minus, plus"), "{error}");
    let many: String = (0..1001).map(|at| format!("good,w{at}\n")).collect();
    fs::write(folder.path().join("train.csv"), format!("text,label\n{many}")).unwrap();
    let error = resolve(CLASSIFIES, Some(&folder), "").unwrap_err().to_string();
    assert!(error.contains("row 1001: more than 1,000 different words"), "{error}");
}

#[test]
fn labels_that_count_from_one_are_named() {
    let rows = "text,label\ngood,1\nbad,2\nfood,3\n";
    let folder = folder(&[("train.csv", rows), ("tokenizer.json", TOKENIZER)]);
    let open = |flags: &str| {
        let data = resolve(Samples::Any, Some(&folder), flags).unwrap();
        data.open_train(1)
    };
    let error = open("--classes 3").map(|data| data.len()).unwrap_err().to_string();
    assert!(error.contains("the label is 3, not one of the 3 classes from 0 to 2"), "{error}");
    assert!(
        error.contains("if labels count from 1, pass --label-names 1 2 3, otherwise pass"),
        "{error}"
    );
    let train = open("--classes 3 --label-names 1 2 3").unwrap();
    assert_eq!((train.num_classes(), train.class_names().join(" ")), (Some(3), "1 2 3".to_owned()));
    let error = open("--classes 1").map(|data| data.len()).unwrap_err().to_string();
    assert!(error.contains("--label-names 1, otherwise"), "{error}");
    let rows: String = (1..=11).map(|at| format!("good,{at}\n")).collect();
    fs::write(folder.path().join("train.csv"), format!("text,label\n{rows}")).unwrap();
    let error = open("--classes 11").map(|data| data.len()).unwrap_err().to_string();
    assert!(error.contains("--label-names $(seq 11), otherwise"), "{error}");
}

#[test]
fn mistakes_name_the_flag_and_the_fix() {
    let whole = folder(&[("train.csv", ROWS), ("tokenizer.json", TOKENIZER)]);
    let bare = folder(&[("train.csv", ROWS)]);
    let empty = folder(&[("tokenizer.json", TOKENIZER)]);
    for (samples, folder, flags, expected) in [
        (CLASSIFIES, None, "", "--data text needs --data-dir"),
        (CLASSIFIES, Some(&bare), "", "tokenizer.json is no file; pass the tokenizer.json"),
        (CLASSIFIES, Some(&empty), "", "found no train*.parquet"),
        (CLASSIFIES, Some(&whole), "--classes 3", "--classes 3: --model llama has 2 classes"),
        (CLASSIFIES, Some(&whole), "--seq-len 3", "--seq-len is for blocks of running text"),
        (PREDICTS, Some(&whole), "--classes 2", "--classes is for texts with classes"),
        (PREDICTS, Some(&whole), "--group-by-length", "--group-by-length is for texts"),
        (Samples::Any, Some(&whole), "", "--data text needs --classes"),
        (Samples::Images, Some(&whole), "", "--model llama trains on images, and --data text"),
    ] {
        let error = resolve(samples, folder, flags).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\nlacks {expected}");
    }
    // Mistakes that show when the files are read.
    for (samples, flags, expected) in [
        (CLASSIFIES, "--train-samples 9", "9 training samples are wanted"),
        (Samples::Any, "--classes 1", "train.csv: row 1: the label is 1"),
        (Samples::Tokens { vocab: 3, classes: Some(2) }, "", "pass --vocab 4"),
    ] {
        let data = resolve(samples, Some(&whole), flags).unwrap();
        let opened = data.open_train(1).map(|data| data.len());
        let error = opened.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\nlacks {expected}");
    }
}
