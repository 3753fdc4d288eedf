//! The folder into which a run saves its checkpoints. One run at a time has it.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use paceline_failure::{Failure, Result, usage};
use paceline_files::Printable;
use paceline_host::disk::{self, Disk, DiskFile};

use super::not_finite::NotFinite;
use super::proof::Line;
use super::steps;

/// The file that a run locks while the checkpoints are its own. It names the run.
const LOCK: &str = "checkpoint.lock";

/// The most bytes of that name that are shown.
const MAX_OWNER_BYTES: u64 = 4096;

/// A folder of checkpoints that this run has until the value is dropped, or the process ends.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    disk: Disk,
    /// `None` on file systems without locks.
    _lock: Option<DiskFile>,
}

impl Folder {
    /// Makes the folder if it is missing, and takes it. `owner` names the run to others.
    ///
    /// # Errors
    ///
    /// If another run has the folder, and if nothing can be written to it.
    pub fn take(path: &Path, disk: Disk, owner: &str) -> Result<Self> {
        // A checkpoint is safe only if the folders above it are.
        disk.create_folder_safely(path).map_err(Failure::cannot("make the folder", path))?;
        let lock = path.join(LOCK);
        let fail = Failure::cannot("lock", &lock);
        let mut file = disk.open_or_create(&lock).map_err(&fail)?;
        let is_locked = file.lock().map_err(|_| refuse(path, &mut file))?;
        // Only for messages of other runs, so it is not written durably.
        file.clear().and_then(|()| writeln!(file, "{owner}")).map_err(&fail)?;
        steps::remove_leftovers(&disk, path).map_err(Failure::cannot("clean up in", path))?;
        Ok(Self { path: path.to_owned(), disk, _lock: is_locked.then_some(file) })
    }

    /// Makes the checkpoint after `steps` steps the one to go on from.
    pub fn go_back(&self, steps: u64) -> Result<()> {
        let good = Line::from(&self.path, steps).good;
        steps::go_back(&self.disk, &self.path, steps, good)
            .map_err(Failure::cannot("go back in", &self.path))
    }

    /// Removes the note of a number that is not finite.
    pub fn forget_not_finite(&self) -> Result<()> {
        NotFinite::forget(&self.disk, &self.path, u64::MAX)
            .map_err(Failure::cannot("remove a note in", &self.path))
    }

    /// Checks that no other run has the folder at this moment. Makes nothing.
    pub fn check(path: &Path) -> Result<()> {
        let file = path.join(LOCK);
        let opened = paceline_files::check_own(&file).and_then(|()| paceline_files::open(&file));
        let mut file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => {
                let (folder, file) = (path.printable(), file.printable());
                return usage(format!("--save {folder}: {file} cannot be used: {error}"));
            }
        };
        disk::lock(&file).map_err(|_| refuse(path, &mut file)).map(drop)
    }

    /// Removes the unfinished files of a failed run, unless another run has the folder. The next run removes the rest.
    pub fn tidy(path: &Path) {
        let Ok(file) = paceline_files::open(&path.join(LOCK)) else { return };
        if file.try_lock().is_ok() {
            let _ = steps::remove_leftovers(&Disk::default(), path);
        }
    }

    /// Leaves a file with the name of this run, which shows all ranks that they see the same folder.
    pub fn show(&self, id: &str) -> Result<()> {
        let path = self.path.join(shown_name(id));
        let write = || -> std::io::Result<()> {
            let mut file = self.disk.create(&path)?;
            file.write_all(id.as_bytes())?;
            file.sync()
        };
        write().map_err(Failure::cannot("write", &path))
    }

    /// Removes that file.
    pub fn hide(&self, id: &str) -> Result<()> {
        let path = self.path.join(shown_name(id));
        self.disk.remove(&path).map_err(Failure::cannot("remove", &path))
    }

    /// Whether this process sees the folder of the run `id`.
    pub fn is_seen(path: &Path, id: &str) -> bool {
        path.join(shown_name(id)).exists()
    }
}

fn shown_name(id: &str) -> String {
    format!("{}{id}", steps::RUN_PREFIX)
}

fn refuse(folder: &Path, file: &mut impl Read) -> Failure {
    let mut holder = String::new();
    // Even without a name it is another run.
    let _ = file.take(MAX_OWNER_BYTES).read_to_string(&mut holder);
    let holder = if holder.trim().is_empty() { "another run" } else { holder.trim() };
    Failure::Usage(format!(
        "--save {}: {holder} saves its checkpoints there; wait for its end, or pass another folder",
        folder.printable()
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_folder_belongs_to_one_run_at_a_time() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("saved");
        Folder::check(&path).unwrap();
        let first = Folder::take(&path, Disk::default(), "process 17 on host a").unwrap();
        for refused in [Folder::check(&path), Folder::take(&path, Disk::default(), "b").map(drop)] {
            let text = refused.unwrap_err().to_string();
            assert!(text.contains("process 17 on host a saves its checkpoints there"), "{text}");
        }
        drop(first);
        Folder::check(&path).unwrap();
        Folder::take(&path, Disk::default(), "process 18").unwrap();
    }

    #[test]
    fn a_run_in_its_last_moments_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let first = Folder::take(folder.path(), Disk::default(), "a run").unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| Folder::take(folder.path(), Disk::default(), "b"));
            drop(first);
            second.join().unwrap().unwrap();
        });
    }

    #[test]
    fn what_a_killed_run_left_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let left = [".step-000000007.0123.partial", ".step-000000005.removed"];
        for name in left.iter().chain(&["step-000000004", ".step-by-step", "other.partial"]) {
            fs::create_dir(path.join(name)).unwrap();
            fs::write(path.join(name).join("index.json"), b"half of").unwrap();
        }
        for name in ["latest.partial", ".run-0123", "latest"] {
            fs::write(path.join(name), b"half of").unwrap();
        }
        Folder::take(path, Disk::default(), "a run").unwrap();
        let mut names: Vec<_> =
            fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        let kept =
            [".step-by-step", "checkpoint.lock", "latest", "other.partial", "step-000000004"];
        assert_eq!(names, kept);
    }

    #[test]
    fn after_a_failure_the_folder_is_tidied_unless_another_run_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let partial = folder.path().join(".step-000000007.0123.partial");
        Folder::tidy(folder.path());
        let run = Folder::take(folder.path(), Disk::default(), "a run").unwrap();
        fs::create_dir(&partial).unwrap();
        Folder::tidy(folder.path());
        assert!(partial.exists());
        drop(run);
        Folder::tidy(folder.path());
        assert!(!partial.exists());
    }

    #[test]
    fn ranks_know_whether_they_see_the_folder() {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let own = Folder::take(folders[0].path(), Disk::default(), "a run").unwrap();
        own.show("0123").unwrap();
        assert!(Folder::is_seen(folders[0].path(), "0123"));
        assert!(!Folder::is_seen(folders[0].path(), "4567"));
        assert!(!Folder::is_seen(folders[1].path(), "0123"));
        own.hide("0123").unwrap();
        assert!(!Folder::is_seen(folders[0].path(), "0123"));
    }
}
