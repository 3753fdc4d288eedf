//! Reference-counted memory whose ranges must be claimed before they are used.
//!
//! Input: pooled blocks or shared mappings. Output: buffers, and claims on their ranges. This module knows
//! nothing of element types, except that guards give typed slices.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use paceline_trace::lock;

use super::allocator::Allocator;
use super::heap::{ALIGNMENT, Block};
use super::uses::UseHistory;
use crate::queues::used_memory::{CapturedUse, UsedMemory};
use crate::{Access, Category, Device, Element, Event, Mapping, MemoryError, Result};

/// A piece of memory, shared by reference counting.
///
/// All access goes through claims. A claim on a range is refused while any conflicting claim is held. So a
/// collective can own a bucket of gradients while layers write gradients next to it.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<CountedMemory>);

#[derive(Debug)]
struct CountedMemory {
    base: NonNull<u8>,
    len_bytes: usize,
    device: Device,
    category: Category,
    allocator: Allocator,
    origin: Origin,
    uses: Mutex<UseHistory>,
}

#[derive(Debug)]
pub(super) enum Origin {
    /// Memory of the allocator's pool, which gets it back.
    Pooled(Block),
    /// Part of a mapping that other processes may share. `extent` is the range of bytes that belongs only to
    /// this buffer; its memory goes back to the system when the buffer is dropped.
    Window { mapping: Arc<Mapping>, extent: Range<usize> },
}

// SAFETY: the memory at `base` belongs only to this value (a pooled block, or a window whose exclusivity the
// caller of `Buffer::window` guarantees). It is reached only through claims, which a mutex protects.
unsafe impl Send for CountedMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for CountedMemory {}

impl Drop for CountedMemory {
    fn drop(&mut self) {
        let account = &self.allocator.0.account;
        match &self.origin {
            Origin::Pooled(block) => {
                let uses = self.uses.get_mut().unwrap_or_else(PoisonError::into_inner);
                self.allocator.0.give_back(*block, uses);
            }
            Origin::Window { mapping, extent } => {
                // SAFETY: the bytes belong only to this buffer, which the caller of `Buffer::window`
                // guaranteed. No claim on them is left, since a claim keeps the buffer alive.
                unsafe { mapping.give_back(extent.clone()) };
                mapping.close_window();
                account.reserved.remove(self.len_bytes);
            }
        }
        account.remove(self.category, self.len_bytes, self.base.addr().get());
    }
}

impl Buffer {
    /// A buffer over the first `len_bytes` bytes of `extent` in a mapping, counted under `category` by `allocator`. When
    /// the buffer is dropped, the whole pages of `extent` go back to the system in every process that maps them.
    ///
    /// Errors if the range does not lie within the extent and the mapping, or is not aligned to 64 bytes, or if the
    /// allocator is not one of the host.
    ///
    /// # Safety
    ///
    /// No other buffer of any process may overlap the extent. Other processes may touch it only while this
    /// process holds a claim on it that allows their kind of access.
    pub unsafe fn window(
        mapping: Arc<Mapping>,
        extent: Range<usize>,
        len_bytes: usize,
        category: Category,
        allocator: &Allocator,
    ) -> Result<Self> {
        let range = extent.start..extent.start.saturating_add(len_bytes);
        if range.start > range.end
            || range.end > extent.end
            || extent.end > mapping.len_bytes()
            || !range.start.is_multiple_of(ALIGNMENT)
        {
            return Err(MemoryError::OutOfRange { range, len: mapping.len_bytes() });
        }
        match allocator.device() {
            Device::Cpu => {}
            device @ (Device::Meta | Device::Sim | Device::Cuda) => {
                return Err(MemoryError::NotHost(device));
            }
        }
        // SAFETY: the check above makes sure that the start lies within the mapping.
        let base = unsafe { mapping.base().add(range.start) };
        mapping.open_window();
        let origin = Origin::Window { mapping, extent };
        allocator.0.account.reserved.add(range.len());
        Ok(Self::new(base, range.len(), category, allocator.clone(), origin))
    }

