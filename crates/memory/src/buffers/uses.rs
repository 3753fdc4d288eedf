//! The uses of a buffer's bytes: by the host, which holds claims, and by streams, whose work is ordered.
//!
//! A use by the host ends when its guard is dropped, and leaves nothing. Queued work leaves its position in its stream, and the
//! next use of the bytes must come after it. For each byte the last write counts, and the reads after it that come before no
//! other read. Uses before those count as long as the later work may be withdrawn: then it orders nothing. Work that the host
//! has waited for is forgotten. Bytes with the same history are one range, which is found by its start.
//!
//! Input: ranges, and who wants to use them. Output: a refusal that names the conflicting use. This module knows no addresses.

use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::{Access, Event, EventState, MemoryError, Result, Stream};

#[derive(Debug, Default)]
pub(super) struct UseHistory {
    next_id: u64,
    claims: Vec<HostClaim>,
    /// Ranges by their start; they do not overlap. Each has a use.
    queued: BTreeMap<usize, UsedRange>,
}

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
    /// In the order in which they were queued.
    uses: SmallVec<[QueuedUse; 2]>,
}

#[derive(Clone, Debug)]
struct QueuedUse {
    event: Event,
    access: Access,
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

    /// Whether whatever comes after this use comes after an earlier one, too.
    fn supersedes(&self, earlier: &Self) -> bool {
        let is_later_read =
            || earlier.access == Access::Read && earlier.is_before(Some(&self.event));
        self.event.is_committed() && (self.access == Access::Write || is_later_read())
    }
}

impl UsedRange {
    /// Forgets the uses that are over or superseded.
    fn prune(&mut self) {
        self.uses.retain(|queued| !queued.is_over());
        for at in (0..self.uses.len()).rev() {
            if self.uses[at + 1..].iter().any(|later| later.supersedes(&self.uses[at])) {
                self.uses.remove(at);
            }
        }
    }

    /// Whether both have the same use and no other.
    fn is_like(&self, other: &Self) -> bool {
        matches!((&*self.uses, &*other.uses), ([own], [other])
            if own.event.is_same(&other.event) && own.access == other.access)
    }

    /// The use that a new one must come after and does not.
    fn conflict(&self, access: Access, later: Option<&Event>) -> Option<&QueuedUse> {
        let excludes = |queued: &&QueuedUse| access.excludes(queued.access);
        self.uses.iter().filter(excludes).find(|queued| !queued.is_before(later))
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
        if event.order().is_none() || range.is_empty() {
            return Ok(());
        }
        let queued = QueuedUse { event: event.clone(), access, op };
        self.split(range.start);
        self.split(range.end);
        let mut at = range.start;
        let mut gaps = Vec::new();
        for (start, used) in self.queued.range_mut(range.clone()) {
            gaps.extend((at < *start).then_some(at..*start));
            at = used.end;
            used.uses.push(queued.clone());
        }
        gaps.extend((at < range.end).then_some(at..range.end));
        for gap in gaps {
            let used = UsedRange { end: gap.end, uses: smallvec![queued.clone()] };
            self.queued.insert(gap.start, used);
        }
        Ok(())
    }

    /// Fails if another use of the range excludes the new one. Forgets what no longer counts.
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
                && access.excludes(claim.access)
        };
        if let Some(HostClaim { holder, .. }) = self.claims.iter().find(conflicts) {
            return Err(MemoryError::Claimed { range: range.clone(), holder, wanted });
        }
        if self.queued.is_empty() || range.is_empty() {
            return Ok(());
        }
        let first =
            self.queued.range(..=range.start).next_back().map_or(range.start, |(at, _)| *at);
        let mut forgotten = Vec::new();
        let mut outcome = Ok(());
        let mut before: Option<&mut UsedRange> = None;
        for (start, used) in self.queued.range_mut(first..range.end) {
            if used.end <= range.start {
                continue;
            }
            used.prune();
            if let Some(found) = used.conflict(access, later) {
                outcome = Err(refusal(range, found, wanted, later));
                break;
            }
            match &mut before {
                _ if used.uses.is_empty() => forgotten.push(*start),
                Some(before) if before.end == *start && before.is_like(used) => {
                    before.end = used.end;
                    forgotten.push(*start);
                }
                _ => before = Some(used),
            }
        }
        forgotten.iter().for_each(|at| drop(self.queued.remove(at)));
        outcome
    }

    /// The queued work that later work of a stream would not come after.
    pub(super) fn not_before(&self, stream: &Stream) -> Vec<Event> {
        let all = self.queued.values().flat_map(|of| &of.uses);
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
    queued: &QueuedUse,
    wanted: &'static str,
    later: Option<&Event>,
) -> MemoryError {
    let stream =
        |event: &Event| event.order().map_or(String::new(), |(of, _)| of.stream_name().into());
    let (range, op, on) = (range.clone(), queued.op, stream(&queued.event));
    let how = if queued.access == Access::Write { "written" } else { "read" };
    match queued.event.peek() {
        EventState::Failed => MemoryError::Fenced { range, op, on, wanted },
        _ => MemoryError::Unordered { range, how, op, on, wanted, by: later.map(stream) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_stays_short_if_the_host_never_waits() {
        let streams = [Stream::new("compute"), Stream::new("copy")];
        let mut history = UseHistory::default();
        let mut use_by = |stream: &Stream, range: Range<usize>, access| {
            let (event, signal) = stream.submit();
            let outcome = history.queue(&range, access, "linear", &event);
            signal.commit();
            outcome.unwrap();
            streams.iter().for_each(|stream| stream.wait(&event));
            let uses = history.queued.values().map(|of| of.uses.len());
            (signal, uses.max(), history.queued.len())
        };
        let mut signals = Vec::new();
        for index in 0..100 {
            for stream in &streams {
                for _ in 0..3 {
                    let (signal, uses, ranges) = use_by(stream, 0..64, Access::Read);
                    assert!(uses <= Some(4) && ranges <= 2, "{uses:?} uses in {ranges} ranges");
                    signals.push(signal);
                }
            }
            signals.push(use_by(&streams[0], index % 64..64, Access::Write).0);
            signals.push(use_by(&streams[1], 0..64, Access::Write).0);
        }
    }
}
