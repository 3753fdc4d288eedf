//! Passes arbitrary bytes to the reader of Parquet files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // A page of 64 MiB and the entries of its dictionary, and the metadata.
    paceline_fuzz::bounded(bytes, 768 << 20, 1 << 12, paceline_data::fuzzing::parquet);
});
