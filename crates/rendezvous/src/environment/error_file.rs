//! The file by which torchrun learns why a rank failed.
//!
//! torchrun names the file in TORCHELASTIC_ERROR_FILE. Among the ranks that failed, torchrun shows the
//! rank with the earliest time, in whole seconds, as the root cause. For a rank without a file, that time
//! is the moment when torchrun noticed.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// How much later than now a consequence is dated, so that it is never taken for its cause. It is
/// longer than torchrun's rounding to seconds and the time between two of its checks.
const CONSEQUENCE_DELAY_SECS: u64 = 60;

/// Tells torchrun why this rank failed. Does nothing under other launchers. A file that cannot be
/// written is ignored: the rank is failing already.
pub fn write_error_file(message: &str) {
    write_for_torchrun(message, 0);
}

/// Like [`write_error_file`], for a rank that failed only because another rank did.
pub fn write_consequence_file(message: &str) {
    write_for_torchrun(message, CONSEQUENCE_DELAY_SECS);
}

fn write_for_torchrun(message: &str, delay_secs: u64) {
    let path = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty());
    if let Some(path) = path {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let _ = write(Path::new(&path), message, now + delay_secs);
    }
}

fn write(path: &Path, message: &str, unix_secs: u64) -> std::io::Result<()> {
    let text = serde_json::json!({
        "message": {
            "message": message,
            "extraInfo": { "timestamp": unix_secs.to_string() },
        },
    });
    // torchrun fails on an incomplete file, so the file gets its name only when it is complete.
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}", std::process::id()));
    std::fs::write(&partial, text.to_string())?;
    std::fs::rename(&partial, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchrun_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        write(&path, "rank 1: \"quoted\"\nand more", 1_700_000_000).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["message"]["message"], "rank 1: \"quoted\"\nand more");
        assert_eq!(value["message"]["extraInfo"]["timestamp"], "1700000000");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
