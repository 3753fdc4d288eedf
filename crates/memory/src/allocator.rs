//! The allocator of one rank: it pools memory of its device and counts bytes by category.
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
use crate::{Category, DType, Device, MemoryError, PhaseUsage, Shape, Tensor, Usage};

/// Alignment of every buffer, in bytes: a cache line, and the widest vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// The size of a large page in bytes. Blocks of at least this size have their own mapping, on large pages.
const LARGE_PAGE: usize = 2 << 20;

/// The largest block without contents, in bytes: more than any machine has, and little enough that the sum over many blocks
/// is still a number.
const LARGEST_ON_META: usize = 1 << 56;

/// A type with the alignment of a buffer.
#[repr(align(64))]
struct Aligned;

const _: () = assert!(align_of::<Aligned>() == ALIGNMENT);

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

/// A piece of memory that is free, or that one buffer owns. On [`Device::Meta`] there is nothing at its address.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) base: NonNull<u8>,
    pub(crate) len_bytes: usize,
    device: Device,
}

// SAFETY: a block is an address and a length. The owner of the block owns the memory.
unsafe impl Send for Block {}

impl Block {
    fn layout(len_bytes: usize) -> Option<Layout> {
        Layout::from_size_align(len_bytes, ALIGNMENT).ok()
    }

    /// Zeroed memory from the system. `None` if the system has none left.
    fn fresh(device: Device, len_bytes: usize) -> Option<Self> {
        match device {
            Device::Cpu if len_bytes >= LARGE_PAGE => Self::mapped(len_bytes),
            Device::Cpu => Self::on_heap(len_bytes),
            Device::Meta if len_bytes > LARGEST_ON_META => None,
            // Nobody reads or writes there, so an aligned address that is never null is enough.
            Device::Meta => {
                Some(Self { base: NonNull::<Aligned>::dangling().cast(), len_bytes, device })
            }
        }
    }