    pub(super) fn new(
        base: NonNull<u8>,
        len_bytes: usize,
        category: Category,
        allocator: Allocator,
        origin: Origin,
    ) -> Self {
        allocator.0.account.add(category, len_bytes, base.addr().get());
        let (device, uses) = (allocator.device(), Mutex::default());
        Self(Arc::new(CountedMemory { base, len_bytes, device, category, allocator, origin, uses }))
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.0.len_bytes
    }

    /// The device in whose memory the buffer lies.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Whether both are handles of the same buffer.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The graph pool in whose memory it lies.
    fn graph_pool(&self) -> Option<u32> {
        match self.0.origin {
            Origin::Pooled(block) => block.graph_pool,
            Origin::Window { .. } => None,
        }
    }

    /// The allocator that counts this buffer's bytes.
    pub fn allocator(&self) -> &Allocator {
        &self.0.allocator
    }

    /// Claims a byte range for the host until the returned value is dropped. `holder` names the user in errors. Errors if
    /// a conflicting claim is held, if work is queued there that the host has not waited for, or if the range lies outside
    /// the buffer.
    pub fn claim(
        &self,
        range: Range<usize>,
        access: Access,
        holder: &'static str,
    ) -> Result<Claim> {
        self.check_range(&range)?;
        let id = Some(lock(&self.0.uses).claim(&range, access, holder)?);
        Ok(Claim { buffer: self.clone(), id, range })
    }

    /// Notes that `op`, the work before `event`, uses a byte range, and keeps the memory in place until it is done. Errors
    /// if the host holds a conflicting claim, if other work uses the range and `op` does not come after it, or if the
    /// range lies outside the buffer.
    pub fn queue(
        &self,
        range: Range<usize>,
        access: Access,
        op: &'static str,
        event: &Event,
    ) -> Result<Claim> {
        self.check_range(&range)?;
        lock(&self.0.uses).queue(&range, access, op, event)?;
        event.note_use(self.graph_pool(), || {
            let (memory, range) = (self.0.clone(), range.clone());
            CapturedUse { memory, range, access, op }
        });
        // The memory of a device goes back to its stream, after the work.
        if self.0.device == Device::Cpu {
            event.keep(self.0.clone());
        }
        Ok(Claim { buffer: self.clone(), id: None, range })
    }

    fn check_range(&self, range: &Range<usize>) -> Result<()> {
        if range.start > range.end || range.end > self.0.len_bytes {
            Err(MemoryError::OutOfRange { range: range.clone(), len: self.0.len_bytes })
        } else {
            Ok(())
        }
    }
}

impl UsedMemory for CountedMemory {
    fn queue_use(
        self: Arc<Self>,
        range: Range<usize>,
        access: Access,
        op: &'static str,
        event: &Event,
    ) -> Result<()> {
        Buffer(self).queue(range, access, op, event).map(drop)
    }
}

/// The right to use a byte range: of the host, held until this value is dropped, or of queued work.
#[derive(Debug)]
pub struct Claim {
    buffer: Buffer,
    /// `None` for queued work, which leaves its position in its stream instead.
    id: Option<u64>,
    range: Range<usize>,
}

impl Claim {
    /// The address of the first claimed byte. The host cannot follow an accelerator's address, and [`Device::Meta`] has no
    /// memory at it: callers match on the device first.
    pub fn base(&self) -> NonNull<u8> {
        let base = self.buffer.0.base;
        // The range lies within the buffer, so its address is not null.
        NonNull::new(base.as_ptr().wrapping_add(self.range.start)).unwrap_or(base)
    }

    /// Length of the range in bytes.
    pub fn len_bytes(&self) -> usize {
        self.range.len()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            lock(&self.buffer.0.uses).give_back(id);
        }
    }
}

/// Shared access to a claimed range as a slice.
#[derive(Debug)]
pub struct ReadGuard<T> {
    claim: Claim,
    elements: PhantomData<T>,
}

/// Exclusive access to a claimed range as a slice.
#[derive(Debug)]
pub struct WriteGuard<T>(ReadGuard<T>);

impl<T: Element> ReadGuard<T> {
    /// `claim` must be for reading, and its start aligned for `T`, as `Tensor` guarantees.
    pub(crate) fn new(claim: Claim) -> Self {
        Self { claim, elements: PhantomData }
    }
}

