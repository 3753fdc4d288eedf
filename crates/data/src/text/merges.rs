//! Byte pair encoding: which neighbors become one token, again and again.
//!
//! Input: words as tokens, with how often each occurs. Output: one pair after the other, the most frequent one first. Each merge
//! visits only the positions where its pair may be, so a word of a million letters takes no longer than many short ones. The
//! merges are those of the trainer of Hugging Face's `tokenizers`. This module knows no text.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Two tokens that are neighbors.
type Pair = (u32, u32);

/// No position; or the token of a position that has become a part of the one before.
const NONE: u32 = u32::MAX;
/// Pairs that occur less often stay two tokens.
const LEAST: i64 = 2;

/// A pair that may be merged in some words. The order of a queue: the most frequent one, and then the lowest tokens.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Merge {
    count: i64,
    pair: Reverse<Pair>,
    /// The words in which the pair came up at the same time, sorted.
    words: Vec<u32>,
}

impl Merge {
    pub fn pair(&self) -> Pair {
        self.pair.0
    }
}

/// The positions of words, one after the other, and the pairs in them.
#[derive(Debug, Default)]
pub(super) struct Merger {
    /// How often each word occurs.
    counts: Vec<i64>,
    /// Of each position: its token, its word, and the positions before and after it in the word.
    tokens: Vec<u32>,
    words: Vec<u32>,
    before: Vec<u32>,
    after: Vec<u32>,
    /// How often each pair occurs. A pair that was merged keeps its count.
    pairs: HashMap<Pair, i64>,
    /// Where each pair came up. Some may be gone.
    positions: HashMap<Pair, Vec<u32>>,
    queue: BinaryHeap<Merge>,
}

impl Merger {
    /// Words with how often each occurs. `None` if they have more positions than can be numbered.
    pub fn new<W: Iterator<Item = u32>>(words: impl Iterator<Item = (W, u64)>) -> Option<Self> {
        let mut this = Self::default();
        let mut new = Vec::new();
        for (word, count) in words {
            let number = this.counts.len() as u32;
            this.counts.push(count as i64);
            let begin = this.tokens.len();
            this.tokens.extend(word);
            let end = this.tokens.len();
            if end >= NONE as usize {
                return None;
            }
            for at in begin..end {
                this.words.push(number);
                this.before.push(if at > begin { at as u32 - 1 } else { NONE });
                this.after.push(if at + 1 < end { at as u32 + 1 } else { NONE });
            }
            for at in begin + 1..end {
                let pair = (this.tokens[at - 1], this.tokens[at]);
                this.came_up(pair, at as u32 - 1, &mut new);
            }
        }
        this.enqueue(new);
        Some(this)
    }

    /// The next pair to merge.
    pub fn next(&mut self) -> Option<Merge> {
        loop {
            let mut next = self.queue.pop()?;
            let count = self.pairs[&next.pair()];
            if next.count == count {
                return (count >= LEAST).then_some(next);
            }
            next.count = count;
            self.queue.push(next);
        }
    }

    /// Makes `new` of the pair wherever it is in the words of the merge, from left to right.
    pub fn merge(&mut self, merge: Merge, new: u32) {
        let (pair, words) = (merge.pair(), merge.words);
        let mut positions = self.positions.remove(&pair).unwrap_or_default();
        positions.sort_unstable();
        positions.dedup();
        // Where the pair came up later, if two pairs make the same token, it is in the queue once more.
        let is_here = |at: &u32| words.binary_search(&self.words[*at as usize]).is_ok();
        let (here, later): (Vec<u32>, Vec<u32>) = positions.into_iter().partition(is_here);
        if !later.is_empty() {
            self.positions.insert(pair, later);
        }
        let mut pairs = Vec::new();
        for at in here {
            let next = self.after[at as usize];
            let is_there = self.tokens[at as usize] == pair.0
                && next != NONE
                && self.tokens[next as usize] == pair.1;
            if !is_there {
                continue;
            }
            let (first, last) = (self.before[at as usize], self.after[next as usize]);
            (self.tokens[at as usize], self.tokens[next as usize]) = (new, NONE);
            self.after[at as usize] = last;
            if first != NONE {
                let before = self.tokens[first as usize];
                self.is_gone((before, pair.0), at);
                self.came_up((before, new), first, &mut pairs);
            }
            if last != NONE {
                self.before[last as usize] = at;
                let after = self.tokens[last as usize];
                self.is_gone((pair.1, after), at);
                self.came_up((new, after), at, &mut pairs);
            }
        }
        self.enqueue(pairs);
    }

    /// Counts a pair at a position, and notes its word.
    fn came_up(&mut self, pair: Pair, at: u32, new: &mut Vec<(Pair, u32)>) {
        let word = self.words[at as usize];
        *self.pairs.entry(pair).or_default() += self.counts[word as usize];
        self.positions.entry(pair).or_default().push(at);
        new.push((pair, word));
    }

    fn is_gone(&mut self, pair: Pair, at: u32) {
        let word = self.words[at as usize];
        *self.pairs.entry(pair).or_default() -= self.counts[word as usize];
    }

    /// Queues pairs with the words in which they came up.
    fn enqueue(&mut self, mut new: Vec<(Pair, u32)>) {
        new.sort_unstable();
        new.dedup();
        for same in new.chunk_by(|a, b| a.0 == b.0) {
            let pair = same[0].0;
            let count = self.pairs[&pair];
            if count > 0 {
                let words = same.iter().map(|(_, word)| *word).collect();
                self.queue.push(Merge { count, pair: Reverse(pair), words });
            }
        }
    }
}
