//! The note of a run that ended with a number that is not finite, for the run after it.

use std::io;
use std::path::Path;

use paceline_files::Printable;
use paceline_host::disk::Disk;
use serde::{Deserialize, Serialize};

/// The file that says at which step a run ended with a number that is not finite.
const NOT_FINITE: &str = "not-finite.json";
/// The most bytes of that file. It has three short values.
const MAX_NOTE_BYTES: u64 = 4096;

/// A run has ended with a loss, a gradient norm or a weight that is not finite.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NotFinite {
    /// The number of the step, from 1.
    pub step: u64,
    /// How many runs in a row have ended at this step.
    pub times: u64,
    /// The last one of these runs. Several of its ranks may write the note.
    run: String,
}

impl NotFinite {
    /// Reads the note that earlier runs have left in this folder.
    ///
    /// # Errors
    ///
    /// If there is a note that cannot be read.
    pub fn read(folder: &Path) -> Result<Option<Self>, String> {
        let path = folder.join(NOT_FINITE);
        let unreadable = |reason: &dyn std::fmt::Display| {
            format!("{} cannot be read: {reason}; remove it", path.printable())
        };
        match paceline_files::read(&path, MAX_NOTE_BYTES) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| unreadable(&e)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unreadable(&error)),
        }
    }

    /// Leaves a note that the run with this id has ended at this step.
    pub fn note(disk: &Disk, folder: &Path, step: u64, run: &str) -> io::Result<()> {
        // A note that cannot be read counts as zero times.
        let before = Self::read(folder).ok().flatten().filter(|before| before.step == step);
        let times = before.map_or(1, |before| before.times + u64::from(before.run != run));
        let note = Self { step, times, run: run.to_owned() };
        let text = serde_json::to_vec(&note).map_err(io::Error::from)?;
        disk.replace(&folder.join(NOT_FINITE), None, |out| out.write_all(&text))
    }

    /// Removes the note once a run has come further than the step.
    pub fn forget(disk: &Disk, folder: &Path, steps: u64) -> io::Result<()> {
        match Self::read(folder) {
            Ok(Some(note)) if note.step <= steps => disk.remove(&folder.join(NOT_FINITE)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_same_step_is_counted_once_for_a_run_and_anew_for_another_step() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::default();
        let times = |step, run| {
            NotFinite::note(&disk, folder.path(), step, run).unwrap();
            NotFinite::read(folder.path()).unwrap().unwrap().times
        };
        let found = [(9, "a"), (9, "a"), (9, "b"), (8, "c"), (9, "d")].map(|(s, r)| times(s, r));
        assert_eq!(found, [1, 1, 2, 1, 1]);
        NotFinite::forget(&disk, folder.path(), 8).unwrap();
        assert!(NotFinite::read(folder.path()).unwrap().is_some());
        NotFinite::forget(&disk, folder.path(), 9).unwrap();
        assert_eq!(NotFinite::read(folder.path()), Ok(None));
        fs::write(folder.path().join(NOT_FINITE), b"{").unwrap();
        assert!(NotFinite::read(folder.path()).unwrap_err().contains("remove it"));
    }
}
