//! Tokenized texts as data sets.
//!
//! Input: tokens. Output: samples: texts of different lengths with a class each, or blocks of running text with the next
//! token as the target of each token. This module knows nothing of files and of tokenizers.

use super::TokenRows;
use crate::digest::ContentDigest;
use crate::{Dataset, Field, Sample};

/// The padding of a batch's rows after the end of a text. A model looks at the lengths, and never at this token.
const PAD: i64 = 0;

/// Texts with a class each: `inputs`, i64 of different lengths, and `targets`, a class.
#[derive(Debug)]
pub struct TokenDataset {
    rows: TokenRows,
    longest: usize,
    vocab: usize,
    num_classes: usize,
    class_names: Vec<String>,
}

impl TokenDataset {
    pub(super) fn new(
        rows: TokenRows,
        vocab: usize,
        num_classes: usize,
        class_names: Vec<String>,
    ) -> Self {
        let lengths = (0..rows.ends.len()).map(|row| rows.row(row).len());
        let longest = lengths.max().unwrap_or(0);
        Self { rows, longest, vocab, num_classes, class_names }
    }
}

impl Dataset for TokenDataset {
    fn len(&self) -> usize {
        self.rows.ends.len()
    }

    fn fields(&self) -> Vec<Field> {
        let inputs = Field::ragged_i64(Field::INPUTS, self.longest, PAD).below(self.vocab);
        vec![inputs, Field::class(self.num_classes)]
    }

    fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let tokens = self.rows.row(index);
        sample.set_length(tokens.len());
        for (value, &token) in sample.i64(Field::INPUTS).iter_mut().zip(tokens) {
            *value = i64::from(token);
        }
        sample.set_class(self.rows.labels[index]);
    }

    fn class_names(&self) -> Vec<String> {
        self.class_names.clone()
    }

    fn digest(&self) -> Option<String> {
        let TokenRows { ends, labels, tokens } = &self.rows;
        let contents = ContentDigest::default().numbers(ends, u64::to_le_bytes);
        let contents = contents.numbers(labels, i64::to_le_bytes);
        Some(contents.numbers(tokens, u32::to_le_bytes).finish())
    }

    fn lengths(&self) -> Option<Vec<u32>> {
        Some((0..self.len()).map(|row| self.rows.row(row).len() as u32).collect())
    }
}

/// Blocks of a running text: `inputs` and `targets`, i64 (seq_len). The targets are the inputs moved by one token.
/// Tokens that make no whole block at the end are left out.
#[derive(Debug)]
pub struct TokenBlocks {
    pub(super) tokens: Vec<u32>,
    pub(super) seq_len: usize,
    pub(super) vocab: usize,
}

impl Dataset for TokenBlocks {
    fn len(&self) -> usize {
        self.tokens.len().saturating_sub(1) / self.seq_len
    }

    fn fields(&self) -> Vec<Field> {
        let tokens = |name| Field::i64(name, [self.seq_len]).below(self.vocab);
        vec![tokens(Field::INPUTS), tokens(Field::TARGETS)]
    }

    fn digest(&self) -> Option<String> {
        Some(ContentDigest::default().numbers(&self.tokens, u32::to_le_bytes).finish())
    }

    fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
        for (name, shift) in [(Field::INPUTS, 0), (Field::TARGETS, 1)] {
            let tokens = &self.tokens[index * self.seq_len + shift..][..self.seq_len];
            for (value, &token) in sample.i64(name).iter_mut().zip(tokens) {
                *value = i64::from(token);
            }
        }
    }
}
