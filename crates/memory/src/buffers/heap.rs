//! Where blocks lie: ranges of addresses, in which each block gets the first gap that has room for it.
//!
//! A block's place depends only on the blocks in use at that moment: free neighbors are one gap, and the gap after the last
//! block has no end. So a training step takes the same places whatever ran before it, and a repeated step takes no memory from
//! the system. Free memory stays with the process up to a bound ([`bound_bytes`]). Beyond it, and before an allocation fails,
//! the pages of free gaps go back to the system.
//!
//! Input: sizes. Output: blocks. This module does not know the contents of the memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;

use paceline_cuda::{Card, CudaError};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap,
};
use rustix::process::{Resource, getrlimit};

use crate::Device;

/// Alignment of every buffer, in bytes: a cache line, and the widest vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// Bytes. Blocks of at least this size ask for large pages.
const LARGE_PAGE: usize = 2 << 20;

/// Pages go back to the system in pieces of this size, a multiple of every system's page size.
const GRAIN: usize = 64 << 10;

/// Addresses that are reserved at once, if addresses are not limited. They take no memory.
const CHUNK: usize = 64 << 30;

/// The same if they are limited (`ulimit -v`), or else the size of the block.
const SMALL_CHUNK: usize = 8 << 20;

/// Bytes that a card's driver is asked for at once, or else the size of the block.
const CARD_CHUNK: usize = 32 << 20;

/// More addresses than any machine has, and few enough that sums are still numbers.
const META_CHUNK: usize = 1 << 62;

/// The most memory that a pool keeps: the peak and a sixteenth more, for gaps that no block fits into.
fn bound_bytes(peak_bytes: usize) -> usize {
    peak_bytes.saturating_add(peak_bytes / 16)
}

/// A piece of memory. On [`Device::Meta`] there is nothing at its address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) base: NonNull<u8>,
    chunk: u32,
    start: usize,
    /// May be more than was asked for.
    pub(super) len_bytes: usize,
    pub(crate) graph_pool: Option<u32>,
}

// SAFETY: a block is an address and lengths. Only its owner uses the memory.
unsafe impl Send for Block {}

impl Block {
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.len_bytes
    }
}

/// Requests that the system refuses, for tests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Shortage {
    #[default]
    None,
    /// Anything after this many requests.
    #[cfg(feature = "faults")]
    AfterRequests(u64),
    /// More than this many bytes at once.
    #[cfg(test)]
    AboveBytes(usize),
}

#[derive(Debug, Default)]
pub(super) struct HeapUsage {
    in_use_bytes: usize,
    peak_bytes: usize,
    /// Memory from the system: in use, or free.
    pub(super) reserved_bytes: usize,
    pub(super) num_requests: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Heap {
    device: Device,
    shortage: Shortage,
    /// The card whose memory this is; or, on the host, that copies this memory by itself.
    card: Option<Card>,
    /// Why the card had no memory.
    pub(crate) refusal: Option<CudaError>,
    chunks: BTreeMap<u32, Chunk>,
    /// The number of the last chunk or graph pool.
    last_id: u32,
    /// The graph pool from which blocks are taken now.
    pub(crate) graph_pool: Option<u32>,
    pub(super) usage: HeapUsage,
}

/// The origin of a chunk's memory, which gets it back.
#[derive(Debug)]
enum Mapped {
    /// There is no memory.
    Nothing,
    /// A mapping of the system: its address and length.
    System(NonNull<u8>, usize),
    /// Memory of a card, or of the host that the card's driver has locked.
    ByDriver { card: Card, is_of_host: bool },
}

/// A range of addresses that holds blocks and gaps at its beginning.
#[derive(Debug)]
struct Chunk {
    base: NonNull<u8>,
    len_bytes: usize,
    mapping: Mapped,
    /// The graph pool whose blocks it has, and no others.
    graph_pool: Option<u32>,
    /// From here on there are no blocks and no gaps.
    end: usize,
    /// Up to here the addresses can be written.
    writable: usize,
    /// The lengths of gaps by their starts. No two gaps touch.
    gaps: BTreeMap<usize, usize>,
    /// The ends of ranges within gaps, by their starts, whose pages have gone back to the system.
    absent: BTreeMap<usize, usize>,
}

// SAFETY: a heap is addresses and lengths. It owns its mappings, and only the owner of a block uses the block's memory.
unsafe impl Send for Heap {}

impl Heap {
    pub(crate) fn new(device: Device, shortage: Shortage, card: Option<Card>) -> Self {
        Self { device, shortage, card, ..Self::default() }
    }

