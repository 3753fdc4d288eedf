//! A heap for memory of other libraries that moves to where the ranks of a host reach it.
//!
//! Every rank of the host has a heap, which its peers map when the group forms. It takes memory for the bytes that lie in it, not for
//! its size. Input: pages of another library. Output: their addresses in the heap, where operations use them in place. This module
//! does not know who owns the pages.

use std::collections::BTreeMap;
use std::sync::Mutex;

use paceline_memory::{Buffer, Category};
use paceline_trace::lock;

use super::Group;
use super::host_links::HostLinks;
use crate::Result;
use crate::shared::SegmentPart;

/// Memory moves in whole pages.
const PAGE_BYTES: usize = 4096;

/// This rank's heap.
#[derive(Debug)]
pub struct SharedHeap {
    part: SegmentPart,
    /// The pieces in use: start and length in bytes.
    pieces: Mutex<BTreeMap<usize, usize>>,
    /// An empty buffer, so that the group does not forget the segment.
    _anchor: Buffer,
}

impl Group {
    /// A heap of `len_bytes` bytes, the same on all ranks. A collective call. `None` if the ranks share no memory, or for no bytes.
    pub(crate) fn heap(&self, len_bytes: usize) -> Result<Option<SharedHeap>> {
        let (Some(shared), HostLinks::Host { links, .. }) =
            (self.shared(), &self.membership.host_links)
        else {
            return Ok(None);
        };
        if len_bytes == 0 {
            return Ok(None);
        }
        let segment = links.share_segment(len_bytes)?;
        let part = segment.parts[shared.rank].clone();
        let (mapping, category) = (part.mapping.clone(), Category::Communication);
        mapping.leave_out_of_dumps();
        // SAFETY: the buffer has no bytes.
        let _anchor = unsafe { Buffer::window(mapping, 0..0, 0, category, self.memory())? };
        self.reachable(shared).add(segment);
        Ok(Some(SharedHeap { part, pieces: Mutex::default(), _anchor }))
    }
}

impl SharedHeap {
    /// Moves the `len_bytes` bytes at `base` into the heap, and maps them at `base` too. Returns their address in the heap:
    /// operations of the group on that address work in place. `None` if the heap has no room.
    ///
    /// # Safety
    ///
    /// The bytes begin a mapping of whole pages, which belongs to the caller. Nobody uses it until this returns, and the caller
    /// unmaps it like the mapping that was there, also after the heap is gone.
    pub unsafe fn adopt(&self, base: *mut u8, len_bytes: usize) -> Result<Option<*mut u8>> {
        let piece_bytes = len_bytes.next_multiple_of(PAGE_BYTES);
        let mut pieces = lock(&self.pieces);
        let mut start = 0;
        for (&taken, &taken_bytes) in pieces.iter() {
            if taken - start >= piece_bytes {
                break;
            }
            start = taken + taken_bytes;
        }
        let Some(at) = self.part.address(start as u64, piece_bytes) else { return Ok(None) };
        let from = self.part.range().start + start;
        // SAFETY: the piece lies in this rank's part and is free, and nobody uses the bytes, as required of the caller.
        unsafe {
            std::ptr::copy_nonoverlapping(base, at, len_bytes);
            self.part.mapping.show_at(from..from + piece_bytes, base)?;
        }
        pieces.insert(start, piece_bytes);
        Ok(Some(at))
    }

