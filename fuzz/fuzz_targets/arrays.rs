//! Passes arbitrary bytes to the readers of arrays, tables of numbers and images.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // An image of the largest size that is decoded, and what a byte of a table becomes.
    paceline_fuzz::bounded(bytes, 1 << 30, 1 << 10, paceline_data::fuzzing::arrays);
});
