//! The file by which torchrun learns why a rank failed.
//!
//! torchrun names one in TORCHELASTIC_ERROR_FILE. Of the ranks that failed it shows the one with the
//! earliest time as the root cause, in whole seconds; a rank without a file counts as failed when
//! torchrun noticed.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// By how much the time of a consequence is put off, so that it is never taken for its cause: more
/// than torchrun's seconds round away and its looking round takes.
const CONSEQUENCE_DELAY_SECS: u64 = 60;

/// Tells torchrun why this rank failed. Does nothing under other launchers; a file that cannot be
/// written is no second failure.
pub fn write_error_file(message: &str) {
    write_for_torchrun(message, 0);
}

/// As [`write_error_file`], for a rank that failed only because another one did.
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
    // torchrun fails on a half file, so it is only there when complete.
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
