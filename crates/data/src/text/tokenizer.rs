//! Turns texts into tokens and back, with the tokenizer that a model was published with.
//!
//! Input: a `tokenizer.json` and texts. Output: numbers of tokens, or texts of tokens. This module knows nothing of files
//! of text, and pads nothing: a batch does.

use std::fs;
use std::path::{Path, PathBuf};

use tokenizers::{NormalizerWrapper, PostProcessor, PreTokenizerWrapper, TruncationParams};

use super::TextError;

/// Texts that are tokenized between two reports of progress.
const CHUNK: usize = 1000;
/// Bytes of running text that are tokenized at once, about.
const PIECE_BYTES: usize = 1 << 16;

/// Told how many of how many texts (or pieces of a text) are done.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize);

/// A tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    json: Vec<u8>,
    vocab: usize,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Truncation and padding that it states are not used.
    pub fn load(path: &Path) -> Result<Self, TextError> {
        let json = fs::read(path).map_err(|error| TextError::file(path, error))?;
        Self::from_json(path, json)
    }

    /// A tokenizer from the contents of a `tokenizer.json`. Errors name it by `path`.
    pub fn from_json(path: &Path, json: Vec<u8>) -> Result<Self, TextError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(&json).map_err(|error| {
            TextError::file(path, format!("is not the tokenizer.json of a model: {error}"))
        })?;
        inner.with_padding(None);
        let none = inner.with_truncation(None);
        none.map_err(|error| TextError::file(path, error))?;
        let largest = inner.get_vocab(true).into_values().max();
        let vocab = largest.map_or(0, |largest| largest as usize + 1);
        if vocab == 0 {
            return Err(TextError::file(path, "has no tokens"));
        }
        Ok(Self { inner, path: path.into(), json, vocab })
    }

    /// The number above all tokens.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The file, or what errors call it.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's contents.
    pub(super) fn json(&self) -> &[u8] {
        &self.json
    }

    /// The tokens of each text, with the special tokens that the tokenizer adds, cut to `max_length` tokens. These are the
    /// `input_ids` of `tokenizer(text, truncation=True, max_length=max_length)` in transformers. Runs in parallel.
    pub fn encode(
        &self,
        texts: &[String],
        max_length: usize,
        progress: Progress<'_>,
    ) -> Result<Vec<Vec<u32>>, TextError> {
        let added = self.inner.get_post_processor().map_or(0, |added| added.added_tokens(false));
        if max_length <= added {
            let problem = format!(
                "adds {added} special tokens to each text, so {max_length} tokens leave no room for the text itself"
            );
            return Err(TextError::file(&self.path, problem));
        }
        let mut inner = self.inner.clone();
        let truncation = TruncationParams { max_length, ..TruncationParams::default() };
        let truncated = inner.with_truncation(Some(truncation));
        truncated.map_err(|error| TextError::file(&self.path, error))?;
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        self.encode_with(&inner, &texts, true, progress)
    }

    /// All tokens of one text, with the special tokens that the tokenizer adds.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>, TextError> {
        Ok(self.encode_with(&self.inner, &[text], true, &mut |_, _| ())?.concat())
    }

    /// The text of tokens. Special tokens, and numbers that are no tokens, have none.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TextError> {
        self.inner.decode(tokens, true).map_err(|error| TextError::file(&self.path, error))
    }

    /// All tokens of a running text, without special tokens. The text is cut so that its pieces can be tokenized in
    /// parallel, if the tokens are then those of the whole text. Otherwise it is tokenized as a whole, which takes longer
    /// and more memory.
    pub fn encode_running_text(
        &self,
        text: &str,
        progress: Progress<'_>,
    ) -> Result<Vec<u32>, TextError> {
        let pieces = match self.may_be_cut() {
            true => pieces(text, PIECE_BYTES),
            false => vec![text],
        };
        Ok(self.encode_with(&self.inner, &pieces, false, progress)?.concat())
    }

    /// Whether a text has the same tokens if it is cut as [`pieces`] does it. Known for tokenizers of certain parts only.
    fn may_be_cut(&self) -> bool {
        // Added tokens are looked for before anything else. One could lie on both sides of a cut, or take the end of the
        // line before it.
        let added = self.inner.get_added_tokens_decoder();
        !added.values().any(|token| token.lstrip || token.content.contains('\n'))
            && self.inner.get_normalizer().is_none_or(is_local)
            && self.inner.get_pre_tokenizer().is_some_and(divides_lines)
    }

    fn encode_with(
        &self,
        inner: &tokenizers::Tokenizer,
        texts: &[&str],
        adds_special: bool,
        progress: Progress<'_>,
    ) -> Result<Vec<Vec<u32>>, TextError> {
        let mut all = Vec::with_capacity(texts.len());
        progress(0, texts.len());
        for chunk in texts.chunks(CHUNK) {
            let encodings = inner
                .encode_batch_fast(chunk.to_vec(), adds_special)
                .map_err(|error| TextError::file(&self.path, error))?;
            all.extend(encodings.iter().map(|encoding| encoding.get_ids().to_vec()));
            progress(all.len(), texts.len());
        }
        Ok(all)
    }
}

