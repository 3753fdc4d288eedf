//! Memory of the engine beside the callers' own, and how a whole is cut to what the library can count.
//!
//! Knows nothing of which operations there are.

use std::ffi::c_int;
use std::ops::Range;

use super::flight::MOST;
use crate::call::{Region, Shares};
use crate::tcp::inner::Scratch;

/// Memory that is used again by every operation. Transfers use this and claimed memory only.
#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) outgoing: Scratch,
    pub(super) incoming: Scratch,
    pub(super) sending: Scratch,
    pub(super) receiving: Scratch,
    pub(super) counts: Vec<c_int>,
    pub(super) starts: Vec<c_int>,
}

/// What a transfer may read for as long as it takes: the region, or a copy of one that is only lent.
pub(super) fn stage(region: Region, scratch: &mut Scratch) -> Region {
    if region.is_claimed {
        return region;
    }
    let copy = scratch.get(region.len_bytes);
    copy_region(region, copy);
    copy
}

/// Where a transfer may write for as long as it takes: the region, or as much room elsewhere.
pub(super) fn room(region: Region, scratch: &mut Scratch) -> Region {
    if region.is_claimed { region } else { scratch.get(region.len_bytes) }
}

/// Copies all of a region to the beginning of another one, unless it is there already.
pub(super) fn copy_region(from: Region, to: Region) {
    assert!(from.len_bytes <= to.len_bytes, "there is room for all of it");
    if from.len_bytes > 0 && !std::ptr::eq(from.base, to.base) {
        // SAFETY: both regions are held by this operation, which does nothing else with them now, and
        // two regions of one call lie apart or begin at the same place (or one is ours).
        unsafe { std::ptr::copy_nonoverlapping(from.base, to.base, from.len_bytes) };
    }
}

/// The whole in parts whose elements and places can be counted by C's `int`.
pub(super) fn windows(elems: usize) -> impl Iterator<Item = Range<usize>> {
    (0..elems).step_by(MOST).map(move |start| start..(start + MOST).min(elems))
}

/// The elements of a rank's share within a window; an empty range at either end where there are none.
pub(super) fn within(shares: &Shares, rank: usize, window: &Range<usize>) -> Range<usize> {
    let share = shares.elements(rank);
    let place = |at: usize| at.clamp(window.start, window.end);
    place(share.start)..place(share.end)
}

impl Inner {
    /// Counts and starts of all ranks' shares within a window, for the library to read.
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
