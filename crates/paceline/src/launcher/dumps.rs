//! The folder to which ranks write their last operations when a run fails.

use std::path::{Path, PathBuf};

use paceline_collectives::DUMP_FOLDER;
use paceline_rendezvous::Rendezvous;
use rustix::fs::{Mode, mkdir};

use crate::{Failure, Result};

/// The extension of dump files.
const EXTENSION: &str = "jsonl";

/// The folder for the dumps of a run.
#[derive(Debug)]
pub(super) struct Dumps {
    folder: PathBuf,
    /// Whether the folder was made for this run, and is removed unless it is needed.
    is_ours: bool,
}

impl Dumps {
    /// Chooses the folder: the one that the user named in the environment, or else `of_run`, or else a
    /// new temporary folder.
    pub(super) fn new(of_run: Option<&Path>) -> Result<Self> {
        let named = || std::env::var_os(DUMP_FOLDER).map(PathBuf::from);
        if let Some(folder) = named().or_else(|| of_run.map(Path::to_owned)) {
            // A relative path would mean something else to a rank with another working folder.
            let folder = std::path::absolute(&folder).unwrap_or(folder);
            return Ok(Self { folder, is_ours: false });
        }
        let folder = std::env::temp_dir().join(format!("paceline-{}", Rendezvous::fresh_secret()?));
        mkdir(&folder, Mode::RWXU).map_err(|e| {
            Failure::io(format!("cannot make {} for reports of failures", folder.display()), e)
        })?;
        Ok(Self { folder, is_ours: true })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder that is removed if the launcher itself is killed.
    pub(super) fn temporary(&self) -> Option<&Path> {
        self.is_ours.then_some(self.folder.as_path())
    }

    /// Whether a rank has written its operations.
    pub(super) fn has_any(&self) -> bool {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten();
        entries.filter_map(std::result::Result::ok).any(|entry| {
            let path = entry.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            name.contains("-rank") && path.extension().is_some_and(|end| end == EXTENSION)
        })
    }

    /// Removes the folder after a run that ended well.
    pub(super) fn discard(self) {
        if self.is_ours {
            // If this fails, an empty temporary folder is left, which does no harm.
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    /// Removes the folder if nothing was written to it.
    pub(super) fn keep_if_any(self) {
        if self.is_ours {
            // This fails if the folder has files. Then the folder stays, as intended.
            let _ = std::fs::remove_dir(&self.folder);
        }
    }
}
