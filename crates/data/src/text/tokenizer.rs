//! Turns texts into tokens and back, with the tokenizer that a model was published with.
//!
//! Input: a `tokenizer.json` and texts. Output: numbers of tokens, or texts of tokens. This module knows nothing of files
//! of text, and pads nothing.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use paceline_trace::thread_builder;
use serde_json::Value;
use tokenizers::{PostProcessor, TruncationDirection, TruncationParams};

use super::TextError;
use super::cuts::Cuts;
use super::error::excerpt;
use super::guarded::guarded;

/// No `tokenizer.json` is larger. The largest that are published, with 262,000 tokens, have 33 MB. Reading one takes about
/// ten times as much memory.
const MAX_FILE_BYTES: u64 = 64_000_000;
/// Texts that are tokenized between two reports of progress, and their bytes, unless one text has more. The
/// library takes about 100 times the bytes of a text until only the numbers of its tokens are kept.
const CHUNK: usize = 1000;
const CHUNK_BYTES: usize = 1 << 22;
/// Bytes of a long text that are tokenized at once, about.
const PIECE_BYTES: usize = 1 << 16;
/// The most bytes that are tokenized at once where a text cannot be cut.
const MAX_PIECE_BYTES: usize = 16 << 20;

/// Receives how many of how many texts (or pieces of a text) are done.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize);

