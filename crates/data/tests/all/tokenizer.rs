//! Tokens of texts, texts of tokens, and where a text is cut.

use std::fs;
use std::path::Path;

use paceline_data::text::{TextStream, Tokenizer};
use tempfile::TempDir;

use crate::common::{TEXTS, TOKENIZER, write};

/// A tokenizer of bytes, as those of Llama 3 and SmolLM2, with two words of several characters.
const BYTES: &str = r#"{
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [
        {"id": 8, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
         "normalized": false, "special": true}
    ],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    "post_processor": null,
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
              "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
              "vocab": {"a": 0, "b": 1, "\u0120": 2, "\u00c3": 3, "\u00a4": 4, "ab": 5, "\u0120a": 6, "\u0120ab": 7},
              "merges": ["a b", "\u0120 ab", "\u0120 a"]}
}"#;

#[test]
fn texts_are_cut_with_their_special_tokens() {
    let folder = TempDir::new().unwrap();
    let tokenizer = Tokenizer::load(&write(&folder, "tokenizer.json", TOKENIZER)).unwrap();
    assert_eq!(tokenizer.vocab(), 7);
    let mut seen = Vec::new();
    let texts = TEXTS.map(str::to_owned);
    let tokens = tokenizer.encode(&texts, 4, &mut |done, of| seen.push((done, of))).unwrap();
    // Quotes and commas are words that the tokenizer does not know.
    let expected: [&[u32]; 5] = [&[6, 1, 3], &[6, 2, 0, 0], &[6, 1], &[6, 4, 1, 3], &[6, 0, 1]];
    assert_eq!(tokens, expected);
    assert_eq!(seen, [(0, 5), (5, 5)]);
    let error = tokenizer.encode(&texts, 1, &mut |_, _| ()).unwrap_err().to_string();
    assert!(
        error.contains("adds 1 special tokens to each text, so 1 tokens leave no room"),
        "{error}"
    );
    let many: Vec<String> = (0..2500).map(|at| TEXTS[at % 5].to_owned()).collect();
    let tokens = tokenizer.encode(&many, 4, &mut |_, _| ()).unwrap();
    assert!(tokens.iter().enumerate().all(|(at, row)| *row == expected[at % 5]));
    let error = Tokenizer::load(&write(&folder, "tokenizer.json", "{}")).err().unwrap().to_string();
    assert!(error.contains("tokenizer.json: is not the tokenizer.json of a model"), "{error}");
}

#[test]
fn tokens_become_text_as_they_come() {
    let folder = TempDir::new().unwrap();
    let tokenizer = Tokenizer::load(&write(&folder, "tokenizer.json", BYTES)).unwrap();
    // "ä" is two bytes, which are a token each.
    let text = "ab ab \u{e4} aba";
    let tokens = tokenizer.encode_whole(text).unwrap();
    assert_eq!(tokens, [5, 7, 2, 3, 4, 7, 0]);
    assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
    for known in 0..tokens.len() {
        let mut stream = TextStream::new(&tokenizer, &tokens[..known]);
        let pieces: Vec<String> =
            tokens[known..].iter().map(|token| stream.next(*token).unwrap()).collect();
        let expected = ["ab", " ab", " ", "", "\u{e4}", " ab", "a"];
        // After half a character, its second half is not one.
        if known != 4 {
            assert_eq!(pieces, expected[known..], "after {known} tokens");
            assert_eq!(stream.finish().unwrap(), "");
        }
    }
    // A special token, and a number that is no token, have no text. Half a character is given out at the end.
    let mut stream = TextStream::new(&tokenizer, &[]);
    let pieces = [0, 8, 99, 1, 3].map(|token| stream.next(token).unwrap());
    assert_eq!(pieces, ["a", "", "", "b", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    // A tokenizer of words puts spaces between them, and its own special token in front of a text.
    let tokenizer = Tokenizer::load(&write(&folder, "words.json", TOKENIZER)).unwrap();
    let tokens = tokenizer.encode_whole("good food").unwrap();
    assert_eq!(tokens, [6, 1, 3]);
    let mut stream = TextStream::new(&tokenizer, &tokens);
    assert_eq!([5, 4].map(|token| stream.next(token).unwrap()), [" and", " more"]);
}

/// A tokenizer of characters and of some pairs of them, with these parts in front.
fn tokenizer_of_pairs(normalizer: &str, pre_tokenizer: &str, added: &str) -> String {
    let vocab = ["a", "b", "\\n", "Ċ", "Ġ", "▁", "ab", "▁a", "Ġb", "ĊĊ"];
    let vocab: Vec<String> =
        vocab.iter().enumerate().map(|(at, token)| format!("\"{token}\": {at}")).collect();
    let merges = r#"[["a", "b"], ["▁", "a"], ["Ġ", "b"], ["Ċ", "Ċ"]]"#;
    format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [{added}],
            "normalizer": {normalizer}, "pre_tokenizer": {pre_tokenizer}, "post_processor": null, "decoder": null,
            "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                       "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                       "vocab": {{{}}}, "merges": {merges}}}}}"#,
        vocab.join(", ")
    )
}