    /// A block of at least `len_bytes` bytes. `None` if the system has no memory left.
    pub(crate) fn take(&mut self, len_bytes: usize) -> Option<Block> {
        let len_bytes = len_bytes.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let mut chunks =
            self.chunks.iter().filter(|(_, chunk)| chunk.graph_pool == self.graph_pool);
        let place = chunks.find_map(|(&id, chunk)| Some((id, chunk.first_fit(len_bytes)?)));
        let (id, start) = match place {
            Some(place) => place,
            None => (self.add_chunk(len_bytes)?, 0),
        };
        let chunk = self.chunks.get_mut(&id)?;
        let base = NonNull::new(chunk.base.as_ptr().wrapping_add(start))?;
        let block = Block { base, chunk: id, start, len_bytes, graph_pool: self.graph_pool };
        let occupied_bytes = chunk.occupy(block.range());
        // A card's driver gave the whole chunk.
        let fresh_bytes = if self.card.is_none() { occupied_bytes } else { 0 };
        self.usage.in_use_bytes += len_bytes;
        self.usage.reserved_bytes += fresh_bytes;
        if fresh_bytes > 0 && !self.supply(&block) {
            self.give_back(block);
            self.trim(usize::MAX);
            return None;
        }
        self.usage.peak_bytes = self.usage.peak_bytes.max(self.usage.in_use_bytes);
        Some(block)
    }

    pub(crate) fn give_back(&mut self, block: Block) {
        if let Some(chunk) = self.chunks.get_mut(&block.chunk) {
            chunk.vacate(block.range());
            self.usage.in_use_bytes -= block.len_bytes;
        }
    }

    /// The number of a new chunk, or of a new graph pool: chunks that have blocks of this pool only.
    pub(crate) fn next_id(&mut self) -> u32 {
        self.last_id += 1;
        self.last_id
    }

    /// Takes blocks from this graph pool from now on, or from general memory. Returns the choice before.
    pub(crate) fn enter(&mut self, graph_pool: Option<u32>) -> Option<u32> {
        std::mem::replace(&mut self.graph_pool, graph_pool)
    }

    /// The bytes of a graph pool that are in use, and the most that were at once.
    pub(crate) fn graph_pool_bytes(&self, graph_pool: u32) -> (usize, usize) {
        let chunks = self.chunks.values().filter(|chunk| chunk.graph_pool == Some(graph_pool));
        chunks.fold((0, 0), |(in_use, most), chunk| {
            let free: usize = chunk.gaps.values().sum();
            (in_use + chunk.end - free, most + chunk.end)
        })
    }

    /// Makes the chunks of a graph pool general memory.
    pub(crate) fn dissolve(&mut self, graph_pool: u32) {
        let chunks = self.chunks.values_mut().filter(|chunk| chunk.graph_pool == Some(graph_pool));
        chunks.for_each(|chunk| chunk.graph_pool = None);
    }

    /// Gets the memory of a block from the system, after giving back free memory beyond the bound, or all of it if the system
    /// refuses.
    fn supply(&mut self, block: &Block) -> bool {
        let bound = bound_bytes(self.usage.peak_bytes.max(self.usage.in_use_bytes));
        self.trim(self.usage.reserved_bytes.saturating_sub(bound));
        self.request(block) || {
            self.trim(usize::MAX);
            self.request(block)
        }
    }

    fn request(&mut self, block: &Block) -> bool {
        let is_refused = match self.shortage {
            Shortage::None => false,
            #[cfg(feature = "faults")]
            Shortage::AfterRequests(most) => self.usage.num_requests >= most,
            #[cfg(test)]
            Shortage::AboveBytes(most) => self.usage.reserved_bytes > most,
        };
        let chunk = self.chunks.get_mut(&block.chunk);
        let is_there = !is_refused && chunk.is_some_and(|chunk| chunk.make_writable(block.range()));
        self.usage.num_requests += u64::from(is_there);
        is_there
    }

    /// Gives at least `at_least_bytes` back if so much is free: the highest addresses first, because they are needed last.
    fn trim(&mut self, at_least_bytes: usize) {
        // A block of a device may be free while work that uses it is still queued.
        if self.device == Device::Sim || self.card.is_some() {
            return;
        }
        let mut left = at_least_bytes;
        let mut empty = Vec::new();
        for (&id, chunk) in self.chunks.iter_mut().rev() {
            while left > 0
                && let Some(bytes) = chunk.trim_one()
            {
                left = left.saturating_sub(bytes);
                self.usage.reserved_bytes -= bytes;
            }
            // A block that is larger than those before it has a chunk of its own if addresses are limited.
            if chunk.end == 0 && left > 0 {
                empty.push(id);
            }
        }
        empty.iter().for_each(|id| drop(self.chunks.remove(id)));
    }

