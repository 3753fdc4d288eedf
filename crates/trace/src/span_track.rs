//! The spans and marks of one thread, in buffers of fixed size.

use std::fmt;

use crate::{Markers, Span, now_ns};

/// A time at which something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The kind of event.
    pub name: &'static str,
    /// The number of the thing to which it happened.
    pub id: usize,
    /// When it happened, in nanoseconds of [`now_ns`].
    pub at_ns: u64,
}

/// The spans of one thread of work (the training loop, the communication worker, ...).
///
/// One thread owns a track, so recording takes no lock. The buffers are allocated once. Events that
/// do not fit are counted in [`SpanTrack::dropped`].
///
/// ```
/// use paceline_trace::SpanTrack;
///
/// let mut track = SpanTrack::with_capacity(8);
/// let sum = track.record("add", || 1 + 1);
/// assert_eq!((sum, track.named("add").count()), (2, 1));
/// ```
#[derive(Debug)]
pub struct SpanTrack {
    spans: Vec<(&'static str, Span)>,
    marks: Vec<Mark>,
    /// The spans before [`SpanTrack::move_to`].
    on_host: Vec<(&'static str, Span)>,
    dropped: u64,
    /// Where spans are marked too, while they run.
    markers: Vec<Box<dyn Markers>>,
}

impl SpanTrack {
    /// A track that holds up to `capacity` spans, and as many marks, between two calls of [`SpanTrack::clear`].
    pub fn with_capacity(capacity: usize) -> Self {
        let (spans, marks) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
        Self { spans, marks, on_host: Vec::new(), dropped: 0, markers: Vec::new() }
    }

    /// The same track, which also marks its spans for other tools while they run.
    pub fn marking(self, markers: Vec<Box<dyn Markers>>) -> Self {
        Self { markers, ..self }
    }

    /// Marks the beginning of something that is no span of the track.
    pub fn mark_begin(&self, name: fmt::Arguments) {
        self.markers.iter().for_each(|markers| markers.begin(name));
    }

    /// Marks the end of the last beginning or span.
    pub fn mark_end(&self) {
        self.markers.iter().for_each(|markers| markers.end());
    }

    /// Runs `work` and records it under `name`.
    pub fn record<R>(&mut self, name: &'static str, work: impl FnOnce() -> R) -> R {
        let start_ns = self.begin(name);
        let result = work();
        self.end(name, start_ns);
        result
    }

    /// Begins a span, for work that uses the track itself. Returns the time.
    pub fn begin(&self, name: &'static str) -> u64 {
        self.mark_begin(format_args!("{name}"));
        now_ns()
    }

    /// Ends the span that has begun last, at `start_ns`, and records it.
    pub fn end(&mut self, name: &'static str, start_ns: u64) {
        self.push(name, Span { start_ns, end_ns: now_ns() });
        self.mark_end();
    }

    /// Records a span that was measured elsewhere.
    pub fn push(&mut self, name: &'static str, span: Span) {
        if self.spans.len() < self.spans.capacity() {
            self.spans.push((name, span));
        } else {
            self.dropped += 1;
        }
    }

    /// Records that something happened now.
    pub fn mark(&mut self, name: &'static str, id: usize) {
        self.mark_at(name, id, now_ns());
    }

    /// Records that something happened at `at_ns`.
    pub fn mark_at(&mut self, name: &'static str, id: usize, at_ns: u64) {
        if self.marks.len() < self.marks.capacity() {
            self.marks.push(Mark { name, id, at_ns });
        } else {
            self.dropped += 1;
        }
    }

    /// Moves each span, and each mark of a stream, from the time at which the host had put work into the stream to the time at
    /// which it was done. `done_ns` maps the first to the second; `is_of_stream` selects the marks to move.
    pub fn move_to(&mut self, done_ns: impl Fn(u64) -> u64, is_of_stream: impl Fn(&str) -> bool) {
        self.on_host.extend_from_slice(&self.spans);
        for (_, span) in &mut self.spans {
            *span = Span { start_ns: done_ns(span.start_ns), end_ns: done_ns(span.end_ns) };
        }
        let marks = self.marks.iter_mut().filter(|mark| is_of_stream(mark.name));
        marks.for_each(|mark| mark.at_ns = done_ns(mark.at_ns));
    }

    /// All spans as the thread itself saw them.
    pub fn on_host(&self) -> impl Iterator<Item = (&'static str, Span)> {
        let spans = if self.on_host.is_empty() { &self.spans } else { &self.on_host };
        spans.iter().copied()
    }

    /// All spans as a device saw them, if they have been moved to its times.
    pub fn on_device(&self) -> impl Iterator<Item = (&'static str, Span)> {
        let is_moved = !self.on_host.is_empty();
        self.spans.iter().copied().filter(move |_| is_moved)
    }

    /// The marks recorded under `name` since the last [`SpanTrack::clear`].
    pub fn marked(&self, name: &str) -> impl Iterator<Item = Mark> {
        self.marks.iter().filter(move |mark| mark.name == name).copied()
    }

    /// The spans recorded under `name` since the last [`SpanTrack::clear`].
    pub fn named(&self, name: &str) -> impl Iterator<Item = Span> {
        self.spans.iter().filter(move |(n, _)| *n == name).map(|&(_, span)| span)
    }

    /// All marks since the last [`SpanTrack::clear`].
    pub fn marks(&self) -> impl Iterator<Item = Mark> {
        self.marks.iter().copied()
    }

    /// The number of spans and marks that did not fit, since the track was created.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Removes all spans and marks, and keeps the memory.
    pub fn clear(&mut self) {
        self.spans.clear();
        self.on_host.clear();
        self.marks.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_move_to_the_time_of_a_device_and_stay_known_as_the_host_saw_them() {
        let mut track = SpanTrack::with_capacity(4);
        let span = |start_ns, end_ns| Span { start_ns, end_ns };
        track.push("forward", span(1, 3));
        track.mark_at("ready", 0, 2);
        track.mark_at("submitted", 0, 3);
        track.move_to(|ns| 10 * ns, |name| name == "ready");
        assert_eq!(track.named("forward").collect::<Vec<_>>(), [span(10, 30)]);
        assert_eq!(track.marks().map(|mark| mark.at_ns).collect::<Vec<_>>(), [20, 3]);
        assert_eq!(track.on_host().collect::<Vec<_>>(), [("forward", span(1, 3))]);
        assert_eq!(track.on_device().collect::<Vec<_>>(), [("forward", span(10, 30))]);
        track.clear();
        assert_eq!(track.on_host().count(), 0);
    }

    #[test]
    fn a_full_lane_counts_what_it_drops() {
        let mut track = SpanTrack::with_capacity(2);
        for _ in 0..5 {
            track.record("work", || ());
        }
        assert_eq!((track.named("work").count(), track.dropped()), (2, 3));
        (0..3).for_each(|id| track.mark("ready", id));
        assert_eq!(track.marked("ready").map(|mark| mark.id).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(track.dropped(), 4);
        track.clear();
        assert_eq!(track.record("other", || 7), 7);
        assert_eq!((track.named("work").count(), track.named("other").count()), (0, 1));
    }
}
