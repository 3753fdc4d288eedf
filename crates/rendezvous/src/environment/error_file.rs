//! The file from which a launcher learns why a rank failed.
//!
//! torchrun, and our own launcher like it, name the file in TORCHELASTIC_ERROR_FILE. torchrun shows the failed rank with the
//! earliest time, in whole seconds, as the root cause. For a rank without a file, that
//! time is the moment when torchrun noticed.

use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The environment variable that names the file.
pub const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// The most bytes of the file: a message with its last lines. A rank's program may have written it.
const MAX_BYTES: u64 = 1 << 20;

/// How much later than now a consequence is dated, so that it is never taken for its cause: longer
/// than torchrun's rounding to seconds and the time between two of its checks.
const CONSEQUENCE_DELAY_SECS: u64 = 60;

/// Reports to the launcher why this rank failed. Does nothing under a launcher that names no file. Errors are ignored: the
/// rank is failing already.
pub fn write_error_file(message: &str) {
    write_for_launcher(message, &[], 0);
}

/// Like [`write_error_file`], for a rank that failed only because other ranks did: `culprits`, if it knows them.
pub fn write_consequence_file(message: &str, culprits: &[usize]) {
    write_for_launcher(message, culprits, CONSEQUENCE_DELAY_SECS);
}

/// The ranks that did not come to the writer of the file at `path`, or that it has seen end. Empty without a file.
pub fn read_culprits(path: &Path) -> Vec<usize> {
    let Ok(text) = paceline_files::read(path, MAX_BYTES) else { return Vec::new() };
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
    let ranks = value["message"]["extraInfo"]["culprits"].as_array();
    ranks.into_iter().flatten().filter_map(|rank| Some(rank.as_u64()? as usize)).collect()
}

fn write_for_launcher(message: &str, culprits: &[usize], delay_secs: u64) {
    let path = std::env::var_os(ERROR_FILE).filter(|path| !path.is_empty());
    if let Some(path) = path {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let _ = write(Path::new(&path), message, culprits, now + delay_secs);
    }
}

fn write(path: &Path, message: &str, culprits: &[usize], unix_secs: u64) -> std::io::Result<()> {
    let text = serde_json::json!({
        "message": {
            "message": message,
            "extraInfo": { "timestamp": unix_secs.to_string(), "culprits": culprits },
        },
    });
    // torchrun fails on an incomplete file, so the file gets its name only when it is complete.
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}", std::process::id()));
    let written = paceline_files::create(Path::new(&partial))
        .and_then(|mut file| file.write_all(text.to_string().as_bytes()))
        .and_then(|()| std::fs::rename(&partial, path));
    written.inspect_err(|_| drop(std::fs::remove_file(&partial)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchrun_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        write(&path, "rank 1: \"quoted\"\nand more", &[2, 0], 1_700_000_000).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["message"]["message"], "rank 1: \"quoted\"\nand more");
        assert_eq!(value["message"]["extraInfo"]["timestamp"], "1700000000");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(read_culprits(&path), [2, 0]);
        assert!(read_culprits(&folder.path().join("none")).is_empty());
    }
}
