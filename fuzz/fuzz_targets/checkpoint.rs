//! Passes arbitrary bytes to the reader of checkpoints.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // A header is JSON, in which each byte may begin a text or a number of its own.
    paceline_fuzz::bounded(bytes, 256 << 10, 256, paceline_fuzz::program::checkpoint);
});
