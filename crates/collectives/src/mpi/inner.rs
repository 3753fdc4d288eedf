//! The engine's own memory, and how data are divided into parts that the library can count.
//!
//! This module does not know which operations exist.

use std::ffi::c_int;
use std::ops::Range;

use super::flight::MOST;
use crate::call::{Call, Region, Shares};
use crate::tcp::inner::ScratchMemory;

/// Memory that every operation reuses. Transfers use only this memory and claimed memory.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub(super) outgoing: ScratchMemory,
    pub(super) incoming: ScratchMemory,
    pub(super) sending: ScratchMemory,
    pub(super) receiving: ScratchMemory,
    pub(super) counts: Vec<c_int>,
    pub(super) starts: Vec<c_int>,
}

/// Where a transfer writes the result of a call: a result that overlaps the contribution goes to the engine's own memory
/// first, since MPI allows no overlap.
pub(super) fn room_for_result(call: &Call, scratch: &mut ScratchMemory) -> Region {
    if call.overlap().is_none() { call.recv } else { scratch.get(call.recv.len_bytes) }
}

/// Copies a region to the beginning of another one, unless both begin at the same address.
pub(super) fn copy_region(from: Region, to: Region) {
    assert!(from.len_bytes <= to.len_bytes, "there is room for all of it");
    if from.len_bytes > 0 && !std::ptr::eq(from.base, to.base) {
        // SAFETY: this operation holds both regions and does nothing else with them now. Two regions of one
        // call lie apart or begin at the same address, or one of the two is the engine's own memory.
        unsafe { std::ptr::copy_nonoverlapping(from.base, to.base, from.len_bytes) };
    }
}

/// Divides `elems` elements into windows whose lengths and offsets fit into C's `int`.
pub(super) fn windows(elems: usize) -> impl Iterator<Item = Range<usize>> {
    (0..elems).step_by(MOST).map(move |start| start..(start + MOST).min(elems))
}

/// The elements of a rank's share that lie in a window. If there are none, an empty range at one of the
/// window's ends.
pub(super) fn within(shares: &Shares, rank: usize, window: &Range<usize>) -> Range<usize> {
    let share = shares.elements(rank);
    let place = |at: usize| at.clamp(window.start, window.end);
    place(share.start)..place(share.end)
}

impl Buffers {
    /// Computes the counts and starts of all ranks' shares within a window, for the library to read.
    pub(super) fn cut(&mut self, shares: &Shares, world: usize, window: &Range<usize>) {
        self.counts.clear();
        self.starts.clear();
        for rank in 0..world {
            let elements = within(shares, rank, window);
            self.counts.push(elements.len() as c_int);
            self.starts.push((elements.start - window.start) as c_int);
        }
    }
}
