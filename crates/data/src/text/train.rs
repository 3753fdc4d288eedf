//! Trains a tokenizer on texts: byte pair encoding, which makes frequent neighbors one token, again and again.
//!
//! Input: texts, and a number of tokens. Output: a `tokenizer.json`. Every text has tokens by it, because each byte is one.
//! This module reads no file. Source: Sennrich and others, Neural Machine Translation of Rare Words with Subword Units
//! (2016), over bytes as in GPT-2.

use std::path::Path;

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::error::excerpt;
use super::guarded::guarded;
use super::{TextError, Tokenizer};

/// Tokens for the bytes, which each tokenizer has.
const NUM_BYTES: usize = 256;
/// A larger number of tokens is taken for a mistake. The largest that are published have 262,000.
const MAX_TOKENS: usize = 1 << 20;

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
            let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
            tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
            tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
            let trainer = BpeTrainer::builder()
                .show_progress(false)
                .vocab_size(vocab)
                .min_frequency(2)
                .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
                .build();
            let mut trainer = TrainerWrapper::BpeTrainer(trainer);
            // Words are counted line by line, so that a long text is not divided into words at once.
            let lines = texts.iter().flat_map(|text| text.split_inclusive('\n'));
            tokenizer.train(&mut trainer, lines)?;
            tokenizer.to_string(false)
        };
        let trained = guarded(train).map_err(|error| refused(excerpt(&error)))?;
        trained.map(String::into_bytes).map_err(|error| refused(excerpt(&error.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
