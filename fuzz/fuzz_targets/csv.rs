//! Passes arbitrary bytes to the readers of rows of texts.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // A row, and what a number or a character of JSON becomes.
    paceline_fuzz::bounded(bytes, 4 << 20, 1 << 10, paceline_data::fuzzing::csv);
});
