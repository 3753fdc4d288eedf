//! What has been done with each byte of a buffer: by the host, which holds claims, and by streams, whose work is ordered.
//!
//! A use by the host ends when its guard is dropped, and leaves nothing. Queued work leaves its place in its stream: who
//! uses the bytes next must come behind it ([`stream`](crate::Stream)). For each byte the last write counts, and for each
//! stream the last read behind it; what the host has waited for is forgotten. Ranges with the same history are one
//! segment, and segments are found by their place, so that the time of a look-up does not grow with their number.
//!
//! Input: ranges, and who wants to use them. Output: a refusal with what stands in the way. This module knows nothing of
//! addresses.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::event::EventState;
use crate::{Access, Event, MemoryError, Result, Stream};

/// The uses of one buffer.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    next_id: u64,
    held: Vec<Held>,
    /// Segments by their start; they do not overlap. No segment is without history.
    queued: BTreeMap<usize, Segment>,
}

/// A claim of the host.
#[derive(Debug)]
struct Held {
    id: u64,
    range: Range<usize>,
    access: Access,
    holder: &'static str,
}

/// Bytes with the same history.
#[derive(Clone, Debug)]
struct Segment {
    end: usize,
    /// The last write.
    write: Option<Queued>,
    /// The reads behind it: the last of each stream.
    reads: Vec<Queued>,
}

/// A use by queued work.
#[derive(Clone, Debug)]
pub(crate) struct Queued {
    pub(crate) event: Event,
    pub(crate) op: &'static str,
}

impl Queued {
    /// Whether nothing has to be known of it any longer.
    fn is_over(&self) -> bool {
        let Some((place, _)) = self.event.order() else { return true };
        self.event.is_withdrawn()
            || (place.is_observed() && self.event.peek() != EventState::Failed)
    }

    /// Whether it comes before work whose event is `later`; `None` stands for the host.
    fn is_before(&self, later: Option<&Event>) -> bool {
        if self.event.peek() == EventState::Failed {
            return self.event.is_withdrawn();
        }
        let Some((place, _)) = self.event.order() else { return true };
        let behind = later.and_then(Event::order);
        place.is_observed()
            || behind.is_some_and(|(of, seen)| of.is_same_stream(place) || seen.has(place))
    }
}

impl Segment {
    fn forget(&mut self) {
        self.write.take_if(|write| write.is_over());
        self.reads.retain(|read| !read.is_over());
    }

    fn is_empty(&self) -> bool {
        self.write.is_none() && self.reads.is_empty()
    }

    /// The use that a new one must come behind and does not.
    fn conflict(&self, access: Access, later: Option<&Event>) -> Option<(&Queued, &'static str)> {
        let writes = self.write.iter().map(|write| (write, "written"));
        let reads =
            self.reads.iter().filter(|_| access == Access::Write).map(|read| (read, "read"));
        writes.chain(reads).find(|(queued, _)| !queued.is_before(later))
    }
}

impl Uses {
    /// Claims a range for the host. Returns the number under which the claim is given back.
    pub(crate) fn claim(
        &mut self,
        range: &Range<usize>,
        access: Access,
        holder: &'static str,
    ) -> Result<u64> {
        self.check(range, access, holder, None)?;
        let id = self.next_id;
        self.next_id += 1;
        self.held.push(Held { id, range: range.clone(), access, holder });
        Ok(id)
    }

    /// Gives a claim back.
    pub(crate) fn give_back(&mut self, id: u64) {
        if let Some(at) = self.held.iter().position(|held| held.id == id) {
            self.held.swap_remove(at);
        }
    }

