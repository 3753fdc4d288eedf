//! The allocator of one rank: it pools host memory and counts bytes by category.
//!
//! Input: sizes and categories. Output: buffers. This module knows nothing of what the memory holds.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paceline_trace::Track;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::account::Account;
use crate::buffer::Buffer;
use crate::{Category, DType, Device, MemoryError, Shape, Tensor, Usage};

/// Alignment of every buffer, in bytes: a cache line, and the widest vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// The size of a large page in bytes. Blocks of at least this size have their own mapping, on large pages.
const LARGE_PAGE: usize = 2 << 20;

/// The kernel's unit of mapping.
const PAGE: usize = 4096;

/// Hands out buffers, takes their memory back when the last user drops them, and counts the bytes.
///
/// A returned block serves the next request that fills at least half of the block. A training step asks for
/// the same sizes every time, so after the first step it takes no memory from the system (see
/// [`Allocator::fresh_blocks`]). Clones share one pool and one account.
#[derive(Clone, Debug, Default)]
pub struct Allocator(pub(crate) Arc<Pool>);

#[derive(Debug, Default)]
pub(crate) struct Pool {
    device: Device,
    pub(crate) account: Account,
    free: Mutex<BTreeMap<usize, Vec<Block>>>,
    fresh_blocks: AtomicU64,
    /// In a test: the number of blocks after which the system has no memory left.
    #[cfg(feature = "faults")]
    refused_from: Option<u64>,
}

/// A piece of host memory that is free, or that one buffer owns.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) base: NonNull<u8>,
    pub(crate) len_bytes: usize,
}

// SAFETY: a block is an address and a length. The owner of the block owns the memory.
unsafe impl Send for Block {}

impl Block {
    fn layout(len_bytes: usize) -> Option<Layout> {
        Layout::from_size_align(len_bytes, ALIGNMENT).ok()
    }

    /// Zeroed memory from the system. `None` if the system has none left.
    fn fresh(len_bytes: usize) -> Option<Self> {
        if len_bytes >= LARGE_PAGE {
            return Self::mapped(len_bytes);
        }
        let layout = Self::layout(len_bytes)?;
        // SAFETY: the layout has a size above zero, since `take` rounds up to the alignment.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, len_bytes })
    }

    /// A separate mapping for this block. It begins at a large page and asks the kernel for large pages
    /// before anything is written: on large matrices they save most page-table walks.
    fn mapped(len_bytes: usize) -> Option<Self> {
        let room = len_bytes.checked_add(LARGE_PAGE)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), room, protection, MapFlags::PRIVATE).ok()?
        };
        let lead = start.addr().next_multiple_of(LARGE_PAGE) - start.addr();
        let base = start.wrapping_byte_add(lead);
        let kept = len_bytes.next_multiple_of(PAGE);
        // SAFETY: these are the two ends of the new mapping, which the block does not use. If a call fails,
        // the end stays mapped and untouched, which uses no memory.
        unsafe {
            if lead > 0 {
                let _ = munmap(start, lead);
            }
            if room - lead > kept {
                let _ = munmap(base.wrapping_byte_add(kept), room - lead - kept);
            }
        }
        // SAFETY: the range is the new mapping, and the advice changes no contents. A kernel without large
        // pages may refuse, which costs only speed.
        let _ = unsafe { madvise(base, kept, Advice::LinuxHugepage) };
        Some(Self { base: NonNull::new(base.cast())?, len_bytes })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.len_bytes >= LARGE_PAGE {
            let kept = self.len_bytes.next_multiple_of(PAGE);
            // SAFETY: `mapped` made this mapping with this length, and nobody uses the block. A failure would
            // leak the mapping, which is harmless.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), kept) };
        } else if let Some(layout) = Self::layout(self.len_bytes) {
            // SAFETY: `fresh` allocated this block with the same layout.
            unsafe { dealloc(self.base.as_ptr(), layout) }
        }
    }
}

impl Pool {
    fn free(&self) -> MutexGuard<'_, BTreeMap<usize, Vec<Block>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, len_bytes: usize, category: Category) -> Result<Block, MemoryError> {
        let refused = || MemoryError::OutOfMemory { bytes: len_bytes, category };
        let wanted = len_bytes.max(1).checked_next_multiple_of(ALIGNMENT).ok_or_else(refused)?;
        let mut free = self.free();
        if let Some((&size, blocks)) = free.range_mut(wanted..=wanted.saturating_mul(2)).next()
            && let Some(block) = blocks.pop()
        {
            if blocks.is_empty() {
                free.remove(&size);
            }
            return Ok(block);
        }
        drop(free);
        #[cfg(feature = "faults")]
        if self.refused_from.is_some_and(|from| self.fresh_blocks.load(Ordering::Relaxed) >= from) {
            return Err(refused());
        }
        let block = Block::fresh(wanted).ok_or_else(refused)?;
        self.fresh_blocks.fetch_add(1, Ordering::Relaxed);
        self.account.reserve(wanted);
        Ok(block)
    }

    pub(crate) fn give_back(&self, block: Block) {
        self.free().entry(block.len_bytes).or_default().push(block);
    }
}

