//! The members of one generation, and the texts that they exchange.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::wire::Notice;

/// The most exchanges at a time.
const MAX_ROUNDS: usize = 64;

/// A generation that was decided.
#[derive(Debug, Default)]
pub(super) struct Generation {
    pub(super) number: u64,
    /// Its members in rank order, then the spares.
    members: Vec<u64>,
    size: usize,
    /// Whether its members have been asked to meet again.
    pub(super) is_asked: bool,
    is_broken: bool,
    /// The spares that wait for the next generation, and give empty texts.
    waiting: BTreeSet<u64>,
    /// The exchanges that are not complete, by name.
    rounds: BTreeMap<String, OpenExchange>,
}

#[derive(Debug)]
struct OpenExchange {
    begin: Duration,
    /// By rank.
    texts: Vec<Option<String>>,
}

impl Generation {
    pub(super) fn new(number: u64, members: Vec<u64>, size: usize) -> Self {
        Self { number, members, size, ..Self::default() }
    }

    /// The members that have a rank.
    pub(super) fn ranks(&self) -> &[u64] {
        &self.members[..self.size]
    }

    /// The members and the spares.
    pub(super) fn everybody(&self) -> &[u64] {
        &self.members
    }

    /// A spare waits for the next generation. Returns whether others wait for a text of it.
    pub(super) fn wait(&mut self, spare: u64) -> bool {
        let Some(at) = self.members.iter().position(|&of| of == spare) else { return false };
        self.waiting.insert(spare);
        self.rounds.values().any(|round| round.texts[at].is_none())
    }

    /// Takes a member's text. Returns the notice for all members if it was the last one of its exchange.
    pub(super) fn take(
        &mut self,
        from: u64,
        (name, text): (String, String),
        now: Duration,
    ) -> Option<Notice> {
        let rank = self.members.iter().position(|&of| of == from)?;
        let is_known = self.rounds.contains_key(&name);
        if self.is_broken || !is_known && self.rounds.len() == MAX_ROUNDS {
            return None;
        }
        let of_waiting = |of: &u64| self.waiting.contains(of).then(String::new);
        let texts = self.members.iter().map(of_waiting).collect();
        let empty = || OpenExchange { begin: now, texts };
        let round = self.rounds.entry(name.clone()).or_insert_with(empty);
        round.texts[rank] = Some(text);
        if round.texts.contains(&None) {
            return None;
        }
        let texts = self.rounds.remove(&name)?.texts.into_iter().flatten().collect();
        Some(Notice::Texts { generation: self.number, name, texts })
    }

    /// Ends all exchanges of this generation. Returns the notice for its members, the first time.
    pub(super) fn end(&mut self, reason: String) -> Option<Notice> {
        self.rounds.clear();
        let is_first = !std::mem::replace(&mut self.is_broken, true);
        let has_members = !self.members.is_empty();
        (is_first && has_members).then_some(Notice::Broken { generation: self.number, reason })
    }

    /// The members for which the others have waited longer than `limit` in an exchange.
    pub(super) fn missing(&self, now: Duration, limit: Duration) -> Vec<u64> {
        let late = |round: &&OpenExchange| now >= round.begin + limit;
        let Some(round) = self.rounds.values().find(late) else { return Vec::new() };
        let missing = round.texts.iter().zip(&self.members).filter(|(text, _)| text.is_none());
        missing.map(|(_, member)| *member).collect()
    }

    pub(super) fn has_open_rounds(&self) -> bool {
        !self.rounds.is_empty()
    }
}
