//! Passes arbitrary bytes to the reader of configuration files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The definitions of all flags, a model of up to 10,000 layers without values, and a few small images.
    paceline_fuzz::bounded(bytes, 64 << 20, 1 << 10, paceline_fuzz::program::configuration);
});