    /// Reserves addresses for at least one block of this length. Returns the number of the chunk.
    fn add_chunk(&mut self, len_bytes: usize) -> Option<u32> {
        let mut chunk = match self.device {
            _ if self.card.is_some() => self.by_driver(len_bytes)?,
            Device::Cuda => return None,
            Device::Cpu | Device::Sim => {
                let is_limited = getrlimit(Resource::As).current.is_some();
                let small = len_bytes.max(SMALL_CHUNK).checked_next_multiple_of(LARGE_PAGE)?;
                let large = Some(CHUNK.max(small)).filter(|_| !is_limited);
                let reserve = || large.and_then(Chunk::reserved).or_else(|| Chunk::reserved(small));
                reserve().or_else(|| {
                    self.trim(usize::MAX);
                    Chunk::reserved(small)
                })?
            }
            Device::Meta if len_bytes > META_CHUNK || !self.chunks.is_empty() => return None,
            // Nobody reads or writes there, so an aligned address that is never null is enough.
            Device::Meta => {
                let base = NonNull::new(std::ptr::without_provenance_mut(ALIGNMENT))?;
                Chunk::new(base, META_CHUNK, Mapped::Nothing)
            }
        };
        chunk.graph_pool = self.graph_pool;
        let id = self.next_id();
        self.chunks.insert(id, chunk);
        Some(id)
    }

    /// A chunk of the card's memory, or of memory of the host that the card copies by itself.
    fn by_driver(&mut self, len_bytes: usize) -> Option<Chunk> {
        let card = self.card.clone()?;
        let allocate = |bytes| match self.device {
            Device::Cuda => card.allocate(bytes).map(|at| at as usize as *mut u8),
            _ => card.allocate_pinned(bytes),
        };
        let small = len_bytes.checked_next_multiple_of(LARGE_PAGE)?;
        // Small requests share chunks, so that the driver is asked rarely.
        let large = small.max(CARD_CHUNK);
        let taken = allocate(large).map(|base| (base, large));
        let taken = taken.or_else(|_| allocate(small).map(|base| (base, small)));
        let (base, bytes) = taken.map_err(|error| self.refusal = Some(error)).ok()?;
        self.usage.reserved_bytes += bytes;
        self.usage.num_requests += 1;
        let is_of_host = self.device != Device::Cuda;
        Some(Chunk::new(NonNull::new(base)?, bytes, Mapped::ByDriver { card, is_of_host }))
    }
}

impl Chunk {
    fn new(base: NonNull<u8>, len_bytes: usize, mapping: Mapped) -> Self {
        let (gaps, absent) = Default::default();
        Self { base, len_bytes, mapping, graph_pool: None, end: 0, writable: 0, gaps, absent }
    }

