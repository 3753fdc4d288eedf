//! Passes arbitrary bytes to the list of members and to a member.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // A list of short texts takes 24 bytes for each of them, and 1 on the wire.
    paceline_fuzz::bounded(bytes, 256 << 10, 128, paceline_rendezvous::fuzzing::membership);
});
