//! Replays the inputs in `tests/corpus/traces`: hand-made ones, pieces of traces that PyTorch 2.15 wrote, and inputs
//! that the fuzzer found worth keeping (`bench/fuzz.py`).

use crate::hostile;

use std::fs;
use std::path::Path;

#[test]
fn kept_inputs_are_read_alike_in_every_way() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/traces");
    let mut count = 0;
    for entry in fs::read_dir(folder).expect("the corpus") {
        hostile::check(&fs::read(entry.expect("an entry").path()).expect("a file"));
        count += 1;
    }
    assert!(count >= 10, "{count} inputs");
}
