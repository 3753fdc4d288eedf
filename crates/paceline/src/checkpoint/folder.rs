//! The folder into which a run saves its checkpoints. One run at a time has it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use paceline_model::{Optimizer, Storage};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::{Setting, file};
use crate::disk::{Disk, DiskFile};
use crate::run::progress::Progress;
use crate::{Failure, Result};

/// The file that the run holds locked whose checkpoints these are. It names the run.
const LOCK: &str = "checkpoint.lock";

/// How long a run waits for the lock of another. A process that was killed gives its locks back only after its memory
/// and its working folder, so a command that is repeated at once can still meet the lock.
const LAST_MOMENTS: Duration = Duration::from_secs(2);

/// A folder of checkpoints that belongs to this run until the value is dropped, or the process ends.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    disk: Disk,
    /// `None` on file systems without locks.
    _lock: Option<DiskFile>,
}

impl Folder {
    /// Makes the folder if there is none, and takes it. `owner` says in words whose it is, for another run that
    /// wants it too.
    ///
    /// # Errors
    ///
    /// If another run has the folder, and if nothing can be written to it.
    pub fn take(path: &Path, disk: Disk, owner: &str) -> Result<Self> {
        disk.create_folder(path)
            .map_err(|e| Failure::io(format!("cannot make the folder {}", path.display()), e))?;
        let fail = |e: std::io::Error| {
            Failure::io(format!("cannot lock {}", path.join(LOCK).display()), e)
        };
        let mut file = disk.open_or_create(&path.join(LOCK)).map_err(fail)?;
        let is_locked = lock(&mut file).map_err(|holder| refuse(path, &holder))?;
        // Only for messages of other runs, so it is not written durably.
        file.clear().and_then(|()| writeln!(file, "{owner}")).map_err(fail)?;
        file::remove_partial(&disk, path)?;
        Ok(Self { path: path.to_owned(), disk, _lock: is_locked.then_some(file) })
    }

    /// Checks that no other run has the folder at this moment. Makes nothing.
    pub fn check(path: &Path) -> Result<()> {
        let Ok(mut file) = File::open(path.join(LOCK)) else { return Ok(()) };
        lock(&mut file).map_err(|holder| refuse(path, &holder)).map(drop)
    }

    /// Writes the checkpoint of a run that stands at `progress`. A continuation must have the same `settings`. The
    /// checkpoint before it is kept beside it.
    ///
    /// # Errors
    ///
    /// If a file cannot be written. Then an earlier checkpoint is still there, and it is complete.
    pub fn save(
        &self,
        settings: &[Setting],
        storage: &Storage,
        optimizer: &Optimizer,
        progress: &Progress,
    ) -> Result<()> {
        file::save(&self.disk, &self.path, settings, storage, optimizer, progress)
    }
}

/// Locks the file. False where the file system has no locks; an error, with the holder's words, where another
/// process holds it and goes on holding it for [`LAST_MOMENTS`].
fn lock(file: &mut (impl Read + AsFd)) -> std::result::Result<bool, String> {
    let deadline = Instant::now() + LAST_MOMENTS;
    loop {
        match flock(&*file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(Errno::WOULDBLOCK) => {
                let mut holder = String::new();
                // Without its words it is still another run.
                let _ = file.read_to_string(&mut holder);
                return Err(holder.trim().to_owned());
            }
            Err(_) => return Ok(false),
        }
    }
}