#[test]
fn running_text_has_the_tokens_of_the_whole_text() {
    let bytes = |adds: bool| {
        format!(
            r#"{{"type": "ByteLevel", "add_prefix_space": {adds}, "trim_offsets": true, "use_regex": true}}"#
        )
    };
    let digits = r#"{"type": "Digits", "individual_digits": true}"#;
    let sequence = |parts: &str| format!(r#"{{"type": "Sequence", "pretokenizers": [{parts}]}}"#);
    let metaspace = |scheme: &str| {
        format!(
            r#"{{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "{scheme}", "split": false}}"#
        )
    };
    let prepend = r#"{"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}"#;
    let added = |content: &str, lstrip: bool| {
        format!(
            r#"{{"id": 10, "content": "{content}", "single_word": false, "lstrip": {lstrip}, "rstrip": false,
                "normalized": false, "special": true}}"#
        )
    };
    // Long enough for several pieces, with everything that a cut could meet.
    let text = "ab ba\nab\n\nba ab\n ab \nb\nab\nab\n".repeat(10_000);
    let check = |what: &str, tokenizer: String, is_cut: bool| {
        let tokenizer = Tokenizer::from_json(Path::new(what), tokenizer.into_bytes()).unwrap();
        let mut num_pieces = 0;
        let cut = tokenizer.encode_running_text(&text, &mut |_, of| num_pieces = of).unwrap();
        let whole = tokenizer.encode_whole(&text).unwrap();
        assert!(cut.len() > text.len() / 4, "{what}: {} tokens", cut.len());
        assert!(cut == whole, "{what}: {} tokens, and not {}", cut.len(), whole.len());
        assert_eq!(num_pieces > 1, is_cut, "{what}: {num_pieces} pieces");
    };
    let plain = |pre_tokenizer: &str| tokenizer_of_pairs("null", pre_tokenizer, "");
    check("bytes", plain(&bytes(false)), true);
    check("digits and bytes", plain(&sequence(&format!("{digits}, {}", bytes(false)))), true);
    let lowercase = r#"{"type": "Lowercase"}"#;
    check("lower case", tokenizer_of_pairs(lowercase, &bytes(false), ""), true);
    check("an added token", tokenizer_of_pairs("null", &bytes(false), &added("<x>", false)), true);

    check("a space before a text", plain(&bytes(true)), false);
    check("metaspace, always", plain(&metaspace("always")), false);
    check("metaspace, first", plain(&metaspace("first")), false);
    check("prepend", tokenizer_of_pairs(prepend, "null", ""), false);
    let other =
        r#"{"type": "Split", "pattern": {"String": "b"}, "behavior": "Isolated", "invert": false}"#;
    check("another pattern", plain(&sequence(&format!("{other}, {}", bytes(false)))), false);
    let across = tokenizer_of_pairs("null", &bytes(false), &added("\\nab", false));
    check("an added token on both sides of a line's end", across, false);
    let takes_space = tokenizer_of_pairs("null", &bytes(false), &added("ba", true));
    check("an added token that takes the space before it", takes_space, false);
}

