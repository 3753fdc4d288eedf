//! Turns tokens into text as they come, one after the other.
//!
//! Input: tokens. Output: pieces of text, which together are the text of all tokens. This module does not know where the
//! tokens come from.

use super::{TextError, Tokenizer};

/// The substitute for bytes that are no character. A token may end in the middle of one.
const INCOMPLETE: char = char::REPLACEMENT_CHARACTER;

/// The text that follows some tokens.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Where decoding begins. A decoder treats the first token in its own way, such as leaving out a space, so it is
    /// shown earlier tokens.
    from: usize,
    /// The tokens before this one have been given out.
    given: usize,
}

impl<'a> TextStream<'a> {
    /// A stream that follows `tokens`, whose text is not given out. Special tokens have no text.
    pub fn new(tokenizer: &'a Tokenizer, tokens: &[u32]) -> Self {
        Self { tokenizer, tokens: tokens.to_vec(), from: 0, given: tokens.len() }
    }

    /// The text of the next token, after text that earlier tokens have left incomplete. Empty if a character is incomplete.
    pub fn next(&mut self, token: u32) -> Result<String, TextError> {
        self.tokens.push(token);
        let text = self.text()?;
        if text.is_empty() || text.ends_with(INCOMPLETE) {
            return Ok(String::new());
        }
        (self.from, self.given) = (self.given, self.tokens.len());
        Ok(text)
    }

    /// The rest at the end: bytes that are no character.
    pub fn finish(self) -> Result<String, TextError> {
        self.text()
    }

    /// The text that has not been given out.
    fn text(&self) -> Result<String, TextError> {
        let before = self.tokenizer.decode(&self.tokens[self.from..self.given])?;
        let all = self.tokenizer.decode(&self.tokens[self.from..])?;
        Ok(all.get(before.len()..).unwrap_or_default().to_owned())
    }
}
