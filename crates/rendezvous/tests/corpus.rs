//! Replays the inputs in `tests/corpus`: hand-made ones, and inputs that the fuzzer found worth keeping
//! (`bench/fuzz.py`).

#[path = "../../../fuzz/replay.rs"]
mod replay;

use paceline_rendezvous::fuzzing;

#[test]
fn kept_messages_of_stores_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "store_wire", fuzzing::store_wire);
}

#[test]
fn kept_hellos_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "hello", fuzzing::hello);
}

#[test]
fn kept_messages_of_members_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "membership", fuzzing::membership);
}