/// A tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    json: Vec<u8>,
    vocab: usize,
    pad: u32,
    /// Which end of a long text is cut off.
    truncation: TruncationDirection,
    cuts: Cuts,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Of lengths and padding that it states, only the side from which long texts are cut is used. As in
    /// transformers, the `tokenizer_config.json` beside it may decide that.
    pub fn load(path: &Path) -> Result<Self, TextError> {
        let read = |path: &Path| {
            paceline_files::read(path, MAX_FILE_BYTES).map_err(|error| TextError::file(path, error))
        };
        let mut tokenizer = Self::from_json(path, read(path)?)?;
        let beside = path.with_file_name("tokenizer_config.json");
        if beside.is_file() {
            let config: Value = serde_json::from_slice(&read(&beside)?)
                .map_err(|error| TextError::file(&beside, format!("is no JSON: {error}")))?;
            tokenizer.truncation = match config["truncation_side"].as_str() {
                Some("left") => TruncationDirection::Left,
                Some("right") => TruncationDirection::Right,
                _ => tokenizer.truncation,
            };
        }
        Ok(tokenizer)
    }

    /// A tokenizer from the contents of a `tokenizer.json`. Errors name it by `path`.
    pub fn from_json(path: &Path, json: Vec<u8>) -> Result<Self, TextError> {
        let refused = |error: String| {
            let error = excerpt(&error);
            TextError::file(path, format!("is not the tokenizer.json of a model: {error}"))
        };
        let read = || -> tokenizers::Result<_> {
            // Not `from_bytes`: this crate would compile a copy of it, with all that reads the parts of a tokenizer.
            let mut inner = tokenizers::Tokenizer::from_str(std::str::from_utf8(&json)?)?;
            let pad = inner.get_padding().map_or(0, |padding| padding.pad_id);
            let truncation = inner.get_truncation().map(|stated| stated.direction);
            inner.with_padding(None);
            inner.with_truncation(None)?;
            let largest = inner.get_vocab(true).into_values().max();
            let cuts = Cuts::of(&inner);
            Ok((inner, pad, truncation.unwrap_or_default(), largest, cuts))
        };
        let read = guarded(read).map_err(refused)?;
        let (inner, pad, truncation, largest, cuts) = read.map_err(|e| refused(e.to_string()))?;
        let vocab = largest.map_or(0, |largest| largest as usize + 1);
        if vocab == 0 {
            return Err(TextError::file(path, "has no tokens"));
        }
        let pad = if (pad as usize) < vocab { pad } else { 0 };
        Ok(Self { inner, path: path.into(), json, vocab, pad, truncation, cuts })
    }

    /// The token that pads, as the file states it, or else 0.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// Whether the beginning of a long text is cut off, and not its end.
    pub(super) fn cuts_beginnings(&self) -> bool {
        self.truncation == TruncationDirection::Left
    }

    /// The contents of the file.
    pub(super) fn json(&self) -> &[u8] {
        &self.json
    }

    /// The number above all tokens.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The tokens of each text, with the special tokens that the tokenizer adds, cut to `max_length` tokens: the
    /// `input_ids` of `tokenizer(text, truncation=True, max_length=max_length)` in transformers. Runs in parallel. Only
    /// the needed pieces of a long text are tokenized, if the tokens are then the same.
    pub fn encode(
        &self,
        texts: &[String],
        max_length: usize,
        progress: Progress<'_>,
    ) -> Result<Vec<Vec<u32>>, TextError> {
        let added = self.inner.get_post_processor().map_or(0, |added| added.added_tokens(false));
        if max_length <= added {
            return Err(TextError::NoRoom { path: self.path.clone(), added, max_length });
        }
        let mut inner = self.inner.clone();
        let direction = self.truncation;
        let truncation = TruncationParams { max_length, direction, ..TruncationParams::default() };
        let truncated = inner.with_truncation(Some(truncation));
        truncated.map_err(|error| TextError::file(&self.path, error))?;
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let encode = |text: &str| {
            let kept = self.kept(text, max_length - added)?;
            self.encode_one(&inner, kept, true)
        };
        self.encode_all(&texts, encode, progress)
    }

    /// All tokens of one text, with the special tokens that the tokenizer adds.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_one(&self.inner, text, true)
    }

    /// The text of tokens. Special tokens, and numbers that are no tokens, have none.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TextError> {
        let decoded = guarded(|| self.inner.decode(tokens, true));
        let decoded = decoded.and_then(|decoded| decoded.map_err(|error| error.to_string()));
        decoded.map_err(|error| {
            let error = excerpt(&error);
            TextError::file(&self.path, format!("cannot make a text of tokens: {error}"))
        })
    }

    /// All tokens of a running text, without special tokens. Pieces of the text are tokenized in
    /// parallel, if the tokens are then those of the whole text. Otherwise it is tokenized as a whole, which takes longer
    /// and more memory.
    pub fn encode_running_text(
        &self,
        text: &str,
        progress: Progress<'_>,
    ) -> Result<Vec<u32>, TextError> {
        let pieces: Vec<&str> = self.cuts.pieces(text, PIECE_BYTES).collect();
        let encode = |piece: &str| self.encode_one(&self.inner, piece, false);
        Ok(self.encode_all(&pieces, encode, progress)?.concat())
    }

    /// The part of a text that has the `num_tokens` tokens that are kept: all of a short text.
    fn kept<'a>(&self, text: &'a str, num_tokens: usize) -> Result<&'a str, TextError> {
        if text.len() <= 2 * PIECE_BYTES {
            return Ok(text);
        }
        let mut pieces: Vec<&str> = self.cuts.pieces(text, PIECE_BYTES).collect();
        if self.cuts_beginnings() {
            pieces.reverse();
        }
        let (mut num_bytes, mut found) = (0, 0);
        for piece in pieces {
            // The rest of a text that cannot be cut is tokenized by the caller.
            if found >= num_tokens || num_bytes + piece.len() == text.len() {
                break;
            }
            found += self.encode_one(&self.inner, piece, false)?.len();
            num_bytes += piece.len();
        }
        Ok(match self.truncation {
            _ if found < num_tokens => text,
            TruncationDirection::Left => &text[text.len() - num_bytes..],
            TruncationDirection::Right => &text[..num_bytes],
        })
    }

    /// The tokens of each text, in parallel, as `encode` makes them.
    fn encode_all(
        &self,
        texts: &[&str],
        encode: impl Fn(&str) -> Result<Vec<u32>, TextError> + Sync,
        progress: Progress<'_>,
    ) -> Result<Vec<Vec<u32>>, TextError> {
        let mut all = Vec::with_capacity(texts.len());
        progress(0, texts.len());
        while let Some(rest) = texts.get(all.len()..).filter(|rest| !rest.is_empty()) {
            let mut num_bytes = 0;
            let fit = rest.iter().take(CHUNK).take_while(|text| {
                num_bytes += text.len();
                num_bytes <= CHUNK_BYTES
            });
            let chunk = &rest[..fit.count().max(1)];
            all.extend(in_parallel(chunk, &|text: &&str| encode(text))?);
            progress(all.len(), texts.len());
        }
        Ok(all)
    }

    fn encode_one(
        &self,
        inner: &tokenizers::Tokenizer,
        text: &str,
        adds_special: bool,
    ) -> Result<Vec<u32>, TextError> {
        if text.len() > MAX_PIECE_BYTES {
            let problem = format!(
                "takes about 100 times the memory of the text that begins with \"{}\", because its {} MiB have no place where \
                 they can be cut without other tokens, and at most {} MiB are tokenized at once; divide it",
                excerpt(text),
                text.len() >> 20,
                MAX_PIECE_BYTES >> 20
            );
            return Err(TextError::file(&self.path, problem));
        }
        let encoded = guarded(|| inner.encode_fast(text, adds_special));
        let encoded = encoded.and_then(|encoded| encoded.map_err(|error| error.to_string()));
        match encoded {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => {
                let (error, text) = (excerpt(&error), excerpt(text));
                let problem =
                    format!("cannot tokenize the text that begins with \"{text}\": {error}");
                Err(TextError::file(&self.path, problem))
            }
        }
    }
}

/// The results of `run` for each item, in their order, on this thread if there are no others.
pub(super) fn in_parallel<I: Sync, T: Send, E: Send>(
    items: &[I],
    run: &(impl Fn(&I) -> Result<T, E> + Sync),
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let made = Mutex::new(Vec::with_capacity(items.len()));
    let work = || {
        while let Some(at) =
            Some(next.fetch_add(1, Ordering::Relaxed)).filter(|at| *at < items.len())
        {
            let outcome = run(&items[at]);
            if outcome.is_err() {
                // The others begin no further item.
                next.store(items.len(), Ordering::Relaxed);
            }
            made.lock().expect("no thread panics with the lock").push((at, outcome));
        }
    };
    thread::scope(|scope| {
        let most = thread::available_parallelism().map_or(1, NonZero::get).min(items.len());
        for at in 1..most {
            let thread = thread_builder(format!("tokenize-{at}"));
            if thread.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let mut made = made.into_inner().expect("no thread panics with the lock");
    made.sort_by_key(|(at, _)| *at);
    made.into_iter().map(|(_, outcome)| outcome).collect()
}