    /// Notes that the work before an event uses a range.
    pub(crate) fn queue(
        &mut self,
        range: &Range<usize>,
        access: Access,
        op: &'static str,
        event: &Event,
    ) -> Result<()> {
        self.check(range, access, op, Some(event))?;
        if range.is_empty() || event.order().is_none() {
            return Ok(());
        }
        let queued = Queued { event: event.clone(), op };
        self.split(range.start);
        self.split(range.end);
        match access {
            // A later use that comes behind this one comes behind all that this one comes behind.
            Access::Write => {
                let inside: Vec<usize> =
                    self.queued.range(range.clone()).map(|(at, _)| *at).collect();
                inside.iter().for_each(|at| drop(self.queued.remove(at)));
                let segment = Segment { end: range.end, write: Some(queued), reads: Vec::new() };
                self.queued.insert(range.start, segment);
            }
            Access::Read => {
                let mut at = range.start;
                let mut gaps = Vec::new();
                for (start, segment) in self.queued.range_mut(range.clone()) {
                    gaps.extend((at < *start).then_some(at..*start));
                    at = segment.end;
                    segment.reads.retain(|read| !is_same_stream(&read.event, event));
                    segment.reads.push(queued.clone());
                }
                gaps.extend((at < range.end).then_some(at..range.end));
                for gap in gaps {
                    let segment =
                        Segment { end: gap.end, write: None, reads: vec![queued.clone()] };
                    self.queued.insert(gap.start, segment);
                }
            }
        }
        Ok(())
    }

    /// Fails if somebody else uses the range in a way that excludes the new use. Forgets what is over.
    fn check(
        &mut self,
        range: &Range<usize>,
        access: Access,
        wanted: &'static str,
        later: Option<&Event>,
    ) -> Result<()> {
        let is_in_the_way = |held: &&Held| {
            held.range.start < range.end
                && range.start < held.range.end
                && (held.access == Access::Write || access == Access::Write)
        };
        if let Some(held) = self.held.iter().find(is_in_the_way) {
            let (range, holder) = (range.clone(), held.holder);
            return Err(MemoryError::Claimed { range, holder, wanted });
        }
        if self.queued.is_empty() || range.is_empty() {
            return Ok(());
        }
        let first =
            self.queued.range(..=range.start).next_back().map_or(range.start, |(at, _)| *at);
        let mut empty = Vec::new();
        for (start, segment) in self.queued.range_mut(first..range.end) {
            if segment.end <= range.start {
                continue;
            }
            segment.forget();
            if segment.is_empty() {
                empty.push(*start);
            } else if let Some(found) = segment.conflict(access, later) {
                return Err(refusal(range, found, wanted, later));
            }
        }
        empty.iter().for_each(|at| drop(self.queued.remove(at)));
        Ok(())
    }

    /// The queued work that later work of a stream would not come behind.
    pub(crate) fn not_before(&self, stream: &Stream) -> Vec<Event> {
        let all = self.queued.values().flat_map(|of| of.write.iter().chain(&of.reads));
        let others = all.filter(|queued| !queued.is_over() && !stream.is_behind(&queued.event));
        others.map(|queued| queued.event.clone()).collect()
    }

    /// Makes a segment begin at `at`, if one lies across.
    fn split(&mut self, at: usize) {
        let Some((_, segment)) = self.queued.range_mut(..at).next_back() else { return };
        if segment.end > at {
            let behind = segment.clone();
            segment.end = at;
            self.queued.insert(at, behind);
        }
    }
}

fn is_same_stream(a: &Event, b: &Event) -> bool {
    match (a.order(), b.order()) {
        (Some((a, _)), Some((b, _))) => a.is_same_stream(b),
        _ => false,
    }
}

fn refusal(
    range: &Range<usize>,
    (queued, how): (&Queued, &'static str),
    wanted: &'static str,
    later: Option<&Event>,
) -> MemoryError {
    let stream = |event: &Event| event.order().map_or(String::new(), |(of, _)| of.stream().into());
    let (range, op, on) = (range.clone(), queued.op, stream(&queued.event));
    match queued.event.peek() {
        EventState::Failed => MemoryError::Fenced { range, op, on, wanted },
        _ => MemoryError::Unordered { range, how, op, on, wanted, by: later.map(stream) },
    }
}
