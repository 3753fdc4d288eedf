//! The uses of a buffer's bytes: by the host, which holds claims, and by streams, whose work is ordered.
//!
//! A use by the host ends when its guard is dropped, and leaves nothing. Queued work leaves its position in its stream, and the
//! next use of the bytes must come after it. For each byte the last write counts, and the last read of each stream after that
//! write; work that the host has waited for is forgotten. Bytes with the same history are one range, and ranges are found by
//! their start, so a look-up takes hardly longer if there are many.
//!
//! Input: ranges, and who wants to use them. Output: a refusal that names the conflicting use. This module knows no addresses.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::{Access, Event, EventState, MemoryError, Result, Stream};

/// The uses of one buffer.
#[derive(Debug, Default)]
pub(super) struct UseHistory {
    next_id: u64,
    claims: Vec<HostClaim>,
    /// Ranges by their start; they do not overlap. Each has a use.
    queued: BTreeMap<usize, UsedRange>,
}

/// A claim of the host.
#[derive(Debug)]
struct HostClaim {
    id: u64,
    range: Range<usize>,
    access: Access,
    holder: &'static str,
}

/// Bytes with the same history.
#[derive(Clone, Debug)]
struct UsedRange {
    end: usize,
    /// The last write.
    write: Option<QueuedUse>,
    /// The reads after it: the last of each stream.
    reads: Vec<QueuedUse>,
}

/// A use by queued work.
#[derive(Clone, Debug)]
struct QueuedUse {
    event: Event,
    op: &'static str,
}

impl QueuedUse {
    /// Whether it can be forgotten.
    fn is_over(&self) -> bool {
        let Some((position, _)) = self.event.order() else { return true };
        self.event.is_withdrawn()
            || (position.is_observed() && self.event.peek() != EventState::Failed)
    }

    /// Whether it comes before work whose event is `later`; `None` stands for the host.
    fn is_before(&self, later: Option<&Event>) -> bool {
        if self.event.peek() == EventState::Failed {
            return self.event.is_withdrawn();
        }
        let Some((position, _)) = self.event.order() else { return true };
        let later = later.and_then(Event::order);
        position.is_observed()
            || later.is_some_and(|(of, seen)| of.is_same_stream(position) || seen.has(position))
    }
}

impl UsedRange {
    /// The use that a new one must come after and does not.
    fn conflict(
        &self,
        access: Access,
        later: Option<&Event>,
    ) -> Option<(&QueuedUse, &'static str)> {
        let writes = self.write.iter().map(|write| (write, "written"));
        let reads =
            self.reads.iter().filter(|_| access == Access::Write).map(|read| (read, "read"));
        writes.chain(reads).find(|(queued, _)| !queued.is_before(later))
    }
}

impl UseHistory {
    /// Claims a range for the host. Returns the number under which the claim is given back.
    pub(super) fn claim(
        &mut self,
        range: &Range<usize>,
        access: Access,
        holder: &'static str,
    ) -> Result<u64> {
        self.check(range, access, holder, None)?;
        let id = self.next_id;
        self.next_id += 1;
        self.claims.push(HostClaim { id, range: range.clone(), access, holder });
        Ok(id)
    }

    /// Gives a claim back.
    pub(super) fn give_back(&mut self, id: u64) {
        if let Some(at) = self.claims.iter().position(|claim| claim.id == id) {
            self.claims.swap_remove(at);
        }
    }

    /// Notes that the work before an event uses a range.
    pub(super) fn queue(
        &mut self,
        range: &Range<usize>,
        access: Access,
        op: &'static str,
        event: &Event,
    ) -> Result<()> {
        self.check(range, access, op, Some(event))?;
        let Some((position, _)) = event.order().filter(|_| !range.is_empty()) else {
            return Ok(());
        };
        let queued = QueuedUse { event: event.clone(), op };
        self.split(range.start);
        self.split(range.end);
        match access {
            // A later use that comes after this one comes after all uses that this one comes after.
            Access::Write => {
                let inside: Vec<usize> =
                    self.queued.range(range.clone()).map(|(at, _)| *at).collect();
                inside.iter().for_each(|at| drop(self.queued.remove(at)));
                let used = UsedRange { end: range.end, write: Some(queued), reads: Vec::new() };
                self.queued.insert(range.start, used);
            }
            Access::Read => {
                let is_of_stream = |read: &QueuedUse| {
                    read.event.order().is_some_and(|(own, _)| own.is_same_stream(position))
                };
                let mut at = range.start;
                let mut gaps = Vec::new();
                for (start, used) in self.queued.range_mut(range.clone()) {
                    gaps.extend((at < *start).then_some(at..*start));
                    at = used.end;
                    used.reads.retain(|read| !is_of_stream(read));
                    used.reads.push(queued.clone());
                }
                gaps.extend((at < range.end).then_some(at..range.end));
                for gap in gaps {
                    let reads = vec![queued.clone()];
                    self.queued.insert(gap.start, UsedRange { end: gap.end, write: None, reads });
                }
            }
        }
        Ok(())
    }

    /// Fails if another use of the range excludes the new one. Forgets uses that are over.
    fn check(
        &mut self,
        range: &Range<usize>,
        access: Access,
        wanted: &'static str,
        later: Option<&Event>,
    ) -> Result<()> {
        let conflicts = |claim: &&HostClaim| {
            claim.range.start < range.end
                && range.start < claim.range.end
                && (claim.access == Access::Write || access == Access::Write)
        };
        if let Some(claim) = self.claims.iter().find(conflicts) {
            let (range, holder) = (range.clone(), claim.holder);
            return Err(MemoryError::Claimed { range, holder, wanted });
        }
        if self.queued.is_empty() || range.is_empty() {
            return Ok(());
        }
        let first =
            self.queued.range(..=range.start).next_back().map_or(range.start, |(at, _)| *at);
        let mut empty = Vec::new();
        for (start, used) in self.queued.range_mut(first..range.end) {
            if used.end <= range.start {
                continue;
            }
            used.write.take_if(|write| write.is_over());
            used.reads.retain(|read| !read.is_over());
            if used.write.is_none() && used.reads.is_empty() {
                empty.push(*start);
            } else if let Some(found) = used.conflict(access, later) {
                return Err(refusal(range, found, wanted, later));
            }
        }
        empty.iter().for_each(|at| drop(self.queued.remove(at)));
        Ok(())
    }

    /// The queued work that later work of a stream would not come after.
    pub(super) fn not_before(&self, stream: &Stream) -> Vec<Event> {
        let all = self.queued.values().flat_map(|of| of.write.iter().chain(&of.reads));
        let others = all.filter(|queued| !queued.is_over() && !stream.is_after(&queued.event));
        others.map(|queued| queued.event.clone()).collect()
    }

    /// Makes a range begin at `at`, if one lies across.
    fn split(&mut self, at: usize) {
        let Some((_, used)) = self.queued.range_mut(..at).next_back() else { return };
        if used.end > at {
            let upper = used.clone();
            used.end = at;
            self.queued.insert(at, upper);
        }
    }
}

fn refusal(
    range: &Range<usize>,
    (queued, how): (&QueuedUse, &'static str),
    wanted: &'static str,
    later: Option<&Event>,
) -> MemoryError {
    let stream =
        |event: &Event| event.order().map_or(String::new(), |(of, _)| of.stream_name().into());
    let (range, op, on) = (range.clone(), queued.op, stream(&queued.event));
    match queued.event.peek() {
        EventState::Failed => MemoryError::Fenced { range, op, on, wanted },
        _ => MemoryError::Unordered { range, how, op, on, wanted, by: later.map(stream) },
    }
}
