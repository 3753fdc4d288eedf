//! Whether what a command will write can be written: tried before anything starts.

use std::path::Path;

use crate::{Failure, Result};

/// Whether the file that `flag` names can be made. Leaves nothing behind.
pub fn check_file(flag: &str, file: &Path) -> Result<()> {
    let usage = |problem: &str| Err(Failure::Usage(format!("{flag} {}{problem}", file.display())));
    if file.is_dir() {
        return usage(" is a folder; pass a file");
    }
    let folder = match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        return usage(": its folder does not exist");
    }
    check_folder(flag, folder, "pass a file that you can write to")
}

/// Whether files can be made in `folder`, or in the nearest folder above it that exists. Leaves
/// nothing behind.
pub fn check_folder(what: &str, folder: &Path, fix: &str) -> Result<()> {
    let absolute = std::path::absolute(folder)
        .map_err(|e| Failure::Usage(format!("{what} {}: {e}", folder.display())))?;
    let existing = absolute.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let probe = existing.join(format!(".paceline-probe-{}", std::process::id()));
    let written = if existing.is_dir() {
        std::fs::write(&probe, b"").and_then(|()| std::fs::remove_file(&probe))
    } else {
        Err(std::io::ErrorKind::NotADirectory.into())
    };
    written.map_err(|e| {
        let (folder, existing) = (folder.display(), existing.display());
        Failure::Usage(format!("{what} {folder}: cannot write to {existing} ({e}); {fix}"))
    })
}
