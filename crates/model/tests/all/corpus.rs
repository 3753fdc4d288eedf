//! Replays the inputs in `tests/corpus`: hand-made ones, and inputs that the fuzzer found worth keeping
//! (`bench/fuzz.py`).

#[path = "../../../../fuzz/replay.rs"]
mod replay;

#[test]
fn kept_weight_files_are_read_or_refused() {
    let check = paceline_model::fuzzing::safetensors;
    replay::replay(env!("CARGO_MANIFEST_DIR"), "safetensors", check);
}

#[test]
fn kept_settings_of_models_are_read_or_refused() {
    let check = paceline_model::fuzzing::config_json;
    replay::replay(env!("CARGO_MANIFEST_DIR"), "config_json", check);
}