/// Whether a normalizer changes characters one by one, or composes them, which no end of a line takes part in.
fn is_local(normalizer: &NormalizerWrapper) -> bool {
    use NormalizerWrapper::{Lowercase, NFC, NFD, NFKC, NFKD, Sequence};
    match normalizer {
        NFC(_) | NFD(_) | NFKC(_) | NFKD(_) | Lowercase(_) => true,
        Sequence(all) => all.as_ref().iter().all(is_local),
        _ => false,
    }
}

/// Whether a pre-tokenizer always divides a text behind the end of a line that has other characters than spaces around
/// it, and makes nothing else of the beginning or the end of a text.
///
/// The pattern of `ByteLevel` is `\s+(?!\S)|\s+` where there are spaces: a single one is a part of its own before a
/// letter and at the end of a text. Of two, only the second one is, and at the end of a text both are one part.
fn divides_lines(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    use PreTokenizerWrapper::{
        BertPreTokenizer, ByteLevel, Digits, Punctuation, Sequence, Whitespace, WhitespaceSplit,
    };
    match pre_tokenizer {
        ByteLevel(bytes) => bytes.use_regex && !bytes.add_prefix_space,
        BertPreTokenizer(_) | Whitespace(_) | WhitespaceSplit(_) => true,
        // Those before the one that divides have to leave the end of a line between its neighbours. Those behind it get
        // parts that are the same.
        Sequence(all) => {
            let keeps = |part: &&PreTokenizerWrapper| matches!(part, Digits(_) | Punctuation(_));
            let mut rest = all.as_ref().iter().skip_while(keeps);
            rest.next().is_some_and(divides_lines) && rest.all(|part| keeps(&part))
        }
        _ => false,
    }
}

/// Cuts a text into pieces of at least `len` bytes, where a line ends without a space and the next one begins with a letter.
fn pieces(text: &str, len: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut begin = 0;
    for (at, _) in text.match_indices('\n') {
        let next = at + 1;
        let is_letter = text[next..].chars().next().is_some_and(char::is_alphabetic);
        let is_after_space = text[..at].chars().next_back().is_none_or(char::is_whitespace);
        if is_letter && !is_after_space && next - begin >= len {
            pieces.push(&text[begin..next]);
            begin = next;
        }
    }
    if begin < text.len() {
        pieces.push(&text[begin..]);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_before_lines_that_begin_with_a_letter() {
        assert_eq!(pieces("ab\ncd\n\n e\nf", 1), ["ab\n", "cd\n\n e\n", "f"]);
        assert_eq!(pieces("\nab\n\ncd \ne\r\nf\ng", 1), ["\nab\n\ncd \ne\r\nf\n", "g"]);
        assert_eq!(pieces("ab\ncd\nef", 4), ["ab\ncd\n", "ef"]);
        assert_eq!(pieces("", 4), Vec::<&str>::new());
        assert_eq!(pieces("ä\nö", 1), ["ä\n", "ö"]);
    }
}