    /// New addresses, which begin at a large page and cannot be used yet. `None` if the system refuses.
    fn reserved(len_bytes: usize) -> Option<Self> {
        let mapped_bytes = len_bytes.checked_add(LARGE_PAGE)?;
        // Addresses without access are not accounted; `mprotect` accounts those that become usable, and so may refuse.
        let flags = MapFlags::PRIVATE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), mapped_bytes, ProtFlags::empty(), flags).ok()?
        };
        let lead = start.addr().next_multiple_of(LARGE_PAGE) - start.addr();
        let base = NonNull::new(start.wrapping_byte_add(lead).cast())?;
        let mapping = Mapped::System(NonNull::new(start.cast())?, mapped_bytes);
        Some(Self::new(base, len_bytes, mapping))
    }

    /// The start of the first gap of at least this length, if there is one.
    fn first_fit(&self, len_bytes: usize) -> Option<usize> {
        if let Some((&start, _)) = self.gaps.iter().find(|(_, len)| **len >= len_bytes) {
            return Some(start);
        }
        let start = match self.gaps.last_key_value() {
            Some((&start, &len)) if start + len == self.end => start,
            _ => self.end,
        };
        (start.checked_add(len_bytes)? <= self.len_bytes).then_some(start)
    }

    /// Takes the start of a gap. Returns how many of the bytes the system has to give.
    fn occupy(&mut self, range: Range<usize>) -> usize {
        let gap_end = range.start + self.gaps.remove(&range.start).unwrap_or(0);
        if gap_end > range.end {
            self.gaps.insert(range.end, gap_end - range.end);
        }
        let grown = range.end.saturating_sub(self.end);
        self.end = self.end.max(range.end);
        grown + self.make_present(&range)
    }

    /// Makes a range that nobody uses any longer a part of a gap.
    fn vacate(&mut self, range: Range<usize>) {
        let (mut start, mut end) = (range.start, range.end);
        if let Some(len) = self.gaps.remove(&end) {
            end += len;
        }
        if let Some((&before, &len)) = self.gaps.range(..start).next_back()
            && before + len == start
        {
            start = before;
        }
        self.gaps.insert(start, end - start);
    }

    /// The parts of a range whose pages have gone back to the system.
    fn absent_in(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let before = self.absent.range(..range.start).next_back();
        let ranges = before.into_iter().chain(self.absent.range(range.clone()));
        ranges.map(|(&start, &end)| start..end).filter(|absent| absent.end > range.start).collect()
    }

    /// Notes that a block uses the pages of a range again. Returns how many of its bytes were absent.
    fn make_present(&mut self, range: &Range<usize>) -> usize {
        let mut num_bytes = 0;
        for absent in self.absent_in(range) {
            self.absent.remove(&absent.start);
            // Grains that the range touches only in part come back as a whole, since blocks are no multiples of them.
            let start = range.start.max(absent.start) / GRAIN * GRAIN;
            let end = range.end.next_multiple_of(GRAIN).min(absent.end);
            num_bytes += end - start;
            for (start, end) in [(absent.start, start), (end, absent.end)] {
                if start < end {
                    self.absent.insert(start, end);
                }
            }
        }
        num_bytes
    }

    /// Makes sure that the addresses of a block can be written. Returns whether the system lets them.
    fn make_writable(&mut self, range: Range<usize>) -> bool {
        if !matches!(self.mapping, Mapped::System(..)) {
            return true;
        }
        if range.end > self.writable {
            let to = range.end.next_multiple_of(LARGE_PAGE).min(self.len_bytes);
            let protection = MprotectFlags::READ | MprotectFlags::WRITE;
            // SAFETY: the addresses lie within this chunk, and no block uses them yet.
            let allowed = unsafe {
                let start = self.base.add(self.writable).as_ptr().cast();
                mprotect(start, to - self.writable, protection)
            };
            if allowed.is_err() {
                return false;
            }
            self.writable = to;
        }
        // Large pages save most page-table walks on large matrices. They are asked for before anything is written.
        let pages = range.start.next_multiple_of(LARGE_PAGE)..range.end / LARGE_PAGE * LARGE_PAGE;
        if !pages.is_empty() {
            // SAFETY: the range lies within this chunk, and the advice changes no contents. A kernel without large
            // pages may refuse, which costs only speed.
            let _ = unsafe {
                let start = self.base.add(pages.start).as_ptr().cast();
                madvise(start, pages.len(), Advice::LinuxHugepage)
            };
        }
        true
    }

    /// Gives the pages of the last gap that has any back to the system. Returns their bytes.
    fn trim_one(&mut self) -> Option<usize> {
        let (range, num_bytes) = self.gaps.iter().rev().find_map(|(&start, &len)| {
            let is_last = start + len == self.end;
            let end = if is_last { self.end } else { (start + len) / GRAIN * GRAIN };
            let range = start.next_multiple_of(GRAIN).min(end)..end;
            let absent = self.absent_in(&range).iter().map(Range::len).sum::<usize>();
            (range.len() > absent).then(|| (range.clone(), range.len() - absent))
        })?;
        self.absent.retain(|start, _| !range.contains(start));
        if range.end == self.end {
            self.end = range.start;
            // The rest of the gap is less than a grain.
            if let Some(mut gap) = self.gaps.last_entry() {
                *gap.get_mut() = range.start - gap.key();
                if *gap.get() == 0 {
                    gap.remove();
                }
            }
        } else {
            self.absent.insert(range.start, range.end);
        }
        if matches!(self.mapping, Mapped::System(..)) {
            let pages = range.start..range.end.next_multiple_of(GRAIN).min(self.writable);
            // With an MPI library, these pages may be registered with the network card. It then has to see the call, so the
            // feature `mpi` of paceline-collectives makes rustix call libc here and for `munmap`.
            // SAFETY: the range lies within this chunk, and no block uses it. Later it reads as zeros.
            let _ = unsafe {
                let start = self.base.add(pages.start).as_ptr().cast();
                madvise(start, pages.len(), Advice::LinuxDontNeed)
            };
        }
        Some(num_bytes)
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        match &self.mapping {
            Mapped::Nothing => {}
            Mapped::System(start, len_bytes) => {
                // SAFETY: `reserved` made this mapping with this length, and nobody uses its blocks. A failure would leak
                // the mapping, which is harmless.
                let _ = unsafe { munmap(start.as_ptr().cast(), *len_bytes) };
            }
            // SAFETY: `by_driver` got this memory from the card, and the pool has waited for the work that used its blocks.
            Mapped::ByDriver { card, is_of_host } => unsafe {
                if *is_of_host {
                    card.free_pinned(self.base.as_ptr())
                } else {
                    card.free(self.base.as_ptr().addr() as u64)
                }
            },
        }
    }
}

#[cfg(test)]
mod tests;
