//! Passes arbitrary bytes to the readers of data sets.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // gzip packs up to 1,032 bytes into one, and what is read is copied a few times to compare it.
    paceline_fuzz::bounded(bytes, 4 << 20, 8 << 10, paceline_data::fuzzing::idx);
});