impl<T: Element> WriteGuard<T> {
    /// `claim` must be for writing, and its start aligned for `T`, as `Tensor` guarantees.
    pub(crate) fn new(claim: Claim) -> Self {
        Self(ReadGuard::new(claim))
    }
}

impl<T: Element> Deref for ReadGuard<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let len = self.claim.len_bytes() / size_of::<T>();
        // SAFETY: the range lies in the buffer, is aligned and initialized (memory starts zeroed), any bits
        // are a valid `T`, and the claim excludes writers while the guard lives.
        unsafe { std::slice::from_raw_parts(self.claim.base().as_ptr().cast(), len) }
    }
}

impl<T: Element> Deref for WriteGuard<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Element> DerefMut for WriteGuard<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let claim = &self.0.claim;
        let len = claim.len_bytes() / size_of::<T>();
        // SAFETY: as for `ReadGuard`; this claim excludes all other users, and `&mut self` excludes a second
        // slice from the same guard.
        unsafe { std::slice::from_raw_parts_mut(claim.base().as_ptr().cast(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Tensor};

    #[test]
    fn conflicting_claims_are_refused_and_disjoint_ones_are_not() {
        let buffer = Allocator::new().allocate(128, Category::Gradients).unwrap();
        let bucket = buffer.claim(64..128, Access::Write, "all_reduce").unwrap();
        assert!(buffer.claim(0..64, Access::Write, "linear").is_ok());
        let error = buffer.claim(0..65, Access::Read, "sgd").unwrap_err();
        assert_eq!(
            error.to_string(),
            "bytes 0..65 are claimed for all_reduce, so they cannot be used for sgd"
        );
        drop(bucket);
        let first = buffer.claim(0..128, Access::Read, "sgd").unwrap();
        assert!(buffer.claim(0..128, Access::Read, "digest").is_ok());
        assert!(buffer.claim(5..6, Access::Write, "linear").is_err());
        drop(first);
        assert!(buffer.claim(100..129, Access::Read, "sgd").is_err());
    }

    #[test]
    fn a_window_keeps_its_mapping_and_its_books() {
        let allocator = Allocator::new();
        let mapping = Arc::new(Mapping::create(4096).unwrap());
        // SAFETY: this is the only window onto the mapping, which no other process knows.
        let window = unsafe {
            Buffer::window(mapping.clone(), 64..4096, 128, Category::Gradients, &allocator).unwrap()
        };
        assert_eq!(window.len_bytes(), 128);
        assert_eq!(allocator.usage(Category::Gradients).current_bytes, 128);
        assert!(mapping.has_windows());
        drop(window);
        assert!(!mapping.has_windows());
        assert_eq!(Arc::strong_count(&mapping), 1);
        assert_eq!(allocator.usage(Category::Gradients).current_bytes, 0);
    }

    #[test]
    fn the_memory_of_a_window_goes_back_with_it_and_its_neighbor_stays() {
        let allocator = Allocator::new();
        // The size of a large page, where the system uses such: a part of one need not go back.
        let whole = 2 << 20;
        let mapping = Arc::new(Mapping::create(2 * whole).unwrap());
        let blocks = || rustix::fs::fstat(mapping.file()).unwrap().st_blocks;
        // SAFETY: the only windows onto a mapping that no other process knows, and they lie apart.
        let [first, second] = [0, whole].map(|start| unsafe {
            let extent = start..start + whole;
            let category = Category::Gradients;
            Buffer::window(mapping.clone(), extent, whole - 100, category, &allocator).unwrap()
        });
        for window in [&first, &second] {
            let tensor = Tensor::new(window.clone(), 0, DType::U8, [window.len_bytes()]).unwrap();
            tensor.write::<u8>().unwrap().fill(7);
        }
        let all = blocks();
        drop(first);
        assert!((1..all).contains(&blocks()), "{all} blocks, then {}", blocks());
        let tensor = Tensor::new(second.clone(), 0, DType::U8, [second.len_bytes()]).unwrap();
        assert!(tensor.read::<u8>().unwrap().iter().all(|&byte| byte == 7));
        drop((tensor, second));
        assert_eq!(blocks(), 0);
    }
}
