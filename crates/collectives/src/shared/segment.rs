//! Where a rank's data lie, and how its peers reach them.
//!
//! A group can reach the memory that was shared in it and in the groups from
//! which it descends: every rank of the group is also in those groups, and has mapped the memory there.
//!
//! Input: addresses of this rank. Output: places, which every rank can convert to addresses of its own.
//! This module knows nothing of operations.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use paceline_memory::Mapping;
use paceline_trace::lock;

/// A place in memory that any rank of the group can convert to an address in its own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentOffset {
    /// Number of the segment, made by [`number`]; unused between threads.
    pub(crate) segment: u64,
    /// Offset into the rank's part of the segment, in bytes; between threads, the address itself.
    pub(crate) offset: u64,
}

impl SegmentOffset {
    /// The place `len_bytes` further on.
    pub(crate) fn after(self, len_bytes: usize) -> Self {
        Self { offset: self.offset + len_bytes as u64, ..self }
    }
}

/// One rank's part of a segment: a range of a mapping.
#[derive(Clone, Debug)]
pub(crate) struct SegmentPart {
    pub(crate) mapping: Arc<Mapping>,
    start_bytes: usize,
    len_bytes: usize,
    /// The address of the first byte. Every operation uses it, so it is not looked up in the mapping each time.
    address: usize,
}

impl SegmentPart {
    /// The `len_bytes` bytes of a mapping that begin at `start_bytes`. `None` if they do not lie within the mapping.
    pub(crate) fn new(mapping: Arc<Mapping>, start_bytes: usize, len_bytes: usize) -> Option<Self> {
        let end = start_bytes.checked_add(len_bytes)?;
        if end > mapping.len_bytes() {
            return None;
        }
        let address = mapping.base().as_ptr().expose_provenance() + start_bytes;
        Some(Self { mapping, start_bytes, len_bytes, address })
    }

    pub(crate) fn range(&self) -> std::ops::Range<usize> {
        self.start_bytes..self.start_bytes + self.len_bytes
    }

    /// How far into the part an address lies, if the `len_bytes` bytes from there lie within the part.
    pub(crate) fn offset(&self, address: usize, len_bytes: usize) -> Option<usize> {
        let offset = address.checked_sub(self.address)?;
        (offset.checked_add(len_bytes)? <= self.len_bytes).then_some(offset)
    }

    /// The address `offset` bytes into the part, if the `len_bytes` bytes from there lie within the part.
    pub(crate) fn address(&self, offset: u64, len_bytes: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len_bytes as u64)?;
        // The address is that of the mapping, whose provenance `new` has exposed.
        let address = || std::ptr::with_exposed_provenance_mut(self.address + offset as usize);
        (end <= self.len_bytes as u64).then(address)
    }
}

/// Memory of every rank of a host: one part for each, in the order of the group's ranks on the host.
#[derive(Debug)]
pub(crate) struct SharedSegment {
    pub(crate) parts: Box<[SegmentPart]>,
}

impl SharedSegment {
    /// A segment of `world` parts of the same size, one after the other from `start_bytes` on.
    pub(crate) fn even(
        mapping: &Arc<Mapping>,
        start_bytes: usize,
        part_bytes: usize,
        world: usize,
    ) -> Option<Self> {
        let part =
            |rank| SegmentPart::new(mapping.clone(), start_bytes + rank * part_bytes, part_bytes);
        Some(Self { parts: (0..world).map(part).collect::<Option<_>>()? })
    }
}

#[derive(Debug)]
pub(crate) struct Segments {
    /// The staging areas. No buffer of the caller lies there.
    staging: SharedSegment,
    /// The segments that the group has shared, by number. Dropping the buffer in a part returns the part's
    /// memory to the system. The segment stays mapped until all ranks have dropped their buffers, because a peer may still use
    /// its own part.
    shared: Mutex<SegmentList>,
    inherited: Option<Inherited>,
}

/// The memory that a group can reach because of the group from which it was split.
#[derive(Clone, Debug)]
pub(crate) struct Inherited {
    pub(crate) segments: Arc<Segments>,
    /// For each rank of this host in the group, its number among this host's ranks in the older group.
    pub(crate) ranks: Box<[usize]>,
}

/// Segments by number. A number is never given again, so it cannot name another segment.
#[derive(Debug, Default)]
struct SegmentList {
    segments: BTreeMap<u32, SharedSegment>,
    num_added: u32,
}

/// The number of a segment: how many generations back it was shared, and its index there.
fn number(generation: u64, index: u32) -> u64 {
    generation << 32 | u64::from(index)
}