impl Allocator {
    /// An allocator with an empty pool and an empty account.
    pub fn new() -> Self {
        Self::default()
    }

    /// For tests: an allocator for which the system has only this many blocks.
    #[cfg(feature = "faults")]
    pub fn with_blocks(num_blocks: u64) -> Self {
        Self(Arc::new(Pool { refused_from: Some(num_blocks), ..Pool::default() }))
    }

    /// The device whose memory this allocator hands out.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Allocates a buffer of `len_bytes` bytes of host memory, aligned to 64 bytes. Its contents are
    /// unspecified: zero, or the values that an earlier user of the memory left. Errors if the system has no
    /// memory left.
    pub fn host(&self, len_bytes: usize, category: Category) -> Result<Buffer, MemoryError> {
        let block = self.0.take(len_bytes, category)?;
        Ok(Buffer::pooled(block, len_bytes, category, self.clone()))
    }

    /// Allocates a tensor in its own buffer. The contents and errors are those of [`Allocator::host`].
    pub fn tensor(
        &self,
        dtype: DType,
        shape: impl Into<Shape>,
        category: Category,
    ) -> Result<Tensor, MemoryError> {
        let shape = shape.into();
        let len_bytes = shape.num_elems().saturating_mul(dtype.size_bytes());
        let buffer = self.host(len_bytes, category)?;
        Tensor::new(buffer, 0, dtype, shape)
    }

    /// Bytes in use in one category.
    pub fn usage(&self, category: Category) -> Usage {
        self.0.account.usage(category)
    }

    /// Bytes in use in all categories together.
    pub fn total(&self) -> Usage {
        self.0.account.total()
    }

    /// Memory obtained from the system, in bytes: in use, or free in the pool.
    pub fn reserved_bytes(&self) -> u64 {
        self.0.account.reserved_bytes()
    }

    /// Records on `track` whenever memory is taken or returned. Only the first call has an effect.
    pub fn record_on(&self, track: Arc<Track>) {
        self.0.account.record_on(track);
    }

    /// How often the pool had no fitting block and asked the system for memory.
    pub fn fresh_blocks(&self) -> u64 {
        self.0.fresh_blocks.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_pattern_of_requests_allocates_once() {
        let allocator = Allocator::new();
        let step = || {
            let a = allocator.host(1000, Category::Activations).unwrap();
            let b = allocator.host(5000, Category::Activations).unwrap();
            drop(a);
            let _c = allocator.host(990, Category::Workspace).unwrap();
            drop(b);
        };
        step();
        let after_one = allocator.fresh_blocks();
        for _ in 0..10 {
            step();
        }
        assert_eq!((after_one, allocator.fresh_blocks()), (2, 2));
        assert_eq!(allocator.reserved_bytes(), 1024 + 5056);
    }

    #[test]
    fn the_books_know_current_and_peak_by_category() {
        let allocator = Allocator::new();
        let a = allocator.host(100, Category::Activations).unwrap();
        let g = allocator.host(50, Category::Gradients).unwrap();
        drop(a);
        let activations = allocator.usage(Category::Activations);
        assert_eq!(activations, Usage { current_bytes: 0, peak_bytes: 100 });
        assert_eq!(allocator.usage(Category::Gradients).current_bytes, 50);
        assert_eq!(allocator.total(), Usage { current_bytes: 50, peak_bytes: 150 });
        drop(g);
        assert_eq!(allocator.total().current_bytes, 0);
    }

    #[test]
    fn an_impossible_request_is_an_error() {
        for len_bytes in [usize::MAX / 4, usize::MAX / 2 + 1, usize::MAX - 1, usize::MAX] {
            let error = Allocator::new().host(len_bytes, Category::Data).unwrap_err();
            let text = format!("out of memory: could not allocate {len_bytes} bytes for data");
            assert_eq!(error.to_string(), text);
        }
        let huge = [1 << 40, 1 << 40];
        assert!(Allocator::new().tensor(DType::F32, huge, Category::Data).is_err());
    }
}
