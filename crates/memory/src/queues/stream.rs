//! Streams: queues of work that runs in order, on a thread of the processor or on an accelerator.
//!
//! Work of one stream is ordered. Work of several streams is ordered where one waits, directly or through others, for an
//! [`Event`] of the other.
//!
//! Input: submissions and waits. Output: positions and events. This module knows neither memory nor the work itself.

use std::sync::{Arc, Mutex};

use paceline_trace::lock;

use super::event::{Event, Signal, WorkRunner};
use super::order::{StreamId, StreamPosition, VectorClock};

/// A queue of work that runs in order. Clones are the same stream, and equal; streams of the same name are not.
#[derive(Clone, Debug)]
pub struct Stream(Arc<StreamState>);

#[derive(Debug)]
struct StreamState {
    id: Arc<StreamId>,
    clock: Mutex<StreamClock>,
}

#[derive(Debug, Default)]
struct StreamClock {
    submitted: u64,
    /// Positions of other streams that this one has waited for.
    seen: VectorClock,
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Stream {
    /// A stream without work. Errors call it by this name.
    pub fn new(name: impl Into<String>) -> Self {
        let (id, clock) = (StreamId::new(name.into()), Mutex::default());
        Self(Arc::new(StreamState { id, clock }))
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.0.id.name
    }

    /// Takes the next position of the stream. Returns the event after it, and the right to say that the work is done.
    pub fn submit(&self) -> (Event, Signal) {
        self.submit_to(None, None)
    }

    /// The same for work that a runner has, or that is captured with memory of a graph pool.
    pub(super) fn submit_to(
        &self,
        runner: Option<Arc<dyn WorkRunner>>,
        graph_pool: Option<u32>,
    ) -> (Event, Signal) {
        let mut clock = lock(&self.0.clock);
        clock.submitted += 1;
        clock.seen.forget_observed();
        let position = StreamPosition { stream: self.0.id.clone(), index: clock.submitted };
        let before = clock.seen.clone();
        drop(clock);
        Event::pending(position, before, runner, graph_pool)
    }

    /// Orders all later work of this stream after the event. The runner of the work makes it wait.
    pub fn wait(&self, event: &Event) {
        // Withdrawn work orders nothing.
        if let Some((position, before)) = event.order().filter(|_| !event.is_withdrawn()) {
            let mut clock = lock(&self.0.clock);
            clock.seen.merge(before);
            clock.seen.add(position);
        }
    }

    /// Whether all later work of this stream comes after the event.
    pub(crate) fn is_after(&self, event: &Event) -> bool {
        let Some((position, _)) = event.order() else { return true };
        position.is_observed()
            || Arc::ptr_eq(&position.stream, &self.0.id)
            || lock(&self.0.clock).seen.has(position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_equal_by_identity_and_not_by_name() {
        let (copy, other) = (Stream::new("copy"), Stream::new("copy"));
        assert_eq!((copy == copy.clone(), copy == other), (true, false));
        let (event, signal) = copy.submit();
        signal.complete();
        assert_eq!((copy.is_after(&event), other.is_after(&event)), (true, false));
    }
}
