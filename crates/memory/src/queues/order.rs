//! Positions in streams, and which of them come before others.
//!
//! Two uses of the same memory are safe if the program has ordered them. This is the happens-before relation (Lamport, "Time,
//! Clocks, and the Ordering of Events in a Distributed System", 1978), kept as a vector of positions (Mattern, 1988).
//! Whether work happens to be done already plays no part: a missing order is an error on the first run.
//!
//! All threads of the host count as one: if one of them has waited for work, all of them may use its memory.
//!
//! This module knows neither work nor memory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Name and progress of a stream, shared by its positions.
#[derive(Debug)]
pub(crate) struct StreamId {
    pub(super) name: String,
    /// The last position that the host has waited for, or found complete.
    observed: AtomicU64,
}

impl StreamId {
    pub(super) fn new(name: String) -> Arc<Self> {
        Arc::new(Self { name, observed: AtomicU64::new(0) })
    }
}

/// The n-th submission to a stream, counted from 1.
#[derive(Clone)]
pub(crate) struct StreamPosition {
    pub(super) stream: Arc<StreamId>,
    pub(super) index: u64,
}

impl StreamPosition {
    pub(crate) fn stream_name(&self) -> &str {
        &self.stream.name
    }

    pub(crate) fn is_same_stream(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.stream, &other.stream)
    }

    /// Whether the host has waited for it, so that all work submitted from now on comes after it.
    pub(crate) fn is_observed(&self) -> bool {
        self.stream.observed.load(Ordering::Acquire) >= self.index
    }

    /// Notes that the host has waited for it.
    pub(super) fn observe(&self) {
        self.stream.observed.fetch_max(self.index, Ordering::AcqRel);
    }
}

impl fmt::Debug for StreamPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.stream.name, self.index)
    }
}

/// The last position of each stream that has been waited for: few entries, because few streams wait for each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct VectorClock(Vec<StreamPosition>);

impl VectorClock {
    /// Whether a position has been waited for.
    pub(crate) fn has(&self, position: &StreamPosition) -> bool {
        let known = self.0.iter().find(|known| known.is_same_stream(position));
        known.is_some_and(|known| known.index >= position.index)
    }

    pub(super) fn add(&mut self, position: &StreamPosition) {
        match self.0.iter_mut().find(|known| known.is_same_stream(position)) {
            Some(known) => known.index = known.index.max(position.index),
            None => self.0.push(position.clone()),
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        other.0.iter().for_each(|position| self.add(position));
    }

    /// Drops the positions that the host has waited for: everything submitted from now on comes after them.
    pub(super) fn forget_observed(&mut self) {
        self.0.retain(|position| !position.is_observed());
    }

    /// Notes that the host has waited for all these positions.
    pub(super) fn observe(&self) {
        self.0.iter().for_each(StreamPosition::observe);
    }
}
