//! Trains a tokenizer on texts: byte pair encoding, which makes frequent neighbors one token, repeatedly.
//!
//! Input: texts, and a number of tokens. Output: a `tokenizer.json`, by which every text has tokens, because each byte is one.
//! This module reads no file. Source: Sennrich and others, Neural Machine Translation of Rare Words with Subword Units
//! (2016), over bytes as in GPT-2.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use tokenizers::models::bpe::Merges;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::bytes::characters;
use super::error::excerpt;
use super::guarded::guarded;
use super::merges::Merger;
use super::tokenizer::in_parallel;
use super::{TextError, Tokenizer};

/// Tokens for the bytes, which each tokenizer has.
const NUM_BYTES: usize = 256;
/// A larger number of tokens is taken for a mistake. The largest that are published have 262,000.
const MAX_TOKENS: usize = 1 << 20;
/// Lines that a thread divides into words at once.
const LINES: usize = 1000;

impl Tokenizer {
    /// The contents of a `tokenizer.json` with `vocab` tokens, or with fewer if the texts have too few frequent neighbors.
    /// The same texts give the same tokenizer. Errors if `vocab` is not within 256 and 2^20.
    pub fn train(texts: &[String], vocab: usize) -> Result<Vec<u8>, TextError> {
        let refused = |problem: String| TextError::file(Path::new("tokenizer.json"), problem);
        if !(NUM_BYTES..=MAX_TOKENS).contains(&vocab) {
            return Err(refused(format!(
                "cannot have {vocab} tokens: pass {NUM_BYTES}, one for each byte, to {MAX_TOKENS}"
            )));
        }
        let train = || -> tokenizers::Result<String> {
            let (names, merges) =
                tokens(&words(texts, &ByteLevel::new(false, true, true))?, vocab)?;
            let level = r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#;
            let number = |(number, name)| Ok(format!("{}:{number}", serde_json::to_string(name)?));
            let vocab: serde_json::Result<Vec<_>> = names.iter().enumerate().map(number).collect();
            let (vocab, merges) = (vocab?.join(","), serde_json::to_string(&merges)?);
            // Not `Tokenizer::to_string`: this crate would compile all that writes the parts of any tokenizer.
            let head = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null"#;
            let model = r#""type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":false"#;
            Ok(format!(
                r#"{head},"pre_tokenizer":{level},"post_processor":null,"decoder":{level},"model":{{{model},"vocab":{{{vocab}}},"merges":{merges}}}}}"#
            ))
        };
        let trained = guarded(train).map_err(|error| refused(excerpt(&error)))?;
        trained.map(String::into_bytes).map_err(|error| refused(excerpt(&error.to_string())))
    }
}

/// The words of texts, and how often each occurs.
fn words(texts: &[String], level: &ByteLevel) -> tokenizers::Result<BTreeMap<String, u64>> {
    // Line by line, to divide a long text in parts.
    let lines: Vec<&str> = texts.iter().flat_map(|text| text.split_inclusive('\n')).collect();
    let some: Vec<&[&str]> = lines.chunks(LINES).collect();
    let count = |lines: &&[&str]| -> tokenizers::Result<HashMap<String, u64>> {
        let mut counts: HashMap<String, u64> = HashMap::new();
        for line in *lines {
            let mut words = PreTokenizedString::from(*line);
            level.pre_tokenize(&mut words)?;
            for (word, ..) in words.get_splits(OffsetReferential::Original, OffsetType::Byte) {
                match counts.get_mut(word) {
                    Some(count) => *count += 1,
                    None => _ = counts.insert(word.to_owned(), 1),
                }
            }
        }
        Ok(counts)
    };
    let mut words: BTreeMap<String, u64> = BTreeMap::new();
    // Some at a time: each part has a copy of the frequent words.
    for parts in some.chunks(64) {
        for (word, count) in in_parallel(parts, &count)?.into_iter().flatten() {
            *words.entry(word).or_default() += count;
        }
    }
    Ok(words)
}