fn refuse(folder: &Path, holder: &str) -> Failure {
    let holder = if holder.is_empty() { "another run" } else { holder };
    Failure::Usage(format!(
        "--save {}: {holder} saves its checkpoints there; wait for its end, or pass another folder",
        folder.display()
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use paceline_kernels::optimizer::AdamW;
    use paceline_memory::{Allocator, DType};
    use paceline_model::{MlpConfig, OptimizerConfig};

    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::disk::faults::at_each_operation;

    const SIZES: MlpConfig = MlpConfig {
        input_dim: 64,
        hidden_dim: 256,
        output_dim: 4,
        num_layers: 3,
        tie_layers: false,
    };
    const ADAMW: AdamW = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };

    /// A model of 2.5 MB with its optimizer's state, more than is written at once.
    fn model() -> (Storage, Optimizer) {
        let allocator = Allocator::new();
        let storage =
            Storage::host(SIZES.build(1).unwrap().layout, DType::F32, &allocator).unwrap();
        storage.initialize(1).unwrap();
        let optimizer =
            Optimizer::new(OptimizerConfig::AdamW(ADAMW), &storage, &allocator).unwrap();
        (storage, optimizer)
    }

    fn after(steps: u64) -> Progress {
        Progress { steps, ..Progress::default() }
    }

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
    fn what_a_killed_run_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join("checkpoint.safetensors.partial");
        fs::write(&left, b"half of a checkpoint").unwrap();
        Folder::take(folder.path(), Disk::default(), "a run").unwrap();
        assert!(!left.exists());
    }

    #[test]
    fn a_broken_checkpoint_gives_way_to_the_one_before_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let (storage, optimizer) = model();
        let saves = Folder::take(path, Disk::default(), "a run").unwrap();
        let last = path.join("checkpoint.safetensors");
        for steps in [3, 5] {
            saves.save(&[], &storage, &optimizer, &after(steps)).unwrap();
        }
        let (checkpoint, note) = Checkpoint::open_last_good(path).unwrap();
        assert_eq!((checkpoint.progress().steps, note), (5, None));
        let digest = checkpoint.digest().to_owned();
        let same = Checkpoint::open_with_digest(path, &digest).unwrap().unwrap();
        assert_eq!(same.progress().steps, 5);
        assert!(Checkpoint::open_with_digest(path, "other").unwrap().is_none());

        let whole = fs::read(&last).unwrap();
        fs::write(&last, &whole[..whole.len() - 1]).unwrap();
        let (checkpoint, note) = Checkpoint::open_last_good(path).unwrap();
        assert_eq!(checkpoint.progress().steps, 3);
        let note = note.unwrap();
        assert!(note.contains("is corrupt") && note.contains("after step 3"), "{note}");
        let digest = checkpoint.digest().to_owned();
        let same = Checkpoint::open_with_digest(path, &digest).unwrap().unwrap();
        assert_eq!(same.progress().steps, 3);
        let refused = Checkpoint::open(path).unwrap_err();
        assert!(refused.contains("is corrupt") && refused.contains("--resume auto"), "{refused}");

        fs::remove_file(path.join("checkpoint.previous.safetensors")).unwrap();
        let refused = Checkpoint::open_last_good(path).unwrap_err();
        assert!(refused.contains("is corrupt") && !refused.contains("--resume"), "{refused}");
        Checkpoint::open_with_digest(path, "any").unwrap_err();
    }

    #[test]
    fn a_fault_at_any_operation_of_a_save_loses_no_checkpoint() {
        let (storage, optimizer) = model();
        let num_operations = at_each_operation(|disk, _| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path();
            let save = |disk: Disk, steps| {
                let saves = Folder::take(path, disk, "a run")?;
                saves.save(&[], &storage, &optimizer, &after(steps))
            };
            save(Disk::default(), 1).unwrap();
            save(Disk::default(), 2).unwrap();
            let outcome = save(disk.clone(), 3);
            let found = Checkpoint::open_last_good(path).unwrap().0.progress().steps;
            // The last operations come after the new file has its name.
            assert!(found == 2 || found == 3, "step {found}");
            match outcome {
                Ok(()) => assert_eq!(found, 3),
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains(&path.display().to_string()), "{text}");
                    assert!(text.contains("no space left"), "{text}");
                }
            }
            // The next run goes on as if nothing had happened.
            save(Disk::default(), 4).unwrap();
            assert_eq!(Checkpoint::open(path).unwrap().progress().steps, 4);
        });
        assert!(num_operations > 10, "{num_operations} operations");
    }
}
