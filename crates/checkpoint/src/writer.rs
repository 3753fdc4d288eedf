//! Writes a rank's part of a checkpoint in the background, and on rank 0 completes the checkpoint.
//!
//! Each rank writes its file into a folder with a hidden name, syncs it, and leaves a mark: a small file with digests and
//! tensors. Rank 0 waits for all marks, writes the index, and gives the folder its name. So ranks need no collective while
//! they train, and a checkpoint with a name is complete.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_trace::awake;
use paceline_trace::runtime::{now, receive, sleep};
use serde::{Deserialize, Serialize};

use super::index::{INDEX, Index, Previous, ShardFile, TensorEntry, sha256};
use super::snapshot::Block;
use super::steps::{self, Keep};

/// The longest time between two looks for the marks of other ranks.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// The most bytes of a rank's mark, a part of the index.
const MAX_MARK_BYTES: u64 = 256 << 20;

/// The part that one rank has written.
#[derive(Debug, Serialize, Deserialize)]
struct Part {
    file: ShardFile,
    tensors: BTreeMap<String, TensorEntry>,
}

/// The part that one rank writes.
#[derive(Debug)]
pub(super) struct Job {
    pub disk: Disk,
    /// The folder of all checkpoints.
    pub folder: PathBuf,
    /// The folder of this checkpoint, while it is written.
    pub partial: PathBuf,
    pub rank: usize,
    /// The number of ranks that write.
    pub world_size: usize,
    pub tensors: BTreeMap<String, TensorEntry>,
    /// The bytes of all blocks together.
    pub num_bytes: u64,
    pub blocks: Receiver<Block>,
    /// Receives whether this rank's part is on the disk. The first message counts.
    pub part: Sender<bool>,
}

/// The work of rank 0 after all ranks have written their parts.
#[derive(Debug)]
pub(super) struct Completion {
    /// The index, without files and tensors.
    pub head: Index,
    pub steps: u64,
    pub keep: Keep,
    /// How long a save may take.
    pub limit: Duration,
    pub patience: Patience,
}

/// How long rank 0 waits for the parts of the other ranks. Time in which this process was suspended does not count.
#[derive(Debug)]
pub(super) struct Patience {
    /// Counted from the moment when its own part is on the disk.
    pub left: Duration,
    /// Gets the time that is left once the run has ended, and other parts may never come.
    pub run_end: Receiver<Duration>,
    pub has_run_ended: bool,
}

impl Patience {
    /// Waits a while. False if nothing is left.
    fn pause(&mut self, time: Duration) -> bool {
        let begin = now();
        match receive(&self.run_end, Some(time)) {
            Ok(left) => (self.left, self.has_run_ended) = (self.left.min(left), true),
            // The owner waits for the outcome.
            Err(RecvTimeoutError::Disconnected) => sleep(time),
            Err(RecvTimeoutError::Timeout) => {}
        }
        self.left = self.left.saturating_sub(awake(now() - begin, time));
        !self.left.is_zero()
    }
}

/// Writes this rank's part, and on rank 0 completes the checkpoint. Returns the entry for it in the next checkpoint.
pub(super) fn run(job: &Job, completion: Option<Completion>) -> Result<Option<Previous>> {
    let outcome = write_part(job).and_then(|part| match completion {
        None => publish(job, &part).map(|()| None),
        Some(completion) => {
            let _ = job.part.send(true);
            complete(job, part, completion).map(Some)
        }
    });
    if outcome.is_err() && job.rank == 0 {
        // The first error is reported. The next run removes the rest.
        let _ = job.disk.remove_tree(&job.partial);
    } else if outcome.is_err() {
        for name in [file_name(job), unfinished_mark_name(job.rank)] {
            let _ = job.disk.remove(&job.partial.join(name));
        }
    }
    // The owner may have asked before, or not at all.
    let _ = job.part.send(outcome.is_ok());
    outcome
}

fn file_name(job: &Job) -> String {
    format!("rank-{:03}-of-{:03}.shard", job.rank, job.world_size)
}

fn mark_name(rank: usize) -> String {
    format!("rank-{rank:03}.done")
}

fn unfinished_mark_name(rank: usize) -> String {
    format!("rank-{rank:03}.partial")
}

fn failed(job: &Job, path: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| {
        if job.rank > 0 && error.kind() == io::ErrorKind::NotFound {
            // Rank 0 has failed, and removes the files, and at last the folder.
            Failure::Consequence("rank 0 has given up the checkpoint".into())
        } else {
            Failure::cannot("write", path)(error)
        }
    }
}

