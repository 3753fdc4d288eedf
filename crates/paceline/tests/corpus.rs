//! Replays the inputs in `tests/corpus`: hand-made ones, and inputs that the fuzzer found worth keeping
//! (`bench/fuzz.py`).

#[path = "../../../fuzz/replay.rs"]
mod replay;

#[path = "../../../fuzz/src/program.rs"]
mod program;

#[test]
fn kept_checkpoints_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "checkpoint", program::checkpoint);
}

#[test]
fn kept_configurations_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "configuration", program::configuration);
}
