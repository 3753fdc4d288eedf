//! Replays the inputs in `tests/corpus`: hand-made ones, and inputs that the fuzzer found worth keeping
//! (`bench/fuzz.py`).

#[path = "../../../../fuzz/replay.rs"]
mod replay;

#[test]
fn kept_headers_are_agreed_on_or_refused() {
    let check = paceline_collectives::fuzzing::tcp_header;
    replay::replay(env!("CARGO_MANIFEST_DIR"), "tcp_header", check);
}
