//! Replays the inputs in `tests/corpus`: hand-made ones, and inputs that the fuzzer found worth keeping
//! (`bench/fuzz.py`).

#[path = "../../../../fuzz/replay.rs"]
mod replay;

#[test]
fn kept_files_of_data_sets_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "idx", paceline_data::fuzzing::idx);
}

#[test]
fn kept_arrays_tables_and_images_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "arrays", paceline_data::fuzzing::arrays);
}

#[test]
fn kept_rows_of_texts_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "csv", paceline_data::fuzzing::csv);
}

#[test]
fn kept_parquet_files_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "parquet", paceline_data::fuzzing::parquet);
}

#[test]
fn kept_tokenizers_are_read_or_refused() {
    replay::replay(env!("CARGO_MANIFEST_DIR"), "tokenizer_json", paceline_data::fuzzing::tokenizer);
}
