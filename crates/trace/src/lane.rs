//! A lane: the spans of one thread, in a buffer of fixed size.

use crate::{Span, now_ns};

/// The spans of one thread of work (the training loop, the communication worker, ...).
///
/// One thread owns a lane, so recording takes no lock, and the buffer is allocated once. A span
/// that no longer fits is counted in [`Lane::dropped`], never silently lost.
#[derive(Debug)]
pub struct Lane {
    spans: Vec<(&'static str, Span)>,
    dropped: u64,
}

impl Lane {
    /// A lane that holds up to `capacity` spans between two calls of [`Lane::clear`].
    pub fn with_capacity(capacity: usize) -> Self {
        Self { spans: Vec::with_capacity(capacity), dropped: 0 }
    }

    /// Runs `work` and records it under `name`.
    pub fn record<R>(&mut self, name: &'static str, work: impl FnOnce() -> R) -> R {
        let start_ns = now_ns();
        let result = work();
        self.push(name, Span { start_ns, end_ns: now_ns() });
        result
    }

    /// Records a span that was measured elsewhere.
    pub fn push(&mut self, name: &'static str, span: Span) {
        if self.spans.len() < self.spans.capacity() {
            self.spans.push((name, span));
        } else {
            self.dropped += 1;
        }
    }

    /// The spans recorded under `name` since the last [`Lane::clear`].
    pub fn named(&self, name: &str) -> impl Iterator<Item = Span> {
        self.spans.iter().filter(move |(n, _)| *n == name).map(|&(_, span)| span)
    }

    /// How many spans found no room since the lane was made.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Forgets the spans, keeps the memory.
    pub fn clear(&mut self) {
        self.spans.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_lane_counts_what_it_drops() {
        let mut lane = Lane::with_capacity(2);
        for _ in 0..5 {
            lane.record("work", || ());
        }
        assert_eq!((lane.named("work").count(), lane.dropped()), (2, 3));
        lane.clear();
        assert_eq!(lane.record("other", || 7), 7);
        assert_eq!((lane.named("work").count(), lane.named("other").count()), (0, 1));
    }
}
