//! Tokens of odd texts are those of Hugging Face's `transformers`, which `fixtures/make_tokens.py` has stored.

use std::fs;
use std::path::{Path, PathBuf};

use paceline_data::text::Tokenizer;
use serde_json::Value;

const TEXTS: usize = 1000;
const MAX_LENGTH: usize = 12;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The texts, and one kind of their tokens.
fn stored(kind: &str) -> (Vec<String>, Vec<Vec<u32>>) {
    let lines = fs::read_to_string(fixture("tokens.jsonl")).unwrap();
    let row = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let tokens = row[kind].as_array().unwrap().iter();
        let tokens = tokens.map(|token| token.as_u64().unwrap() as u32).collect();
        (row["text"].as_str().unwrap().to_owned(), tokens)
    };
    lines.lines().map(row).unzip()
}

fn assert_equal(texts: &[String], ours: &[Vec<u32>], theirs: &[Vec<u32>]) {
    assert_eq!(texts.len(), TEXTS);
    for (text, (ours, theirs)) in texts.iter().zip(ours.iter().zip(theirs)) {
        assert_eq!(ours, theirs, "{text:?}");
    }
}

#[test]
fn whole_texts() {
    let tokenizer = Tokenizer::load(&fixture("tokenizer.json")).unwrap();
    let (texts, theirs) = stored("tokens");
    let ours: Vec<_> = texts.iter().map(|text| tokenizer.encode_whole(text).unwrap()).collect();
    assert_equal(&texts, &ours, &theirs);
}

#[test]
fn cut_texts() {
    let tokenizer = Tokenizer::load(&fixture("tokenizer.json")).unwrap();
    let (texts, theirs) = stored("cut");
    let ours = tokenizer.encode(&texts, MAX_LENGTH, &mut |_, _| ()).unwrap();
    assert_equal(&texts, &ours, &theirs);
    assert!(theirs.iter().any(|tokens| tokens.len() == MAX_LENGTH));
}

/// Bytes in pairs lose nothing, so texts come back whole, but for the special tokens, which have no text.
#[test]
fn tokens_become_the_texts_again() {
    let tokenizer = Tokenizer::load(&fixture("tokenizer.json")).unwrap();
    let (texts, tokens) = stored("tokens");
    for (text, tokens) in texts.iter().zip(&tokens) {
        let mut text = text.clone();
        for special in ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] {
            text = text.replace(special, "");
        }
        assert_eq!(tokenizer.decode(tokens).unwrap(), text);
    }
}
