//! The memory of one emulated card: allocations at addresses that are never used again.
//!
//! Input: addresses and sizes. Output: bytes, or the fault that a wrong access is. Every byte remembers whether it was
//! written, so that a read of uninitialized memory is a fault. This module knows neither streams nor kernels.

use crate::fault::Fault;

/// Every device address has this bit, so that no pointer of the host is one.
const DEVICE: u64 = 1 << 56;
/// Addresses of the host are below this one on every machine that has a CUDA card.
const HOST_END: u64 = 1 << 47;
/// The bits below this one of an address are the offset within a card; the card's number is above.
const CARD_SHIFT: u32 = 48;
/// Allocations begin at multiples of this many bytes, and one such unit after each stays empty: an access that runs
/// past the end of an allocation never reaches the next one.
const UNIT_SHIFT: u32 = 20;
const UNIT: usize = 1 << UNIT_SHIFT;

/// The value of uninitialized bytes on the host: in every float type a NaN.
const POISON: u8 = 0xff;

#[derive(Debug)]
struct Allocation {
    address: u64,
    len: usize,
    /// Empty once the allocation is freed.
    bytes: Vec<u8>,
    /// One bit a byte: whether it was written.
    written: Vec<u64>,
    freed: bool,
}

/// The memory of one card.
#[derive(Debug)]
pub struct DeviceMemory {
    base: u64,
    capacity: usize,
    used: usize,
    allocations: Vec<Allocation>,
    /// For each unit of addresses the allocation that it belongs to.
    units: Vec<u32>,
}

impl DeviceMemory {
    /// Empty memory of `capacity` bytes for the card with this number.
    pub fn new(card: usize, capacity: usize) -> Self {
        let base = DEVICE | (card as u64) << CARD_SHIFT;
        Self { base, capacity, used: 0, allocations: Vec::new(), units: Vec::new() }
    }

    /// The card's size in bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes that are allocated now.
    pub fn used(&self) -> usize {
        self.used
    }

    /// How many allocations are not freed.
    pub fn live(&self) -> usize {
        self.allocations.iter().filter(|a| !a.freed).count()
    }

    /// A new allocation, or `None` if it does not fit.
    pub fn allocate(&mut self, len: usize) -> Option<u64> {
        if len > self.capacity - self.used {
            return None;
        }
        let units = len.div_ceil(UNIT) + 1;
        if (self.units.len() + units) << UNIT_SHIFT > 1 << CARD_SHIFT {
            return None;
        }
        let address = self.base + ((self.units.len() as u64) << UNIT_SHIFT);
        self.units.extend(std::iter::repeat_n(self.allocations.len() as u32, units));
        self.used += len;
        let (bytes, written) = (vec![0; len], vec![0; len.div_ceil(64)]);
        self.allocations.push(Allocation { address, len, bytes, written, freed: false });
        Some(address)
    }

    /// Frees the allocation that begins at this address. `false` if none does.
    pub fn free(&mut self, address: u64) -> bool {
        let Some(allocation) = self.index(address).map(|k| &mut self.allocations[k]) else {
            return false;
        };
        if allocation.freed || allocation.address != address {
            return false;
        }
        allocation.freed = true;
        allocation.bytes = Vec::new();
        allocation.written = Vec::new();
        self.used -= allocation.len;
        true
    }

    /// Checks that a range lies within one live allocation.
    pub fn check(&self, address: u64, len: usize) -> Result<(), Fault> {
        self.locate(address, len).map(|_| ())
    }

    /// Reads `N <= 16` bytes that a kernel uses. They must be initialized.
    #[inline]
    pub fn load(&self, address: u64, len: usize) -> Result<&[u8], Fault> {
        let (index, offset) = self.locate(address, len)?;
        let allocation = &self.allocations[index];
        if !allocation.is_written(offset, len) {
            return Err(uninitialized(allocation, address, len));
        }
        Ok(&allocation.bytes[offset..offset + len])
    }

    /// Writes a few bytes, as a kernel does.
    #[inline]
    pub fn store(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let (index, offset) = self.locate(address, bytes.len())?;
        let allocation = &mut self.allocations[index];
        allocation.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        allocation.mark(offset, bytes.len(), true);
        Ok(())
    }

    /// Copies a range to the host. Bytes that nobody wrote arrive as 0xff.
    pub fn read_out(&self, address: u64, out: &mut [u8]) -> Result<(), Fault> {
        let (index, offset) = self.locate(address, out.len())?;
        let allocation = &self.allocations[index];
        out.copy_from_slice(&allocation.bytes[offset..offset + out.len()]);
        if !allocation.is_written(offset, out.len()) {
            for (k, byte) in out.iter_mut().enumerate() {
                if !allocation.is_written(offset + k, 1) {
                    *byte = POISON;
                }
            }
        }
        Ok(())
    }

    /// Copies within the card. Uninitialized bytes stay uninitialized.
    pub fn copy(&mut self, to: u64, from: u64, len: usize) -> Result<(), Fault> {
        let (source, source_at) = self.locate(from, len)?;
        let (target, target_at) = self.locate(to, len)?;
        let bytes = self.allocations[source].bytes[source_at..source_at + len].to_vec();
        let written: Vec<bool> =
            (0..len).map(|k| self.allocations[source].is_written(source_at + k, 1)).collect();
        let target = &mut self.allocations[target];
        target.bytes[target_at..target_at + len].copy_from_slice(&bytes);
        if written.iter().all(|w| *w) {
            target.mark(target_at, len, true);
        } else {
            for (k, written) in written.into_iter().enumerate() {
                target.mark(target_at + k, 1, written);
            }
        }
        Ok(())
    }

