//! The folder to which ranks write their last operations, and why they failed, when a run fails.

use std::path::{Path, PathBuf};

use paceline_collectives::DUMP_FOLDER;
use paceline_failure::Result;
use paceline_files::Printable;
use paceline_host::streams;
use paceline_rendezvous::Rendezvous;
use rustix::fs::{Mode, mkdir};

/// The extension of dumps.
const EXTENSION: &str = "jsonl";
/// The ending of files that say why a rank failed.
const ERROR_SUFFIX: &str = ".error.json";

/// The most failed attempts of a launch whose dumps are kept.
pub(super) const MAX_KEPT: usize = 4;

fn is_dump(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    name.contains("-rank") && path.extension().is_some_and(|end| end == EXTENSION)
}

/// Where dumps of a run go, and the dumps there once an attempt has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dumps {
    /// `None` if no folder could be made.
    folder: Option<PathBuf>,
    /// Whether the folder was made for this run, and is removed unless it is needed.
    is_ours: bool,
}

impl Dumps {
    /// The folder of the user, or of the run, or a new one if possible.
    ///
    /// # Errors
    ///
    /// If the kernel gives no random numbers.
    pub(super) fn new(of_run: Option<&Path>) -> Result<Self> {
        let named = || std::env::var_os(DUMP_FOLDER).map(PathBuf::from);
        if let Some(folder) = named().or_else(|| of_run.map(Path::to_owned)) {
            // Ranks may run in a different folder.
            let folder = std::path::absolute(&folder).unwrap_or(folder);
            return Ok(Self { folder: Some(folder), is_ours: false });
        }
        let folder = std::env::temp_dir().join(format!("paceline-{}", Rendezvous::fresh_secret()?));
        match mkdir(&folder, Mode::RWXU) {
            Ok(()) => Ok(Self { folder: Some(folder), is_ours: true }),
            Err(error) => {
                streams::stderr().line(&format!(
                    "paceline: cannot make {} ({error}): if ranks fail, their last operations are lost; set \
                     TMPDIR, or {DUMP_FOLDER}, to a folder that you can write to",
                    folder.printable()
                ));
                Ok(Self { folder: None, is_ours: false })
            }
        }
    }

    pub(super) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The folder that is removed if the launcher itself is killed.
    pub(super) fn temporary(&self) -> Option<&Path> {
        self.folder().filter(|_| self.is_ours)
    }

    /// Whether a rank has written its operations.
    pub(super) fn has_any(&self) -> bool {
        self.files().any(|path| is_dump(&path))
    }

    /// Returns the dumps if the run has failed. Removes the ranks' reports about their failure.
    pub(super) fn end(self, has_failed: bool) -> Option<Self> {
        self.remove_files(|path| path.to_string_lossy().ends_with(ERROR_SUFFIX));
        if has_failed && self.has_any() {
            return Some(self);
        }
        if let Some(folder) = self.temporary().filter(|_| !has_failed) {
            // If this fails, a temporary folder is left.
            let _ = std::fs::remove_dir_all(folder);
        }
        self.remove_folder();
        None
    }

    /// Removes the dumps: those of later attempts are there.
    pub(super) fn remove(&self) {
        self.remove_files(|path| is_dump(path));
        self.remove_folder();
    }

    /// The folder, in words.
    pub(super) fn place(&self) -> String {
        self.folder().map_or_else(String::new, |folder| folder.printable().to_string())
    }

    /// A file that cannot be removed does no harm.
    fn remove_files(&self, is_it: impl Fn(&PathBuf) -> bool) {
        for path in self.files().filter(is_it) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Removes the folder if it was made for this run and is empty.
    fn remove_folder(&self) {
        let _ = self.temporary().map(std::fs::remove_dir);
    }

    fn files(&self) -> impl Iterator<Item = PathBuf> {
        let entries = self.folder().and_then(|folder| std::fs::read_dir(folder).ok());
        entries.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
    }
}