    fn on_heap(len_bytes: usize) -> Option<Self> {
        let layout = Self::layout(len_bytes)?;
        // SAFETY: the layout has a size above zero, since `take` rounds up to the alignment.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, len_bytes, device: Device::Cpu })
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
        Some(Self { base: NonNull::new(base.cast())?, len_bytes, device: Device::Cpu })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match self.device {
            Device::Cpu => {}
            Device::Meta => return,
        }
        if self.len_bytes >= LARGE_PAGE {
            let kept = self.len_bytes.next_multiple_of(PAGE);
            // SAFETY: `mapped` made this mapping with this length, and nobody uses the block. A failure would
            // leak the mapping, which is harmless.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), kept) };
        } else if let Some(layout) = Self::layout(self.len_bytes) {
            // SAFETY: `on_heap` allocated this block with the same layout.
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
        let block = Block::fresh(self.device, wanted).ok_or_else(refused)?;
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

    /// An allocator of [`Device::Meta`]: its buffers are counted like others and take no memory.
    pub fn meta() -> Self {
        Self(Arc::new(Pool { device: Device::Meta, ..Pool::default() }))
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

    /// Allocates a buffer of `len_bytes` bytes of private memory of the device, aligned to 64 bytes. Its contents are
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

    /// Memory obtained from the system: in use, or free in the pool.
    pub fn reserved(&self) -> Usage {
        self.0.account.reserved()
    }

    /// Memory obtained from the system now, in bytes: in use, or free in the pool.
    pub fn reserved_bytes(&self) -> u64 {
        self.0.account.reserved().current_bytes
    }

    /// Begins a phase: the peaks in its [`PhaseUsage`] count from now. What came before it belongs to no phase.
    pub fn begin_phase(&self) {
        self.0.account.begin_phase();
    }

    /// Ends a phase and begins the next one. Returns the memory at this moment and the peaks of the phase, and keeps
    /// them for [`Allocator::phases`]. Takes a few atomic operations.
    pub fn end_phase(&self, name: &'static str) -> PhaseUsage {
        self.0.account.end_phase(name)
    }

    /// The phases that have ended, by name. Phases of one name are one, see [`PhaseUsage::then`].
    pub fn phases(&self) -> Vec<(&'static str, PhaseUsage)> {
        self.0.account.phases()
    }

    /// Forgets the phases that have ended, for example those of warm-up.
    pub fn forget_phases(&self) {
        self.0.account.forget_phases();
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
    fn a_phase_has_peaks_of_its_own() {
        let allocator = Allocator::new();
        let kept = allocator.host(1000, Category::Parameters).unwrap();
        let gone = allocator.host(500, Category::Workspace).unwrap();
        drop(gone);
        let first = allocator.end_phase("forward");
        let usage = |current_bytes, peak_bytes| Usage { current_bytes, peak_bytes };
        assert_eq!(first.of(Category::Parameters), usage(1000, 1000));
        assert_eq!(first.of(Category::Workspace), usage(0, 500));
        assert_eq!(first.total, usage(1000, 1500));
        assert_eq!(first.reserved, usage(1536, 1536));
        allocator.end_phase("backward");
        let small = allocator.host(64, Category::Workspace).unwrap();
        let second = allocator.end_phase("forward");
        assert_eq!(second.of(Category::Workspace), usage(64, 64));
        assert_eq!(second.total, usage(1064, 1064));
        let [("forward", forward), ("backward", backward)] = allocator.phases()[..] else {
            panic!("{:?}", allocator.phases())
        };
        assert_eq!(backward.total, usage(1000, 1000));
        assert_eq!(forward.of(Category::Workspace), usage(64, 500));
        assert_eq!(forward.total, usage(1064, 1500));
        // The peak of the whole run is that of all phases.
        assert_eq!(allocator.total(), usage(1064, 1500));
        drop((kept, small));
        allocator.forget_phases();
        allocator.begin_phase();
        assert_eq!(allocator.end_phase("forward").total, usage(0, 0));
        assert_eq!(allocator.phases().len(), 1);
    }

    #[test]
    fn phases_miss_no_bytes_of_other_threads() {
        let allocator = Allocator::new();
        let kept = allocator.host(100, Category::Data).unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                for _ in 0..2000 {
                    drop(allocator.host(50, Category::Data).unwrap());
                }
            });
            while !other.is_finished() {
                let phase = allocator.end_phase("phase").of(Category::Data);
                assert!((100..=150).contains(&phase.current_bytes), "{phase:?}");
                assert!((phase.current_bytes..=150).contains(&phase.peak_bytes), "{phase:?}");
            }
        });
        assert_eq!(allocator.usage(Category::Data), Usage { current_bytes: 100, peak_bytes: 150 });
        drop(kept);
    }

    #[test]
    fn a_device_without_contents_counts_like_the_host() {
        let requests = |allocator: Allocator| {
            let a = allocator.host(1000, Category::Activations).unwrap();
            let b = allocator.host(5 << 20, Category::Activations).unwrap();
            drop(a);
            let c = allocator.host(990, Category::Workspace).unwrap();
            drop((b, c));
            (allocator.end_phase("all"), allocator.fresh_blocks())
        };
        assert_eq!(requests(Allocator::meta()), requests(Allocator::new()));
        // More than any machine has.
        let huge = Allocator::meta().tensor(DType::F32, [1 << 50], Category::Parameters).unwrap();
        assert_eq!(huge.buffer().allocator().total().current_bytes, 4 << 50);
        let claim = huge.slice(5..9).unwrap().claim(crate::Access::Write, "sgd").unwrap();
        assert!(huge.claim(crate::Access::Read, "digest").is_err());
        drop(claim);
        let error = huge.read::<f32>().unwrap_err().to_string();
        assert_eq!(
            error,
            "a tensor on the device meta has a size but no contents, so they cannot be read or written"
        );
        assert!(huge.write::<f32>().is_err());
        let small = huge.slice(0..10).unwrap();
        assert!(small.fill_zero().is_err());
        let host = Allocator::new().tensor(DType::F32, [10], Category::Parameters).unwrap();
        assert!(host.copy_from(&small).is_err());
        assert!(small.copy_from(&host).is_err());
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
