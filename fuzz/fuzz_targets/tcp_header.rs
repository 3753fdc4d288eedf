//! Passes arbitrary bytes to the comparison of calls before an operation.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // This rank's own memory is at most 64 KiB.
    paceline_fuzz::bounded(bytes, 128 << 10, 16, paceline_collectives::fuzzing::tcp_header);
});
