//! Passes arbitrary bytes to the reader of `config.json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // Settings, and the names of the parameters of a few layers.
    paceline_fuzz::bounded(bytes, 4 << 20, 1 << 10, paceline_model::fuzzing::config_json);
});
