//! How each rank fetches data for itself from where they lie. All collective operations use this, except those
//! whose work is divided into chunks, and all-gathers of memory that all ranks can reach.
//!
//! Steps: barrier phase, copy, barrier phase. Staged data go in pieces with one phase per piece, and need no
//! last phase: half a staging area is written again only after all ranks have arrived in the round after
//! the one that used it.

use std::ops::Range;

use super::round::Round;
use super::state::{SharedState, half_bytes};
use crate::Result;
use crate::context::OpContext;

/// How a rank's data are divided among the ranks that fetch them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fetch {
    /// All ranks fetch the same data.
    Whole,
    /// Each rank fetches its own block.
    Blocks,
}

/// The part of every source rank's block that can be fetched now: all of it, or the current piece of staged
/// data.
pub(crate) struct FetchWindow<'a> {
    sources: &'a [*const u8],
    blocks: &'a [Range<usize>],
    range: Range<usize>,
}

impl FetchWindow<'_> {
    /// The available part of a rank's block: its address, and which bytes of the block it holds.
    pub(crate) fn of(&self, rank: usize) -> (*const u8, Range<usize>) {
        let len = self.blocks[rank].len();
        (self.sources[rank], self.range.start.min(len)..self.range.end.min(len))
    }

    /// The addresses of the available parts of all ranks' blocks, and which bytes these are. All blocks have the same length.
    pub(crate) fn of_all(&self) -> (&[*const u8], Range<usize>) {
        (self.sources, self.of(0).1)
    }

    /// Copies the available part of a rank's block to its place in the block at `to`.
    ///
    /// # Safety
    ///
    /// `to` is valid for the whole block, and only this rank uses it.
    pub(crate) unsafe fn copy(&self, rank: usize, to: *mut u8) {
        let (from, range) = self.of(rank);
        if range.is_empty() {
            return;
        }
        // SAFETY: the source is valid for the range until this rank arrives in another round. A rank's own
        // block may already lie in place; then source and target are the same, and nothing is copied.
        unsafe {
            let to = to.add(range.start);
            if !std::ptr::eq(from, to) {
                std::ptr::copy_nonoverlapping(from, to, range.len());
            }
        }
    }
}

/// Fetches this rank's data: calls `take` with each window. `block(source, destination)` gives the
/// bytes of the source rank's data that the destination rank needs.
pub(crate) fn pull(
    shared: &SharedState,
    context: &OpContext,
    met: &Round,
    cut: Fetch,
    block: impl Fn(usize, usize) -> Range<usize>,
    mut take: impl FnMut(&FetchWindow),
) -> Result<()> {
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
        take(&FetchWindow { sources: &sources, blocks: &own, range: 0..usize::MAX });
        return shared.finish(context, met.number);
    }
    let part_bytes = match cut {
        Fetch::Whole => half_bytes(shared.world),
        Fetch::Blocks => half_bytes(shared.world) / world / 64 * 64,
    };
    let pairs = (0..world).flat_map(|from| (0..world).map(move |to| (from, to)));
    let longest = pairs.map(|(from, to)| block(from, to).len()).max().unwrap_or(0);
    let mut round = met.number;
    for start in (0..longest).step_by(part_bytes) {
        let range = start..start + part_bytes;
        round = shared.next_round();
        if places[rank].is_none() {
            let readers = if cut == Fetch::Whole { rank..rank + 1 } else { 0..world };
            for (slot, reader) in readers.enumerate() {
                let whole = block(rank, reader);
                let part = range.start.min(whole.len())..range.end.min(whole.len());
                shared.count_staged(part.len());
                // SAFETY: the part lies within this rank's data, and fits its place in the staging area,
                // which nobody reads any longer: all ranks have arrived in a later round.
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
                let slot = if cut == Fetch::Whole { 0 } else { rank };
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
        take(&FetchWindow { sources: &sources, blocks: &own, range });
        shared.done_with(round);
    }
    // A rank whose data are read in place must not go on before all ranks have read them. All ranks find the same answer.
    let lies_in_place = |source: usize| {
        places[source].is_some() && (0..world).any(|to| !block(source, to).is_empty())
    };
    if round != met.number && (0..world).any(lies_in_place) {
        shared.finish(context, round)?;
    }
    Ok(())
}
