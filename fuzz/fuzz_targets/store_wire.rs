//! Passes arbitrary bytes to the server and the clients of a store.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // A get of 17 bytes clones a value as long as the input, but only one at a time.
    paceline_fuzz::bounded(bytes, 256 << 10, 64, paceline_rendezvous::fuzzing::store_wire);
});
