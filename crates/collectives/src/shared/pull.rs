//! Data that each rank fetches for itself from where they lie: everything that is not shared work.
//!
//! Steps: gate, copy, gate. Staged data go in pieces, a gate each, and need no last gate: a half of
//! the staging area is written again only after all have arrived in the round after the one that
//! used it.

use std::ops::Range;

use super::round::Round;
use super::state::{HALF_BYTES, Shared};
use crate::CollectiveError;
use crate::context::OpContext;

/// How a rank's data are cut for those who fetch them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// All fetch the same.
    Whole,
    /// Each rank fetches a block of its own.
    Blocks,
}

/// What can be fetched at a time.
pub(crate) struct Window<'a> {
    sources: &'a [*const u8],
    blocks: &'a [Range<usize>],
    range: Range<usize>,
}

impl Window<'_> {
    /// What is there of a rank's block: where it lies, and which bytes of the block these are.
    pub(crate) fn of(&self, rank: usize) -> (*const u8, Range<usize>) {
        let len = self.blocks[rank].len();
        (self.sources[rank], self.range.start.min(len)..self.range.end.min(len))
    }

    /// Where the same part of every rank's block lies, for blocks of one length.
    pub(crate) fn of_all(&self) -> (&[*const u8], Range<usize>) {
        (self.sources, self.of(0).1)
    }

    /// Copies what is there of a rank's block to where the whole block shall go.
    ///
    /// # Safety
    ///
    /// `to` is valid for the whole block and belongs to this rank alone.
    pub(crate) unsafe fn copy(&self, rank: usize, to: *mut u8) {
        let (from, range) = self.of(rank);
        if range.is_empty() {
            return;
        }
        // SAFETY: the source is valid for the range until this rank arrives again; a rank's own
        // block may lie in place already, and then the copy is onto itself.
        unsafe {
            let to = to.add(range.start);
            if !std::ptr::eq(from, to) {
                std::ptr::copy_nonoverlapping(from, to, range.len());
            }
        }
    }
}

/// Lets this rank fetch, by `take`, what is its own: `block` gives the bytes of a source rank's data
/// that a destination rank wants.
pub(crate) fn pull(
    shared: &Shared,
    context: &OpContext,
    met: &Round,
    cut: Cut,
    block: impl Fn(usize, usize) -> Range<usize>,
    mut take: impl FnMut(&Window),
) -> Result<(), CollectiveError> {
    let (rank, world) = (shared.rank, shared.world);
    let own: Vec<Range<usize>> = (0..world).map(|source| block(source, rank)).collect();
    let places: Vec<_> =
        (0..world).map(|peer| shared.control().slot(met.number, peer).send.load()).collect();
    if !met.is_anyone_staged {
        let address = |source: usize| {
            let place = places[source].map(|place| place.after(own[source].start));
            shared.resolve(context, source, place, own[source].len()).map(<*mut u8>::cast_const)
        };
        let sources = (0..world).map(address).collect::<Result<Vec<_>, _>>()?;
        take(&Window { sources: &sources, blocks: &own, range: 0..usize::MAX });
        return shared.finish(context, met.number);
    }
    let part_bytes = match cut {
        Cut::Whole => HALF_BYTES,
        Cut::Blocks => HALF_BYTES / world / 64 * 64,
    };
    let pairs = (0..world).flat_map(|from| (0..world).map(move |to| (from, to)));
    let longest = pairs.map(|(from, to)| block(from, to).len()).max().unwrap_or(0);
    let mut round = met.number;
    for start in (0..longest).step_by(part_bytes) {
        let range = start..start + part_bytes;
        round = shared.next_round();
        if places[rank].is_none() {
            let readers = if cut == Cut::Whole { rank..rank + 1 } else { 0..world };
            for (slot, reader) in readers.enumerate() {
                let whole = block(rank, reader);
                let part = range.start.min(whole.len())..range.end.min(whole.len());
                // SAFETY: the part lies within this rank's data, and fits its place in the staging
                // area, which nobody reads any more: all have arrived in a later round.
                unsafe {
                    let from = context.call.send.base.add(whole.start + part.start);
                    let to = shared.stage(rank, round).add(slot * part_bytes);
                    std::ptr::copy_nonoverlapping(from, to, part.len());
                }
            }
        }
        shared.arrive(context, round);
        shared.wait_present(context, round)?;
        let address = |source: usize| match places[source] {
            None => {
                let slot = if cut == Cut::Whole { 0 } else { rank };
                // SAFETY: the slots of all ranks fit in half a staging area.
                Ok(unsafe { shared.stage(source, round).add(slot * part_bytes) }.cast_const())
            }
            Some(place) => {
                let len = range.end.min(own[source].len()).saturating_sub(start);
                let place = place.after(own[source].start + start);
                shared.resolve(context, source, Some(place), len).map(<*mut u8>::cast_const)
            }
        };
        let sources = (0..world).map(address).collect::<Result<Vec<_>, _>>()?;
        take(&Window { sources: &sources, blocks: &own, range });
        shared.done_with(round);
    }
    // Whoever is read in place must not go on before all have read; the answer is the same everywhere.
    let lies_in_place = |source: usize| {
        places[source].is_some() && (0..world).any(|to| !block(source, to).is_empty())
    };
    if round != met.number && (0..world).any(lies_in_place) {
        shared.finish(context, round)?;
    }
    Ok(())
}