/// Writes and syncs this rank's file.
fn write_part(job: &Job) -> Result<Part> {
    let name = file_name(job);
    let path = job.partial.join(&name);
    let failed = failed(job, &path);
    job.disk.create_folder(&job.partial).map_err(&failed)?;
    let mut out = job.disk.create(&path).map_err(&failed)?;
    let mut file = ShardFile { name, ..ShardFile::default() };
    while let Ok(block) = receive(&job.blocks, None) {
        let bytes = block.read()?;
        file.chunks.push(sha256(&bytes));
        file.num_bytes += bytes.len() as u64;
        out.write_all(&bytes).map_err(&failed)?;
    }
    if file.num_bytes != job.num_bytes {
        let (got, all) = (file.num_bytes, job.num_bytes);
        return Err(Failure::Run(format!(
            "{}: {got} of {all} bytes were copied",
            path.printable()
        )));
    }
    out.sync().map_err(&failed)?;
    Ok(Part { file, tensors: job.tensors.clone() })
}

/// Informs rank 0 that this rank's file is on the disk.
fn publish(job: &Job, part: &Part) -> Result<()> {
    let mark = job.partial.join(mark_name(job.rank));
    let unfinished = job.partial.join(unfinished_mark_name(job.rank));
    let text = serde_json::to_vec(part)?;
    let write = || -> io::Result<()> {
        let mut out = job.disk.create(&unfinished)?;
        out.write_all(&text)?;
        // The last operation: from then on rank 0 may rename the folder. It need not outlive a power cut, after which the
        // folder is useless.
        job.disk.rename(&unfinished, &mark)
    };
    write().map_err(failed(job, &mark))
}

/// Waits for the parts of all ranks, writes the index, and gives the checkpoint its name.
fn complete(job: &Job, own: Part, completion: Completion) -> Result<Previous> {
    let Completion { head: mut index, steps, keep, limit, mut patience } = completion;
    let mut parts = vec![own];
    for rank in 1..index.world_size {
        parts.push(await_part(job, rank, limit, &mut patience)?);
    }
    for Part { file, tensors } in parts {
        index.files.push(file);
        for (name, tensor) in tensors {
            match index.tensors.get_mut(&name) {
                Some(known) => known.pieces.extend(tensor.pieces),
                None => drop(index.tensors.insert(name, tensor)),
            }
        }
    }
    for tensor in index.tensors.values_mut() {
        tensor.pieces.sort_unstable_by_key(|piece| piece.start);
    }
    // An incomplete checkpoint never gets a name.
    index.check().map_err(|reason| {
        Failure::Run(format!("the checkpoint after step {steps} would be incomplete: {reason}"))
    })?;
    let path = job.partial.join(INDEX);
    let write = || -> io::Result<()> {
        for rank in 1..index.world_size {
            job.disk.remove(&job.partial.join(mark_name(rank)))?;
        }
        let mut out = job.disk.create(&path)?;
        out.write_all(&index.to_json())?;
        out.sync()?;
        job.disk.sync_folder(&job.partial)
    };
    write().map_err(failed(job, &path))?;
    let before = index.previous.as_ref().map(|previous| previous.steps);
    steps::publish(&job.disk, &job.folder, &job.partial, steps, before, &keep)
        .map_err(failed(job, &job.folder.join(steps::name(steps))))?;
    Ok(Previous { steps, sha256: index.digest() })
}

/// Waits for the mark of a rank. A file of another host may appear late, so this looks again and again.
fn await_part(job: &Job, rank: usize, limit: Duration, patience: &mut Patience) -> Result<Part> {
    let mark = job.partial.join(mark_name(rank));
    let mut pause = Duration::from_millis(1);
    loop {
        match paceline_files::read(&mark, MAX_MARK_BYTES) {
            Ok(text) => {
                return serde_json::from_slice(&text).map_err(Failure::cannot("read", &mark));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Failure::cannot("read", &mark)(error)),
        }
        if patience.pause(pause) {
            pause = (pause * 2).min(LOOK_AGAIN);
            continue;
        }
        let problem = if patience.has_run_ended {
            "before the run ended".into()
        } else {
            format!("within {} s", limit.as_secs())
        };
        return Err(Failure::Run(format!(
            "the checkpoint in {} is not complete: rank {rank} has not written its part {problem}",
            job.folder.printable()
        )));
    }
}
