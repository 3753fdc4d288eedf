//! What every target of the fuzzer shares: the memory that reading an input may take.
//!
//! A length in a broken message must be refused before memory is allocated for it. So each input is read under a
//! limit that depends on the input's length, and an allocation beyond the limit ends the fuzzer like a panic.

use std::alloc::System;
use std::panic;
use std::sync::Once;

use cap::Cap;

#[cfg(feature = "paceline")]
pub mod program;

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Calls `check` with the bytes. All memory that it holds at one moment may be at most `base_bytes` and `factor`
/// bytes for each byte of the input.
pub fn bounded(
    bytes: &[u8],
    base_bytes: usize,
    factor: usize,
    check: fn(&[u8]) -> Result<(), String>,
) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let next = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            // Printing the stack takes memory.
            let _ = MEMORY.set_limit(usize::MAX);
            next(info);
        }));
    });
    let limit = MEMORY.allocated() + base_bytes + factor * bytes.len();
    MEMORY.set_limit(limit).expect("the limit lies above what is allocated");
    // Whether the input is accepted only matters to the tests of the kept inputs.
    let _ = check(bytes);
    MEMORY.set_limit(usize::MAX).expect("no limit");
}
