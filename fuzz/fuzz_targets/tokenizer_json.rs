//! Passes arbitrary bytes to the reader of `tokenizer.json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The library, and what it makes of a text of 300 KB.
    paceline_fuzz::bounded(bytes, 256 << 20, 1 << 12, paceline_data::fuzzing::tokenizer);
});
