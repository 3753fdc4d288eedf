//! The allocator of one rank: it pools memory of its device and counts bytes by category.
//!
//! Input: sizes and categories. Output: buffers. This module does not know the contents of the memory.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use paceline_cuda::Card;
use paceline_trace::{Track, lock};

use super::account::UsageCounters;
use super::buffer::{Buffer, Origin};
use super::heap::{Block, Heap, Shortage};
use super::uses::UseHistory;
use crate::{
    Accelerator, Category, Device, DeviceStream, Event, EventState, MemoryError, PhaseUsage,
    Result, Usage,
};

/// Hands out buffers, takes their memory back when the last user drops them, and counts the bytes.
///
/// Returned memory serves later requests of any size, so after the first steps a training step takes no memory from the system
/// (see [`Allocator::fresh_blocks`]). If the sizes change from step to step, the memory from the system stays within a sixteenth
/// of the most bytes that were in use at once. All free memory goes back before a request fails. Clones share one pool and one
/// account.
///
/// ```
/// use paceline_memory::{Allocator, Category, DType};
///
/// let memory = Allocator::new();
/// let weights = memory.tensor(DType::F32, [2, 3], Category::Parameters)?;
/// assert!(memory.usage(Category::Parameters).current_bytes >= 24);
/// drop(weights);
/// assert_eq!(memory.usage(Category::Parameters).current_bytes, 0);
/// # Ok::<(), paceline_memory::MemoryError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Allocator(pub(crate) Arc<Pool>);

#[derive(Debug, Default)]
pub(crate) struct Pool {
    device: Device,
    pub(crate) account: UsageCounters,
    heap: Mutex<Heap>,
    /// Whether a device can copy this memory of the host without the driver's help.
    is_pinned: bool,
    /// The stream whose work uses the memory of a device.
    home: Option<DeviceStream>,
    staging: OnceLock<Allocator>,
    /// Free blocks of a device, and the work of other streams that still uses them.
    parked: Mutex<Vec<(Block, Vec<Event>)>>,
}

impl Pool {
    fn new(device: Device, shortage: Shortage, card: Option<&Card>) -> Self {
        let mut pool = Self::default();
        pool.device = device;
        pool.heap = Mutex::new(Heap::new(device, shortage, card.cloned()));
        pool
    }

    pub(crate) fn heap(&self) -> MutexGuard<'_, Heap> {
        lock(&self.heap)
    }

    fn take(&self, len_bytes: usize, category: Category) -> Result<Block> {
        // A capture forbids queries of other streams.
        if self.heap().graph_pool.is_none() {
            self.unpark();
        }
        let mut heap = self.heap();
        let before = heap.usage.reserved_bytes;
        let block = heap.take(len_bytes);
        match heap.usage.reserved_bytes.checked_sub(before) {
            Some(more) => self.account.reserved.add(more),
            None => self.account.reserved.remove(before - heap.usage.reserved_bytes),
        };
        block.ok_or_else(|| match heap.refusal.take() {
            Some(refusal) => MemoryError::CardMemory { category, refusal },
            None => MemoryError::OutOfMemory { bytes: len_bytes, category },
        })
    }

    /// Takes a block back after these uses. The next user of a device's block is work of its home stream, so the block is free
    /// as soon as such work comes after all uses, which may still be queued.
    pub(super) fn give_back(&self, block: Block, uses: &UseHistory) {
        let Some(home) = &self.home else { return self.heap().give_back(block) };
        let others = uses.not_before(home.stream());
        if others.is_empty() {
            home.poison(block.base.as_ptr(), block.len_bytes);
            self.heap().give_back(block);
        } else {
            lock(&self.parked).push((block, others));
        }
    }

    /// Frees the blocks that only work of the home stream can still use.
    fn unpark(&self) {
        let Some(home) = &self.home else { return };
        let is_done =
            |event: &Event| home.stream().is_after(event) || event.poll() == EventState::Complete;
        let free: Vec<_> =
            lock(&self.parked).extract_if(.., |(_, events)| events.iter().all(is_done)).collect();
        for (block, _) in free {
            home.poison(block.base.as_ptr(), block.len_bytes);
            self.heap().give_back(block);
        }
    }
}

impl Drop for Pool {
    /// Waits for the work that may still use the memory.
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            home.drain();
            lock(&self.parked).iter().flat_map(|(_, events)| events).for_each(|event| {
                event.block();
            });
        }
    }
}

impl Allocator {
    /// An allocator with an empty pool and an empty account.
    pub fn new() -> Self {
        Self::default()
    }

    /// An allocator of [`Device::Meta`]: its buffers are counted like others and take no memory.
    pub fn meta() -> Self {
        Self(Arc::new(Pool::new(Device::Meta, Shortage::None, None)))
    }

    /// An allocator of memory of the host that a device can copy by itself.
    pub fn pinned(accelerator: &Accelerator) -> Self {
        let mut pool = Pool::new(Device::Cpu, Shortage::None, accelerator.card());
        pool.is_pinned = true;
        Self(Arc::new(pool))
    }

    /// An allocator of a device's memory, which is mostly used by work of `home`: freed memory serves later work of this
    /// stream at once, and work of other streams only after an event.
    pub fn on(home: &DeviceStream) -> Self {
        let accelerator = home.accelerator();
        let mut pool = Pool::new(accelerator.device(), Shortage::None, accelerator.card());
        pool.home = Some(home.clone());
        Self(Arc::new(pool))
    }

    /// The stream whose work uses this memory of a device.
    pub fn home(&self) -> Option<&DeviceStream> {
        self.0.home.as_ref()
    }

    /// Whether a device can copy this memory of the host by itself.
    pub fn is_pinned(&self) -> bool {
        self.0.is_pinned
    }

