//! How this workspace starts threads: with a name and a stated stack.
//!
//! Input: a name. Output: a builder of the standard library. This file does not know what threads do.

use std::thread::Builder;

/// The stack of every thread, in bytes: what the main thread of a process has by default. So code that runs on the main
/// thread runs on every other, also in a build without optimization, whose frames are many times as large. The default of
/// the standard library is a quarter of it. Only the pages that a thread has touched take memory.
pub const STACK_BYTES: usize = 8 << 20;

/// A builder of a thread with this name and a stack of [`STACK_BYTES`].
pub fn thread_builder(name: impl Into<String>) -> Builder {
    Builder::new().name(name.into()).stack_size(STACK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twice as much as the standard library's default.
    #[test]
    fn a_thread_has_room_for_large_frames() {
        let large = || std::hint::black_box([1u8; 4 << 20]).iter().map(|&x| usize::from(x)).sum();
        let sum: usize = thread_builder("large").spawn(large).unwrap().join().unwrap();
        assert_eq!(sum, 4 << 20);
    }
}
