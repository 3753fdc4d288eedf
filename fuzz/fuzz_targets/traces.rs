//! Passes arbitrary bytes to the reader of traces.
#![no_main]

#[path = "../../crates/analysis/tests/all/hostile/mod.rs"]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::check(bytes));