    /// Fills a range with a repeated pattern.
    pub fn fill(&mut self, address: u64, pattern: &[u8], count: usize) -> Result<(), Fault> {
        let len = pattern.len() * count;
        let (index, offset) = self.locate(address, len)?;
        let allocation = &mut self.allocations[index];
        for chunk in allocation.bytes[offset..offset + len].chunks_exact_mut(pattern.len()) {
            chunk.copy_from_slice(pattern);
        }
        allocation.mark(offset, len, true);
        Ok(())
    }

    /// Makes a range uninitialized again, as an allocator that hands out old memory wants it for its tests.
    pub fn forget(&mut self, address: u64, len: usize) -> Result<(), Fault> {
        let (index, offset) = self.locate(address, len)?;
        self.allocations[index].mark(offset, len, false);
        Ok(())
    }

    /// The number of the allocation whose units hold this address.
    #[inline]
    fn index(&self, address: u64) -> Option<usize> {
        let unit = (address ^ self.base) >> UNIT_SHIFT;
        self.units.get(usize::try_from(unit).ok()?).map(|k| *k as usize)
    }

    #[inline]
    fn locate(&self, address: u64, len: usize) -> Result<(usize, usize), Fault> {
        if let Some(index) = self.index(address) {
            let allocation = &self.allocations[index];
            let offset = (address - allocation.address) as usize;
            if !allocation.freed && offset <= allocation.len && len <= allocation.len - offset {
                return Ok((index, offset));
            }
        }
        Err(self.explain(address, len))
    }

    #[cold]
    fn explain(&self, address: u64, len: usize) -> Fault {
        let access = format!("access of {len} bytes at {address:#x}");
        if let Some(allocation) = self.index(address).map(|k| &self.allocations[k]) {
            let (start, size) = (allocation.address, allocation.len);
            let offset = address - start;
            return Fault::illegal(if allocation.freed {
                format!("{access}: that memory was freed ({size} bytes at {start:#x})")
            } else {
                format!("{access}: offset {offset} of an allocation of {size} bytes at {start:#x}")
            });
        }
        Fault::illegal(match address {
            0..0x1000 => format!("{access}: a null pointer"),
            0x1000..HOST_END => format!("{access}: an address of the host"),
            _ if address >> 56 == DEVICE >> 56
                && address >> CARD_SHIFT != self.base >> CARD_SHIFT =>
            {
                format!("{access}: memory of another card")
            }
            _ => format!("{access}: never allocated"),
        })
    }
}

#[cold]
fn uninitialized(allocation: &Allocation, address: u64, len: usize) -> Fault {
    let offset = address - allocation.address;
    Fault::failed(format!(
        "reads {len} bytes at {address:#x} that were never written: offset {offset} of an allocation of {} bytes",
        allocation.len
    ))
}

impl Allocation {
    #[inline]
    fn is_written(&self, offset: usize, len: usize) -> bool {
        let bit = offset % 64;
        if bit + len <= 64 && len < 64 {
            let mask = ((1u64 << len) - 1) << bit;
            return len == 0 || self.written[offset / 64] & mask == mask;
        }
        (offset..offset + len).all(|k| self.written[k / 64] >> (k % 64) & 1 == 1)
    }

    #[inline]
    fn mark(&mut self, offset: usize, len: usize, written: bool) {
        let mut at = offset;
        let end = offset + len;
        while at < end {
            let bits = (64 - at % 64).min(end - at);
            let mask = if bits == 64 { u64::MAX } else { ((1u64 << bits) - 1) << (at % 64) };
            let word = &mut self.written[at / 64];
            *word = if written { *word | mask } else { *word & !mask };
            at += bits;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_checked() {
        let mut memory = DeviceMemory::new(0, 1 << 20);
        let a = memory.allocate(100).unwrap();
        let b = memory.allocate(100).unwrap();
        assert!(memory.load(a, 4).unwrap_err().message.contains("never written"));
        memory.store(a + 96, &[1, 2, 3, 4]).unwrap();
        assert_eq!(memory.load(a + 96, 4).unwrap(), [1, 2, 3, 4]);
        assert!(memory.store(a + 97, &[0; 4]).unwrap_err().message.contains("offset 97"));
        memory.copy(b, a + 92, 8).unwrap();
        let mut out = [0; 8];
        memory.read_out(b, &mut out).unwrap();
        assert_eq!(out, [0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4]);
        assert!(memory.load(b, 8).is_err() && memory.load(b + 4, 4).is_ok());
        assert!(memory.free(a) && !memory.free(a) && !memory.free(b + 1));
        assert!(memory.load(a + 96, 4).unwrap_err().message.contains("freed"));
        assert!(memory.load(&raw const out as u64, 4).unwrap_err().message.contains("host"));
        assert_eq!((memory.used(), memory.live()), (100, 1));
        assert!(memory.allocate(1 << 20).is_none());
        memory.fill(b, &[7, 0, 0, 0], 25).unwrap();
        memory.forget(b + 8, 4).unwrap();
        assert!(memory.load(b + 4, 4).is_ok() && memory.load(b + 8, 4).is_err());
    }
}
