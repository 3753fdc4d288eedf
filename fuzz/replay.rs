//! Replays the kept inputs of one target of the fuzzer. The tests `corpus` of the crates include this file.
//!
//! Input: the folder of a crate, the name of a target and its entry function. Output: a failed test if an input that
//! is named `valid-...` is refused, or one that is named `refused-...` is accepted, or any of them panics. This file
//! does not know what the bytes mean.

use std::fs;
use std::path::{Path, PathBuf};

/// Larger inputs are not worth their place in the repository.
const MAX_BYTES: u64 = 4096;

/// Passes every file of `tests/corpus/<target>` in the folder of the crate to `check`.
pub fn replay(crate_folder: &str, target: &str, check: fn(&[u8]) -> Result<(), String>) {
    let folder = Path::new(crate_folder).join("tests/corpus").join(target);
    let entries = fs::read_dir(&folder).expect("the folder of the kept inputs");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let (mut num_valid, mut num_refused) = (0, 0);
    for path in paths {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        // Shown only if the test fails: the last name is that of the input that panicked.
        println!("{target}: {name}");
        let bytes = fs::read(&path).expect("a file");
        assert!(bytes.len() as u64 <= MAX_BYTES, "{name} has {} bytes", bytes.len());
        let outcome = check(&bytes);
        if name.starts_with("valid-") {
            assert_eq!(outcome, Ok(()), "{name} must be accepted");
            num_valid += 1;
        } else if name.starts_with("refused-") {
            let message = outcome.expect_err(&name);
            assert!(message.contains(' '), "{name}: a message is a sentence: {message}");
            num_refused += 1;
        }
    }
    assert!(num_valid > 0 && num_refused > 0, "{num_valid} valid inputs, {num_refused} refused");
}
