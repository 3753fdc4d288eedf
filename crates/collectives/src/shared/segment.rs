//! Where a rank's data lie, and how its peers reach them.
//!
//! Input: addresses of this rank. Output: places that every rank can turn into its own addresses, and back.
//! This module knows nothing of operations.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paceline_memory::Mapping;

/// A place in memory that any rank of the group can turn into an address in its own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Index of the segment; unused between threads.
    pub(crate) segment: u64,
    /// Offset into the rank's part of the segment, in bytes; between threads, the address itself.
    pub(crate) offset: u64,
}

impl Place {
    /// The place `len_bytes` further on.
    pub(crate) fn after(self, len_bytes: usize) -> Self {
        Self { offset: self.offset + len_bytes as u64, ..self }
    }
}

/// One shared mapping with a part of the same size for every rank.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) mapping: Arc<Mapping>,
    /// Bytes before the first part.
    pub(crate) start_bytes: usize,
    /// Bytes of each rank's part.
    pub(crate) part_bytes: usize,
}

impl Segment {
    fn part(&self, rank: usize) -> *mut u8 {
        // SAFETY: a segment is made with room for every rank's part behind its start.
        unsafe { self.mapping.base().as_ptr().add(self.start_bytes + rank * self.part_bytes) }
    }
}

/// Which memory of its peers this rank can reach.
#[derive(Debug)]
pub(crate) enum Reach {
    /// All of it: the ranks are threads.
    Threads,
    /// The segments that the group has shared; the first one is for staging. Segments stay mapped as long as
    /// the group lives, because a peer may still use its own part. Dropping the buffer in a part returns the
    /// part's memory to the system.
    Segments(Mutex<Vec<Segment>>),
}

fn lock(segments: &Mutex<Vec<Segment>>) -> MutexGuard<'_, Vec<Segment>> {
    segments.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reach {
    /// The place of the `len_bytes` bytes at `base` in the memory of `rank`, the caller's own rank. `None` if
    /// peers cannot reach them, so that they must be staged.
    pub(crate) fn locate(&self, rank: usize, base: *mut u8, len_bytes: usize) -> Option<Place> {
        let address = base as usize;
        match self {
            Reach::Threads => Some(Place { segment: 0, offset: address as u64 }),
            Reach::Segments(segments) => {
                // Skips the staging segment: only the group itself has addresses in it.
                let segments = lock(segments);
                segments.iter().enumerate().skip(1).find_map(|(index, segment)| {
                    let offset = address.checked_sub(segment.part(rank) as usize)?;
                    (offset + len_bytes <= segment.part_bytes)
                        .then_some(Place { segment: index as u64, offset: offset as u64 })
                })
            }
        }
    }

    /// The address in this process of `len_bytes` bytes at `place` in the memory of `rank`. `None` if there
    /// is no such place.
    pub(crate) fn resolve(&self, rank: usize, place: Place, len_bytes: usize) -> Option<*mut u8> {
        match self {
            Reach::Threads => Some(place.offset as *mut u8),
            Reach::Segments(segments) => {
                let segments = lock(segments);
                let segment = segments.get(place.segment as usize)?;
                let end = place.offset.checked_add(len_bytes as u64)?;
                if end > segment.part_bytes as u64 {
                    return None;
                }
                // SAFETY: the offset lies within the rank's part, as was just checked.
                Some(unsafe { segment.part(rank).add(place.offset as usize) })
            }
        }
    }

    /// The memory that the system holds for each segment, in bytes.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn held_bytes(&self) -> Vec<usize> {
        let Reach::Segments(segments) = self else { return Vec::new() };
        let held = |segment: &Segment| {
            512 * rustix::fs::fstat(segment.mapping.file()).unwrap().st_blocks as usize
        };
        lock(segments).iter().map(held).collect()
    }

    /// Adds a segment. Every rank adds the same segments in the same order.
    pub(crate) fn add(&self, segment: Segment) {
        if let Reach::Segments(segments) = self {
            lock(segments).push(segment);
        }
    }
}
