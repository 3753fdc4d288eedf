//! Pinned memory of the host: which ranges there are, and copies that use them late.
//!
//! A copy from or to pinned memory touches it when the copy runs. By then the memory may have been freed, which is a
//! fault that a real card would not always show.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;

use crate::fault::Fault;

/// Like a real driver's, the allocations begin at pages.
const PAGE: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct Pinned {
    len: usize,
    id: u64,
    /// The address of the allocation, if the memory is the card's own. Otherwise the program registered memory of its own.
    owned: Option<usize>,
}

/// A range of host memory that a copy uses.
#[derive(Clone, Copy, Debug)]
pub struct HostRange {
    address: usize,
    /// Bytes.
    pub len: usize,
    /// The pinned allocation that it lies in. `None` if the caller waits for the copy.
    pin: Option<u64>,
}

impl HostRange {
    /// Whether the card can copy it by itself.
    pub fn is_pinned(&self) -> bool {
        self.pin.is_some()
    }
}

/// All pinned memory of the process.
#[derive(Debug, Default)]
pub struct PinnedMemory {
    ranges: BTreeMap<usize, Pinned>,
    next_id: u64,
}

/// Room for `len` bytes from a page on. Its own alignment is 1, because memory of a greater alignment is not made zero by the
/// system, page by page when it is touched, but at once.
fn layout(len: usize) -> Option<Layout> {
    Layout::from_size_align(len.checked_add(PAGE)?, 1).ok()
}

impl PinnedMemory {
    /// How many ranges there are.
    pub fn live(&self) -> usize {
        self.ranges.len()
    }

    fn insert(&mut self, address: usize, len: usize, owned: Option<usize>) {
        self.next_id += 1;
        self.ranges.insert(address, Pinned { len, id: self.next_id, owned });
    }

    /// New memory, or `None` if the host has none.
    pub fn allocate(&mut self, len: usize) -> Option<usize> {
        // SAFETY: the layout's size is not zero.
        let allocation = unsafe { alloc_zeroed(layout(len)?) } as usize;
        if allocation == 0 {
            return None;
        }
        let address = allocation.next_multiple_of(PAGE);
        self.insert(address, len, Some(allocation));
        Some(address)
    }

    /// Frees memory of [`allocate`](Self::allocate). `false` if no such memory is at this address.
    pub fn free(&mut self, address: usize) -> bool {
        let Some(Pinned { len, owned: Some(allocation), .. }) = self.ranges.get(&address).copied()
        else {
            return false;
        };
        let layout = layout(len).expect("it was allocated");
        // SAFETY: `allocate` made this memory with this layout, and the entry goes away with it. Copies that are
        // still queued look their range up before they touch it.
        unsafe { dealloc(allocation as *mut u8, layout) };
        self.ranges.remove(&address);
        true
    }

    /// Takes the program's own memory as pinned. `false` if a part of it is already.
    pub fn register(&mut self, address: usize, len: usize) -> bool {
        let before = self.ranges.range(..address + len).next_back();
        if before.is_some_and(|(start, range)| start + range.len > address) {
            return false;
        }
        self.insert(address, len, None);
        true
    }

    /// Ends [`register`](Self::register).
    pub fn unregister(&mut self, address: usize) -> bool {
        let found = self.ranges.get(&address).is_some_and(|range| range.owned.is_none());
        if found {
            self.ranges.remove(&address);
        }
        found
    }

    /// The range, if it lies in pinned memory.
    pub fn find(&self, address: usize, len: usize) -> Option<HostRange> {
        let (start, range) = self.ranges.range(..=address).next_back()?;
        let inside = address.checked_add(len)? <= start + range.len;
        inside.then_some(HostRange { address, len, pin: Some(range.id) })
    }

    /// Ordinary memory, for a copy that the caller waits for.
    pub fn unpinned(address: usize, len: usize) -> HostRange {
        HostRange { address, len, pin: None }
    }

    fn check(&self, range: &HostRange) -> Result<(), Fault> {
        let found = self.find(range.address, range.len).and_then(|found| found.pin);
        if range.pin.is_some() && found != range.pin {
            return Err(Fault::illegal(format!(
                "{} bytes of pinned memory at {:#x} were freed before their copy ran",
                range.len, range.address
            )));
        }
        Ok(())
    }

    /// Reads a range, for a copy to the card.
    pub fn read(&self, range: &HostRange) -> Result<Vec<u8>, Fault> {
        self.check(range)?;
        let mut bytes = vec![0; range.len];
        // SAFETY: the range is pinned memory that still exists, or memory of a caller that waits for this copy. The
        // interface demands that the program does not write to it meanwhile.
        unsafe {
            std::ptr::copy_nonoverlapping(range.address as *const u8, bytes.as_mut_ptr(), range.len)
        };
        Ok(bytes)
    }

    /// Writes a range, for a copy to the host.
    pub fn write(&self, range: &HostRange, bytes: &[u8]) -> Result<(), Fault> {
        self.check(range)?;
        // SAFETY: as in `read`; the program uses the range only after it has waited for the copy.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), range.address as *mut u8, bytes.len())
        };
        Ok(())
    }
}