    /// Gives the memory of a piece that begins at `at` back to the system.
    ///
    /// # Safety
    ///
    /// Nobody refers to the piece or needs its contents.
    pub unsafe fn give_back(&self, at: *mut u8) {
        let mut pieces = lock(&self.pieces);
        let Some(start) = self.part.offset(at as usize, 0) else { return };
        if let Some(piece_bytes) = pieces.remove(&start) {
            let from = self.part.range().start + start;
            // SAFETY: as required of the caller.
            unsafe { self.part.mapping.give_back(from..from + piece_bytes) };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use paceline_memory::{Allocator, DType, Mapping};
    use paceline_rendezvous::Rendezvous;

    use super::*;
    use crate::{GroupOptions, OpKind, RawCall, RawMemory};

    const BYTES: usize = 3 * PAGE_BYTES + 8;

    /// Two ranks of a group, each on a thread, with heaps of this size.
    fn on_two_ranks(heap_bytes: usize, rank: impl Fn(&Group, SharedHeap) + Sync) {
        let name = format!("paceline-test-{}", Rendezvous::fresh_secret().unwrap());
        let rendezvous = &Rendezvous::by_name(name, "");
        let run = |number: usize| {
            let timeout = Duration::from_secs(60);
            let options = GroupOptions { timeout, ..GroupOptions::for_local_ranks(2) };
            let group = Group::shm(rendezvous, number, 2, options).unwrap();
            let heap = group.heap(heap_bytes).unwrap().unwrap();
            rank(&group, heap);
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|number| scope.spawn(move || run(number)));
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }

    /// A mapping that stands for another library's, filled with a value.
    fn theirs(value: f32) -> Mapping {
        let mapping = Mapping::create(BYTES).unwrap();
        for at in 0..BYTES / 4 {
            // SAFETY: the value lies within the mapping, which nobody else uses yet.
            unsafe { mapping.base().as_ptr().cast::<f32>().add(at).write(value) };
        }
        mapping
    }

    /// Whether all values of a mapping are this one.
    fn has_only(mapping: &Mapping, value: f32) -> bool {
        // SAFETY: the values lie within the mapping, and nobody writes to them during the call.
        let read = |at| unsafe { mapping.base().as_ptr().cast::<f32>().add(at).read() };
        (0..BYTES / 4).all(|at| read(at) == value)
    }

    fn all_reduce(group: &Group, base: *mut u8) {
        let memory = RawMemory { base, len_bytes: BYTES };
        let call =
            RawCall { send: memory, recv: memory, ..RawCall::new(OpKind::AllReduce, DType::F32) };
        // SAFETY: the test holds the memory until this returns.
        unsafe { group.run_raw(call) }.unwrap();
    }

    #[test]
    fn memory_that_has_moved_is_used_in_place_and_seen_where_it_was() {
        on_two_ranks(1 << 20, |group, heap| {
            let theirs = theirs(1.0 + group.rank() as f32);
            let base = theirs.base().as_ptr();
            // SAFETY: the mapping is this test's, and nobody else uses it.
            let at = unsafe { heap.adopt(base, BYTES) }.unwrap().unwrap();
            assert!(has_only(&theirs, 1.0 + group.rank() as f32));
            all_reduce(group, at);
            assert_eq!(group.shared().unwrap().staged_bytes(), 0);
            assert!(has_only(&theirs, 3.0));
            // The address from before still works, by way of the staging area.
            all_reduce(group, base);
            assert!(group.shared().unwrap().staged_bytes() > 0);
            assert!(has_only(&theirs, 6.0));
            // The heap stays when the group forgets memory that all ranks have dropped.
            let allocate = || group.allocate(&Allocator::new(), 8, Category::Gradients).unwrap();
            drop(allocate());
            drop(allocate());
            all_reduce(group, at);
            drop(heap);
            assert!(has_only(&theirs, 12.0));
        });
    }

    #[test]
    fn a_heap_that_is_full_takes_nothing_and_a_piece_that_goes_makes_room() {
        on_two_ranks(8 * PAGE_BYTES, |_, heap| {
            let theirs = [5.0, 6.0, 7.0].map(theirs);
            // SAFETY: as above.
            let adopt = |of: &Mapping| unsafe { heap.adopt(of.base().as_ptr(), BYTES) }.unwrap();
            let [first, second] = [0, 1].map(|of| adopt(&theirs[of]).unwrap());
            assert_ne!(first, second);
            assert_eq!(adopt(&theirs[2]), None);
            assert!(has_only(&theirs[2], 7.0));
            // SAFETY: nothing uses the piece.
            unsafe { heap.give_back(first) };
            assert_eq!(adopt(&theirs[2]), Some(first));
            assert!(has_only(&theirs[2], 7.0));
        });
    }
}
