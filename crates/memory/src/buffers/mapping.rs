//! Anonymous memory that several processes map.
//!
//! Input: a size, or a file descriptor from another process. Output: the address of shared memory. This
//! module does not know the contents of the memory.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::{MemoryError, Result};

/// A shared mapping of an anonymous memory file.
///
/// The file has no name, and exists as long as a descriptor or a mapping of it, so nothing remains, however
/// a process ends. Its size is sealed, because shrinking it would make other processes fault.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len_bytes: usize,
    file: OwnedFd,
    /// The buffers of this process that lie in it.
    windows: AtomicUsize,
}

// SAFETY: the mapping is plain memory that is valid until `drop`, from any thread. This type gives out only
// the address, and access through the address is the caller's responsibility.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`; `&Mapping` offers no access to the contents.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Creates a new zeroed mapping of `len_bytes` bytes, rounded up to whole pages by the kernel.
    pub fn create(len_bytes: usize) -> Result<Self> {
        let wrap = |e: Errno| MemoryError::Mapping { bytes: len_bytes, source: e.into() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("paceline", flags).map_err(wrap)?;
        ftruncate(&file, len_bytes as u64).map_err(wrap)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(wrap)?;
        Self::map(file, len_bytes).map_err(wrap)
    }

    /// Maps a file that another process made with [`Mapping::create`] and passed on.
    ///
    /// Errors if the file is smaller than `len_bytes` or not sealed against shrinking.
    pub fn from_file(file: OwnedFd, len_bytes: usize) -> Result<Self> {
        let wrap = |e: Errno| MemoryError::Mapping { bytes: len_bytes, source: e.into() };
        let sealed = fcntl_get_seals(&file).map_err(wrap)?.contains(SealFlags::SHRINK);
        let size = fstat(&file).map_err(wrap)?.st_size as usize;
        if !sealed || size < len_bytes {
            return Err(wrap(Errno::INVAL));
        }
        Self::map(file, len_bytes).map_err(wrap)
    }

    fn map(file: OwnedFd, len_bytes: usize) -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len_bytes, protection, MapFlags::SHARED, &file, 0)?
        };
        // Large pages save page-table walks on large gradients. A kernel without large pages may refuse.
        // SAFETY: the range is the new mapping.
        let _ = unsafe { madvise(base, len_bytes, Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, len_bytes, file, windows: AtomicUsize::new(0) })
    }

    /// The first byte. Valid for [`Mapping::len_bytes`] bytes as long as `self` lives.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Whether a buffer of this process lies in the mapping ([`crate::Buffer::window`]).
    pub fn has_windows(&self) -> bool {
        self.windows.load(Ordering::Acquire) > 0
    }

    pub(crate) fn open_window(&self) {
        self.windows.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn close_window(&self) {
        self.windows.fetch_sub(1, Ordering::Release);
    }

    /// Maps a range of the file at `at` too, in place of the pages that are mapped there. The range and the address are
    /// whole pages.
    ///
    /// # Safety
    ///
    /// The range lies within the mapping. Nobody needs the contents of the pages at `at`, which are mapped and belong to the
    /// caller.
    pub unsafe fn show_at(&self, range: Range<usize>, at: *mut u8) -> Result<()> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        let (len, start) = (range.len(), range.start as u64);
        // SAFETY: as required of the caller.
        let shown = unsafe { mmap(at.cast(), len, protection, flags, &self.file, start) };
        shown.map(drop).map_err(|e| MemoryError::Mapping { bytes: len, source: e.into() })
    }

    /// Leaves the mapping out of core dumps, which would take memory for every page that nothing has been written to.
    pub fn leave_out_of_dumps(&self) {
        // SAFETY: the range is the mapping, and its contents stay. A kernel that refuses dumps more.
        let _ =
            unsafe { madvise(self.base.as_ptr().cast(), self.len_bytes, Advice::LinuxDontDump) };
    }

    /// Gives the memory of a range back to the system, in every process that maps the file. The range stays
    /// mapped, and reads as zeros.
    ///
    /// # Safety
    ///
    /// No process refers to the range or needs its contents.
    pub unsafe fn give_back(&self, range: Range<usize>) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, len) = (range.start as u64, range.len() as u64);
        // The call fails for an empty range, which has nothing to give back. If a file did not support it,
        // its memory would go back with the mapping.
        let _ = fallocate(&self.file, flags, start, len);
    }

    /// The memory file, to be passed to another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `mmap` returned `base` for `len_bytes`, and nothing borrows from `self`.
        // A failure would leak the mapping, which is harmless.
        let _ = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_file_show_the_same_bytes() {
        let ours = Mapping::create(100).unwrap();
        let theirs = Mapping::from_file(ours.file().try_clone_to_owned().unwrap(), 100).unwrap();
        assert_ne!(ours.base(), theirs.base());
        // SAFETY: both mappings are alive and 100 bytes long; nothing else refers to them.
        unsafe {
            ours.base().add(99).write(7);
            assert_eq!(theirs.base().add(99).read(), 7);
        }
    }

    #[test]
    fn a_file_that_is_too_small_is_refused() {
        let ours = Mapping::create(100).unwrap();
        let file = ours.file().try_clone_to_owned().unwrap();
        assert!(Mapping::from_file(file, 1 << 20).is_err());
    }
}
