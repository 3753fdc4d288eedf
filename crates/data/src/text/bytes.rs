//! The tokenizer that the program carries: each byte is a token, whose number is the byte. So it takes any text, and needs
//! no file.
//!
//! Output: a `tokenizer.json`, which other programs read as well, or the tokenizer itself. This module knows no text.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{TextError, Tokenizer};

/// Where a tokenizer comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// The program carries it.
    Bytes,
    /// A `tokenizer.json`.
    File(PathBuf),
}

impl TokenizerSource {
    /// The name of the tokenizer that the program carries.
    pub const BYTES: &str = "bytes";

    /// Reads the tokenizer.
    pub fn load(&self) -> Result<Tokenizer, TextError> {
        match self {
            Self::Bytes => Tokenizer::from_json(Path::new(Self::BYTES), Self::bytes_json()),
            Self::File(path) => Tokenizer::load(path),
        }
    }

    /// The contents of the `tokenizer.json` of the carried tokenizer: byte pair encoding without a pair.
    pub fn bytes_json() -> Vec<u8> {
        let vocab: Map<String, Value> = (0..=u8::MAX)
            .zip(characters())
            .map(|(byte, name)| (name.into(), json!(byte)))
            .collect();
        let level = |prefix: bool| json!({ "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true });
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": level(false), "post_processor": null, "decoder": level(true),
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": [],
            },
        })
        .to_string()
        .into_bytes()
    }
}

/// The character by which byte-level tokenizers name each byte, as GPT-2 introduced it: the bytes that are printable in
/// Latin-1 name themselves, and the others have the characters from 256 on, in their order.
pub(super) fn characters() -> impl Iterator<Item = char> {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = '\u{100}'..;
    (0..=u8::MAX)
        .map_while(move |byte| if is_printable(byte) { Some(byte.into()) } else { others.next() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_a_token_of_its_number() {
        let tokenizer = TokenizerSource::Bytes.load().unwrap();
        assert_eq!(tokenizer.vocab(), 256);
        let all: String = (1..0x3000)
            .filter_map(char::from_u32)
            .chain("a  b\n\n\t\0 \u{1f600}".chars())
            .collect();
        let tokens = tokenizer.encode_running_text(&all, &mut |_, _| ()).unwrap();
        let bytes: Vec<u32> = all.bytes().map(u32::from).collect();
        assert_eq!(tokens, bytes);
        assert_eq!(tokenizer.decode(&tokens).unwrap(), all);
    }
}