/// The setting of a tokenizer that cuts off the beginnings of texts.
const LEFT: &str = "\"truncation\": {\"direction\": \"Left\", \"max_length\": 2, \"strategy\": \"LongestFirst\", \"stride\": 0}";

/// As in transformers, `tokenizer_config.json` says which end of a text is cut off, or else `tokenizer.json`.
#[test]
fn the_files_of_a_tokenizer_say_which_end_is_cut_off() {
    let folder = TempDir::new().unwrap();
    let texts = [TEXTS[1].to_owned()];
    let left = TOKENIZER.replacen("\"direction\": \"Right\"", "\"direction\": \"Left\"", 1);
    let (begin, end) = ([6, 2, 0], [6, 5, 4]);
    for (json, config, expected) in [
        (TOKENIZER, None, begin),
        (&left, None, end),
        (TOKENIZER, Some("{\"truncation_side\": \"left\"}"), end),
        (&left, Some("{\"truncation_side\": \"right\"}"), begin),
        (&left, Some("{\"model_max_length\": 512}"), end),
    ] {
        let path = write(&folder, "tokenizer.json", json);
        let beside = folder.path().join("tokenizer_config.json");
        config.into_iter().for_each(|config| fs::write(&beside, config).unwrap());
        let tokens = Tokenizer::load(&path).unwrap().encode(&texts, 3, &mut |_, _| ()).unwrap();
        assert_eq!(tokens, [expected], "{config:?}");
    }
    write(&folder, "tokenizer_config.json", "{");
    let error = Tokenizer::load(&folder.path().join("tokenizer.json")).err().unwrap().to_string();
    assert!(error.contains("tokenizer_config.json: is no JSON"), "{error}");
}

/// Only the part of a long text that is kept is tokenized, where its tokens are then the same.
#[test]
fn a_long_text_is_cut_before_it_is_tokenized() {
    let folder = TempDir::new().unwrap();
    let words = "ab aba \u{e4} ab<|end|> b  ab\nab a\n\n a ab ";
    let long = words.repeat(6_000);
    for json in [
        BYTES.to_owned(),
        // No cut is known.
        BYTES.replace("\"use_regex\": true}", "\"use_regex\": false}"),
        BYTES.replace("\"lstrip\": false", "\"lstrip\": true"),
    ] {
        let tokenizer = Tokenizer::load(&write(&folder, "tokenizer.json", &json)).unwrap();
        let whole = tokenizer.encode_whole(&long).unwrap();
        let left = json.replace("\"truncation\": null", LEFT);
        let left = Tokenizer::load(&write(&folder, "tokenizer.json", &left)).unwrap();
        for max_length in [1, 512, 50_000, 1_000_000] {
            let texts = [long.clone(), String::new()];
            let kept = max_length.min(whole.len());
            let cut = tokenizer.encode(&texts, max_length, &mut |_, _| ()).unwrap();
            assert!(cut == [&whole[..kept], &[]], "other tokens than of the whole text");
            let cut = left.encode(&texts, max_length, &mut |_, _| ()).unwrap();
            assert!(cut == [&whole[whole.len() - kept..], &[]], "other tokens than at the end");
        }
        assert!(tokenizer.encode_running_text(&long, &mut |_, _| ()).unwrap() == whole);
    }
}

#[test]
fn a_text_that_cannot_be_cut_is_refused_above_a_size() {
    let folder = TempDir::new().unwrap();
    let tokenizer = Tokenizer::load(&write(&folder, "tokenizer.json", BYTES)).unwrap();
    let long = "a".repeat((16 << 20) + 1);
    let error = tokenizer.encode_running_text(&long, &mut |_, _| ()).unwrap_err().to_string();
    assert!(error.contains("the text that begins with \"aaa"), "{error}");
    assert!(error.ends_with("at most 16 MiB are tokenized at once; divide it"), "{error}");
    assert!(error.len() < 600, "{error}");
}