/// The tokens of words, `most` of them, and the merges that make them.
fn tokens(words: &BTreeMap<String, u64>, most: usize) -> tokenizers::Result<(Vec<String>, Merges)> {
    let mut names: Vec<String> = characters().map(String::from).collect();
    names.sort_unstable();
    let bytes: HashMap<char, u32> = names.iter().flat_map(|name| name.chars()).zip(0..).collect();
    let mut numbers: HashMap<String, u32> = names.iter().cloned().zip(0..).collect();
    let of_word = |word: &str| word.chars().map(|of| bytes[&of]).collect::<Vec<_>>().into_iter();
    let merger = Merger::new(words.iter().map(|(word, count)| (of_word(word), *count)));
    let mut merger = merger.ok_or("the words of the texts have more than 2^32 bytes")?;
    let mut merges = Vec::new();
    while names.len() < most
        && let Some(next) = merger.next()
    {
        let (first, second) = next.pair();
        let [first, second] = [first, second].map(|token| names[token as usize].clone());
        let name = format!("{first}{second}");
        let new = *numbers.entry(name).or_insert_with_key(|name| {
            names.push(name.clone());
            names.len() as u32 - 1
        });
        merges.push((first, second));
        merger.merge(next, new);
    }
    Ok((names, merges))
}

#[cfg(test)]
mod tests {
    use rand::RngExt;
    use tokenizers::models::TrainerWrapper;
    use tokenizers::models::bpe::{BPE, BpeTrainer};

    use super::*;
    use crate::random::{RandomPurpose, generator};

    /// The tokenizer that the library trains.
    fn of_library(texts: &[String], vocab: usize) -> String {
        let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
        let trainer = BpeTrainer::builder().show_progress(false).vocab_size(vocab);
        let alphabet = ByteLevel::alphabet().into_iter().collect();
        let trainer = trainer.min_frequency(2).initial_alphabet(alphabet).build();
        let mut trainer = TrainerWrapper::BpeTrainer(trainer);
        let lines = texts.iter().flat_map(|text| text.split_inclusive('\n'));
        tokenizer.train(&mut trainer, lines).unwrap();
        tokenizer.to_string(false).unwrap()
    }

    #[test]
    fn the_tokens_are_those_of_the_library() {
        let mut random = generator(7, RandomPurpose::Rows, 0, 0);
        let mut text = |letters: &str, num_letters: usize| -> String {
            let letters: Vec<char> = letters.chars().collect();
            (0..num_letters).map(|_| letters[random.random_range(0..letters.len())]).collect()
        };
        let texts = [
            "a".repeat(1000),
            "ab".repeat(300) + &"aab ".repeat(50),
            text("acgt", 2000),
            text("ab", 500) + " " + &text("aab", 700),
            text("\u{4e00}\u{4e8c}\u{4e09}\u{ff0c}", 800),
            text("abcdefgh  \n.,1'", 3000),
        ];
        for vocab in [257, 290, 400, 2000] {
            for of in texts.iter().map(std::slice::from_ref).chain([&texts[..]]) {
                let own = String::from_utf8(Tokenizer::train(of, vocab).unwrap()).unwrap();
                assert!(own == of_library(of, vocab), "{vocab} tokens of {:.20}", of[0]);
            }
        }
    }

    #[test]
    fn a_long_run_of_letters_takes_no_longer_than_many_words() {
        let run = "a".repeat(1 << 20);
        let json = Tokenizer::train(std::slice::from_ref(&run), 300).unwrap();
        let tokenizer = Tokenizer::from_json(Path::new("x"), json).unwrap();
        // Twice as many letters with each token, as long as it occurs twice.
        assert_eq!(tokenizer.vocab(), 256 + 19);
        assert_eq!(tokenizer.encode_running_text(&run, &mut |_, _| ()).unwrap().len(), 2);
    }

    #[test]
    fn frequent_neighbors_become_one_token() {
        let texts = ["the cat and the dog\n".repeat(9), "the \u{e4}\n".to_owned()];
        let train = |vocab| Tokenizer::train(&texts, vocab);
        let load = |json| Tokenizer::from_json(Path::new("x"), json).unwrap();
        let json = train(260).unwrap();
        assert_eq!(json, train(260).unwrap(), "the same tokenizer each time");
        let tokenizer = load(json);
        assert_eq!(tokenizer.vocab(), 260);
        let encode = |text: &str| tokenizer.encode_running_text(text, &mut |_, _| ()).unwrap();
        assert_eq!(encode("the").len(), 1);
        // All other texts have tokens as well.
        for text in ["the dog", "\u{1f600} zebra\0", ""] {
            assert_eq!(tokenizer.decode(&encode(text)).unwrap(), text);
        }
        assert_eq!(load(train(256).unwrap()).vocab(), 256);
        let most = load(train(99_999).unwrap()).vocab();
        assert!(most < 300, "no pair is left that occurs twice, but there are {most} tokens");
        for vocab in [0, 255, 1 << 21] {
            let error = train(vocab).unwrap_err().to_string();
            assert!(error.contains(&format!("cannot have {vocab} tokens: pass 256")), "{error}");
        }
    }
}
