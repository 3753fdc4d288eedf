//! In place of the tokenizer in a build without the feature `tokenizers`: there is none, and reading one says so.

use std::path::Path;

use super::TextError;

/// Receives how many of how many texts (or pieces of a text) are done.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize);

/// A tokenizer, of which this build has none.
pub enum Tokenizer {}

#[expect(missing_docs, reason = "as in a build that has tokenizers")]
impl Tokenizer {
    pub fn load(path: &Path) -> Result<Self, TextError> {
        Self::from_json(path, Vec::new())
    }

    pub fn from_json(path: &Path, _: Vec<u8>) -> Result<Self, TextError> {
        let problem = "needs a build of paceline with its feature `tokenizers`";
        Err(TextError::file(path, problem))
    }

    pub fn train(_: &[String], _: usize) -> Result<Vec<u8>, TextError> {
        Self::load(Path::new("tokenizer.json")).map(|none| match none {})
    }

    pub fn pad(&self) -> u32 {
        match *self {}
    }

    pub(super) fn cuts_beginnings(&self) -> bool {
        match *self {}
    }

    pub(super) fn json(&self) -> &[u8] {
        match *self {}
    }

    pub fn vocab(&self) -> usize {
        match *self {}
    }

    pub fn encode(
        &self,
        _: &[String],
        _: usize,
        _: Progress<'_>,
    ) -> Result<Vec<Vec<u32>>, TextError> {
        match *self {}
    }

    pub fn encode_whole(&self, _: &str) -> Result<Vec<u32>, TextError> {
        match *self {}
    }

    pub fn decode(&self, _: &[u32]) -> Result<String, TextError> {
        match *self {}
    }

    pub fn encode_running_text(&self, _: &str, _: Progress<'_>) -> Result<Vec<u32>, TextError> {
        match *self {}
    }
}