    /// For tests: an allocator to which the system gives memory only `num_blocks` times.
    #[cfg(feature = "faults")]
    pub fn with_blocks(num_blocks: u64) -> Self {
        Self(Arc::new(Pool::new(Device::Cpu, Shortage::AfterRequests(num_blocks), None)))
    }

    /// Pinned memory of the host for copies from and to this memory of a device, and the stream of these copies.
    pub(crate) fn staging(&self) -> Option<(&Self, &DeviceStream)> {
        let home = self.home()?;
        Some((self.0.staging.get_or_init(|| Self::pinned(home.accelerator())), home))
    }

    /// The device whose memory this allocator hands out.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Allocates `len_bytes` bytes of private memory of the device, aligned to 64 bytes. The contents are unspecified: zero, or
    /// what an earlier user of the memory left. Errors if the system has no memory left.
    pub fn allocate(&self, len_bytes: usize, category: Category) -> Result<Buffer> {
        let block = self.0.take(len_bytes, category)?;
        Ok(Buffer::new(block.base, len_bytes, category, self.clone(), Origin::Pooled(block)))
    }

    /// Bytes in use in one category.
    pub fn usage(&self, category: Category) -> Usage {
        self.0.account.by_category[category as usize].usage()
    }

    /// Bytes in use in all categories together.
    pub fn total(&self) -> Usage {
        self.0.account.total.usage()
    }

    /// Memory obtained from the system: in use, or free in the pool.
    pub fn reserved(&self) -> Usage {
        self.0.account.reserved.usage()
    }

    /// Begins a phase: the peaks in its [`PhaseUsage`] count from now. The time before it belongs to no phase.
    pub fn begin_phase(&self) {
        self.0.account.begin_phase();
    }

    /// Ends a phase and begins the next one. Returns the memory at this moment and the peaks of the phase, and keeps
    /// them for [`Allocator::phases`]. Takes a few atomic operations.
    pub fn end_phase(&self, name: &'static str) -> PhaseUsage {
        self.0.account.end_phase(name)
    }

    /// The phases that have ended, by name. Phases of the same name are merged, see [`PhaseUsage::then`].
    pub fn phases(&self) -> Vec<(&'static str, PhaseUsage)> {
        lock(&self.0.account.phases).clone()
    }

    /// Forgets the phases that have ended, for example those of warm-up.
    pub fn forget_phases(&self) {
        lock(&self.0.account.phases).clear();
    }

    /// Records on `track` whenever memory is taken or returned. Only the first call has an effect.
    pub fn record_on(&self, track: Arc<Track>) {
        let _ = self.0.account.track.set(track);
    }

    /// How often no gap had room for a request, so that the system was asked for memory.
    pub fn fresh_blocks(&self) -> u64 {
        self.0.heap().usage.num_requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, DType};

    #[test]
    fn a_repeated_pattern_of_requests_allocates_once() {
        let allocator = Allocator::new();
        let step = || {
            let a = allocator.allocate(1000, Category::Activations).unwrap();
            let b = allocator.allocate(5000, Category::Activations).unwrap();
            drop(a);
            let _c = allocator.allocate(990, Category::Workspace).unwrap();
            drop(b);
        };
        step();
        let after_one = allocator.fresh_blocks();
        for _ in 0..10 {
            step();
        }
        assert_eq!((after_one, allocator.fresh_blocks()), (2, 2));
        assert_eq!(allocator.reserved().current_bytes, 1024 + 5056);
    }

    #[test]
    fn the_books_know_current_and_peak_by_category() {
        let allocator = Allocator::new();
        let a = allocator.allocate(100, Category::Activations).unwrap();
        let g = allocator.allocate(50, Category::Gradients).unwrap();
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
        let kept = allocator.allocate(1000, Category::Parameters).unwrap();
        let gone = allocator.allocate(500, Category::Workspace).unwrap();
        drop(gone);
        let first = allocator.end_phase("forward");
        let usage = |current_bytes, peak_bytes| Usage { current_bytes, peak_bytes };
        assert_eq!(first.of(Category::Parameters), usage(1000, 1000));
        assert_eq!(first.of(Category::Workspace), usage(0, 500));
        assert_eq!(first.total, usage(1000, 1500));
        assert_eq!(first.reserved, usage(1536, 1536));
        allocator.end_phase("backward");
        let small = allocator.allocate(64, Category::Workspace).unwrap();
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
        let kept = allocator.allocate(100, Category::Data).unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                for _ in 0..2000 {
                    drop(allocator.allocate(50, Category::Data).unwrap());
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
            let a = allocator.allocate(1000, Category::Activations).unwrap();
            let b = allocator.allocate(5 << 20, Category::Activations).unwrap();
            drop(a);
            let c = allocator.allocate(990, Category::Workspace).unwrap();
            drop((b, c));
            (allocator.end_phase("all"), allocator.fresh_blocks())
        };
        assert_eq!(requests(Allocator::meta()), requests(Allocator::new()));
        // More than any machine has.
        let huge = Allocator::meta().tensor(DType::F32, [1 << 50], Category::Parameters).unwrap();
        assert_eq!(huge.buffer().allocator().total().current_bytes, 4 << 50);
        let claim = huge.slice(5..9).unwrap().claim(Access::Write, "sgd").unwrap();
        assert!(huge.claim(Access::Read, "digest").is_err());
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
            let error = Allocator::new().allocate(len_bytes, Category::Data).unwrap_err();
            let text = format!("out of memory: could not allocate {len_bytes} bytes for data");
            assert_eq!(error.to_string(), text);
        }
        let huge = [1 << 40, 1 << 40];
        assert!(Allocator::new().tensor(DType::F32, huge, Category::Data).is_err());
    }
}
