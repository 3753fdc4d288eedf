//! Passes arbitrary bytes to both sides of a hello.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // A hello has a fixed length, so no input needs more memory than another.
    paceline_fuzz::bounded(bytes, 64 << 10, 0, paceline_rendezvous::fuzzing::hello);
});
