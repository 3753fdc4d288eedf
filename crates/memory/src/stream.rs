//! Streams, and what the program has ordered between them.
//!
//! A stream is a queue of work that runs in order: a thread of the processor, or a queue of an accelerator. Two uses of the
//! same memory are safe if the program has ordered them: they are work of one stream, or the later one waits, directly or
//! through others, for an [`Event`](crate::Event) behind the earlier one. This is the happens-before relation (Lamport,
//! "Time, Clocks, and the Ordering of Events in a Distributed System", 1978), kept as a vector of positions (Mattern,
//! 1988). Whether work happens to be done already plays no part: what is not ordered is an error on the first run.
//!
//! All threads of the host count as one: what one of them has waited for, all of them may use.
//!
//! Input: who submits work, and who waits for what. Output: positions, and whether one comes before another. This module
//! knows neither memory nor what the work does.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use paceline_trace::lock;

use crate::event::{Event, Signal, Waiter};

/// A queue of work that runs in order. Clones are the same stream.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    mark: Arc<Mark>,
    submitted: Mutex<Submitted>,
}

/// What positions know of their stream.
#[derive(Debug)]
pub(crate) struct Mark {
    name: String,
    /// The last position that the host has waited for, or found complete.
    observed: AtomicU64,
}

#[derive(Debug, Default)]
struct Submitted {
    position: u64,
    /// What the stream has waited for.
    seen: Clock,
}

impl Stream {
    /// A stream without work. Errors call it by this name.
    pub fn new(name: impl Into<String>) -> Self {
        let mark = Mark { name: name.into(), observed: AtomicU64::new(0) };
        Self(Arc::new(Inner { mark: Arc::new(mark), submitted: Mutex::default() }))
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.0.mark.name
    }

    /// Takes the next position of the stream. Returns the event behind it, and the right to say that the work is done.
    pub fn submit(&self) -> (Event, Signal) {
        self.submit_on(Waiter::Sleeps)
    }

    /// The same for work of a device.
    pub(crate) fn submit_on(&self, waiter: Waiter) -> (Event, Signal) {
        let mut submitted = lock(&self.0.submitted);
        submitted.position += 1;
        submitted.seen.forget_observed();
        let place = Place { mark: self.0.mark.clone(), position: submitted.position };
        let before = submitted.seen.clone();
        drop(submitted);
        Event::pending(place, before, waiter)
    }

    /// Orders all later work of this stream behind the event. Whoever runs the work sees to it that it waits.
    pub fn wait(&self, event: &Event) {
        if let Some((place, before)) = event.order() {
            let mut submitted = lock(&self.0.submitted);
            submitted.seen.merge(before);
            submitted.seen.add(place);
        }
    }

    /// Whether all later work of this stream comes behind the event.
    pub(crate) fn is_behind(&self, event: &Event) -> bool {
        let Some((place, _)) = event.order() else { return true };
        place.is_observed()
            || Arc::ptr_eq(&place.mark, &self.0.mark)
            || lock(&self.0.submitted).seen.has(place)
    }
}

/// A position in a stream: the work that was submitted as the so-and-so-manieth, from 1.
#[derive(Clone)]
pub(crate) struct Place {
    mark: Arc<Mark>,
    position: u64,
}

impl Place {
    /// The name of the stream.
    pub(crate) fn stream(&self) -> &str {
        &self.mark.name
    }

    pub(crate) fn is_same_stream(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mark, &other.mark)
    }

    /// Whether the host has waited for it, so that everything that comes now comes behind it.
    pub(crate) fn is_observed(&self) -> bool {
        self.mark.observed.load(Ordering::Acquire) >= self.position
    }

    fn observe(&self) {
        self.mark.observed.fetch_max(self.position, Ordering::AcqRel);
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.mark.name, self.position)
    }
}

/// For each stream the last position that lies behind: a vector of positions. It has as many entries as there are streams
/// that are waited for, which are few.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Vec<Place>);

impl Clock {
    /// Whether a place lies behind.
    pub(crate) fn has(&self, place: &Place) -> bool {
        let known = self.0.iter().find(|known| known.is_same_stream(place));
        known.is_some_and(|known| known.position >= place.position)
    }

    fn add(&mut self, place: &Place) {
        match self.0.iter_mut().find(|known| known.is_same_stream(place)) {
            Some(known) => known.position = known.position.max(place.position),
            None => self.0.push(place.clone()),
        }
    }

    fn merge(&mut self, other: &Self) {
        other.0.iter().for_each(|place| self.add(place));
    }

    /// What the host has waited for lies behind everything that comes now, so no vector has to say it.
    fn forget_observed(&mut self) {
        self.0.retain(|place| !place.is_observed());
    }

    /// The host has waited for everything that lies behind, and for `place`.
    pub(crate) fn observe_with(&self, place: &Place) {
        self.0.iter().for_each(Place::observe);
        place.observe();
    }
}