impl Segments {
    pub(crate) fn new(staging: SharedSegment, inherited: Option<Inherited>) -> Self {
        Self { staging, shared: Mutex::default(), inherited }
    }

    /// Adds a segment: the same on every rank, in the same order.
    pub(crate) fn add(&self, segment: SharedSegment) {
        let mut shared = lock(&self.shared);
        let number = shared.num_added;
        shared.num_added += 1;
        shared.segments.insert(number, segment);
    }

    /// For each segment of this group, in order, the same on every rank: 1 if this rank's buffer in it has been dropped,
    /// otherwise 0.
    pub(crate) fn dropped(&self, rank: usize) -> Vec<u8> {
        let shared = lock(&self.shared);
        let is_dropped = |segment: &SharedSegment| !segment.parts[rank].mapping.has_windows();
        shared.segments.values().map(|segment| u8::from(is_dropped(segment))).collect()
    }

    /// Forgets the segments whose buffers all ranks have dropped, by the same order.
    pub(crate) fn forget(&self, dropped: &[u8]) {
        let mut dropped = dropped.iter();
        lock(&self.shared).segments.retain(|_, _| dropped.next() != Some(&1));
    }

    /// Where in the memory that was shared in this group itself an address of `rank` lies.
    #[inline]
    fn locate_own(&self, rank: usize, address: usize, len_bytes: usize) -> Option<(u32, usize)> {
        lock(&self.shared).segments.iter().find_map(|(&index, segment)| {
            Some((index, segment.parts[rank].offset(address, len_bytes)?))
        })
    }

    #[inline]
    fn locate(&self, mut rank: usize, address: usize, len_bytes: usize) -> Option<SegmentOffset> {
        let (mut segments, mut generation) = (self, 0);
        loop {
            if let Some((index, offset)) = segments.locate_own(rank, address, len_bytes) {
                return Some(SegmentOffset {
                    segment: number(generation, index),
                    offset: offset as u64,
                });
            }
            let older = segments.inherited.as_ref()?;
            (segments, rank, generation) = (&older.segments, older.ranks[rank], generation + 1);
        }
    }

    #[inline]
    fn resolve(&self, mut rank: usize, place: SegmentOffset, len_bytes: usize) -> Option<*mut u8> {
        let mut segments = self;
        for _ in 0..place.segment >> 32 {
            let older = segments.inherited.as_ref()?;
            (segments, rank) = (&older.segments, older.ranks[rank]);
        }
        let shared = lock(&segments.shared);
        let part = &shared.segments.get(&(place.segment as u32))?.parts[rank];
        part.address(place.offset, len_bytes)
    }
}

/// The memory of its peers that this rank can reach.
#[derive(Debug)]
pub(crate) enum Reach {
    /// All of it: the ranks are threads.
    Threads,
    /// The segments that were shared in the group, and in the groups from which it descends.
    Segments(Arc<Segments>),
}

impl Reach {
    /// The place of the `len_bytes` bytes at `base` in the memory of `rank`, the caller's own rank. `None` if they must be
    /// staged, because peers cannot reach them.
    pub(crate) fn locate(
        &self,
        rank: usize,
        base: *mut u8,
        len_bytes: usize,
    ) -> Option<SegmentOffset> {
        let address = base as usize;
        match self {
            Reach::Threads => Some(SegmentOffset { segment: 0, offset: address as u64 }),
            Reach::Segments(segments) => segments.locate(rank, address, len_bytes),
        }
    }

    /// The address in this process of `len_bytes` bytes at `place` in the memory of `rank`, if there is such a place.
    pub(crate) fn resolve(
        &self,
        rank: usize,
        place: SegmentOffset,
        len_bytes: usize,
    ) -> Option<*mut u8> {
        match self {
            Reach::Threads => Some(place.offset as *mut u8),
            Reach::Segments(segments) => segments.resolve(rank, place, len_bytes),
        }
    }

    /// The address of the bytes from `offset` to the end of a rank's staging area. `None` between threads.
    pub(crate) fn staging(&self, rank: usize, offset: usize) -> Option<*mut u8> {
        let Reach::Segments(segments) = self else { return None };
        segments.staging.parts[rank].address(offset as u64, 0)
    }

    /// The memory that the system holds for each segment that was shared in the group, in bytes.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn held_bytes(&self) -> Vec<usize> {
        let Reach::Segments(segments) = self else { return Vec::new() };
        let held = |segment: &SharedSegment| {
            let file = segment.parts[0].mapping.file();
            512 * rustix::fs::fstat(file).unwrap().st_blocks as usize
        };
        lock(&segments.shared).segments.values().map(held).collect()
    }
}
