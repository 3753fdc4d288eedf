//! Replays the inputs in `tests/corpus`: hand-made ones, and inputs that the fuzzer found worth keeping
//! (`bench/fuzz.py`).

#[path = "../../../fuzz/replay.rs"]
mod replay;

#[test]
fn kept_files_of_data_sets_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "idx", paceline_data::fuzzing::idx);
}
