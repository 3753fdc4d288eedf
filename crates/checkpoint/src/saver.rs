//! Saves checkpoints of one rank while it trains.
//!
//! A save copies this rank's pieces for a thread that writes them. All ranks wait for it before the next one, and before the
//! run ends.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel, sync_channel};
use std::time::Duration;

use paceline_failure::{Failure, Result};
use paceline_host::disk::Disk;
use paceline_memory::Allocator;
use paceline_trace::runtime::receive;
use paceline_trace::{beside, thread_builder};

use super::index::{Index, Previous};
use super::not_finite::NotFinite;
use super::pieces::Piece;
use super::progress::Progress;
use super::proof::Line;
use super::snapshot;
use super::steps::{self, Keep};
use super::writer::{self, Completion, Job, Patience};

/// How long a save may take on any rank, and how long rank 0 waits for the parts of the other ranks.
pub const SAVE_LIMIT: Duration = Duration::from_secs(600);
/// How long it still waits for ranks that are about to write, after the run has ended early.
const GRACE: Duration = Duration::from_secs(2);

/// How a run saves.
#[derive(Clone, Debug)]
pub struct SaveSettings {
    /// How many of the newest checkpoints stay.
    pub keep: usize,
    /// The memory for a copy, in bytes; by default as much as it needs.
    pub budget_bytes: Option<usize>,
    /// See [`SAVE_LIMIT`].
    pub limit: Duration,
}

/// Writes one rank's parts of checkpoints.
#[derive(Debug)]
pub struct Saver {
    disk: Disk,
    folder: PathBuf,
    settings: SaveSettings,
    /// Distinguishes this run's folders from those that another run has left.
    id: String,
    rank: usize,
    world_size: usize,
    /// On rank 0: the checkpoint that the next one follows.
    previous: Option<Previous>,
    /// On rank 0: the checkpoints on the way of this run.
    line: Line,
    save: Option<Running>,
}

/// The end of a save: on rank 0 with the entry for the next checkpoint.
type Written = Result<Option<Previous>>;

/// A save that has begun.
#[derive(Debug)]
struct Running {
    /// Says whether this rank's part is on the disk.
    part: Receiver<bool>,
    /// Ends the wait for the other ranks, after a time.
    end_run: Sender<Duration>,
    /// Gets the outcome. A writer that panics sends none.
    outcome: Receiver<Written>,
}

impl Saver {
    /// Saves to `folder` as a rank of the run with this unique `id`.
    pub fn new(
        disk: Disk,
        folder: &Path,
        settings: SaveSettings,
        id: String,
        rank: usize,
        world_size: usize,
    ) -> Self {
        Self {
            disk,
            folder: folder.to_owned(),
            settings,
            id,
            rank,
            world_size,
            previous: None,
            line: Line::default(),
            save: None,
        }
    }

    /// How long a save may take on any rank.
    pub fn limit(&self) -> Duration {
        self.settings.limit
    }

    /// Sets the checkpoint in the folder from which the run goes on.
    pub fn follow(&mut self, previous: Previous) {
        self.line = Line::from(&self.folder, previous.steps);
        self.previous = Some(previous);
    }

    /// Notes that this run ends at this step with a number that is not finite. Several ranks may do so.
    ///
    /// # Errors
    ///
    /// If it cannot be written.
    pub fn note_not_finite(&self, step: u64) -> Result<()> {
        NotFinite::note(&self.disk, &self.folder, step, &self.id)
            .map_err(Failure::cannot("leave a note in", &self.folder))
    }

    /// Begins to save the pieces of this rank at `progress`, up to which all losses were finite. Returns when they are
    /// copied and may change. `head` is the index without files and tensors. No save may be under way.
    pub fn begin(
        &mut self,
        mut head: Index,
        progress: &Progress,
        pieces: &[Piece],
        allocator: &Allocator,
    ) -> Result<()> {
        let Self { rank, world_size, .. } = *self;
        let steps = progress.steps;
        let num_bytes = snapshot::num_bytes(pieces);
        let num_waiting = snapshot::num_waiting(num_bytes, self.settings.budget_bytes);
        let (sender, blocks) = sync_channel(num_waiting);
        let ((part_written, part), (end_run, run_end)) = (channel(), channel());
        let job = Job {
            disk: self.disk.clone(),
            folder: self.folder.clone(),
            partial: self.folder.join(steps::partial_name(steps, &self.id)),
            rank,
            world_size,
            tensors: snapshot::entries(pieces, rank),
            num_bytes: num_bytes as u64,
            blocks,
            part: part_written,
        };
        self.line.advance(progress.steps_with_update());
        head.previous = self.previous.clone();
        let keep =
            Keep { newest: self.settings.keep, also: self.line.to_keep(), good: self.line.good };
        let limit = self.settings.limit;
        let patience = Patience { left: limit, run_end, has_run_ended: false };
        let completion = (rank == 0).then_some(Completion { head, steps, keep, limit, patience });
        let (written, outcome) = channel();
        let write = move || {
            let outcome = writer::run(&job, completion);
            // Nobody joins this thread: its memory is free when the outcome is known.
            drop(job);
            let _ = written.send(outcome);
        };
        let thread = thread_builder("checkpoint").spawn(beside(write));
        thread.map_err(|e| Failure::io("cannot start a thread that saves", e))?;
        self.save = Some(Running { part, end_run, outcome });
        snapshot::copy(pieces, allocator, &sender)
    }

    /// Whether a copy of these pieces takes too much memory, so that training waits for the writes.
    pub fn is_over_budget(&self, pieces: &[Piece]) -> bool {
        let needed = snapshot::num_bytes(pieces);
        self.settings.budget_bytes.is_some_and(|budget| budget < needed)
    }

    /// The outcome of a save that has ended meanwhile. Does not wait.
    pub fn look(&mut self) -> Result<()> {
        let Some(save) = &self.save else { return Ok(()) };
        match save.outcome.try_recv() {
            Err(TryRecvError::Empty) => Ok(()),
            ended => self.end_with(ended.ok()),
        }
    }

    /// Waits until this rank's part of the save is on the disk.
    pub fn wait_for_part(&mut self) -> Result<()> {
        let Some(save) = &self.save else { return Ok(()) };
        // A writer that panics says nothing.
        let has_part = receive(&save.part, None).unwrap_or(false);
        // On rank 0 the save goes on, unless it has failed.
        if self.rank == 0 && has_part { Ok(()) } else { self.wait() }
    }

    /// Ends a save to which another rank will never write its part, for which rank 0 would wait.
    pub fn give_up(&mut self) {
        self.end(Duration::ZERO);
    }

    /// Gives the save this time to end. Its outcome does not matter.
    fn end(&mut self, grace: Duration) {
        let Some(Running { end_run, outcome, .. }) = self.save.take() else { return };
        // A writer that no longer waits has no use for it.
        let _ = end_run.send(grace);
        // The run has failed for another reason already, or is about to.
        let _ = receive(&outcome, None);
    }

    /// Waits until the save is over. On rank 0 the checkpoint is then complete.
    pub fn wait(&mut self) -> Result<()> {
        let Some(save) = &self.save else { return Ok(()) };
        let outcome = receive(&save.outcome, None).ok();
        self.end_with(outcome)
    }

    fn end_with(&mut self, outcome: Option<Written>) -> Result<()> {
        self.save = None;
        let panicked = || Failure::Run("the thread that writes the checkpoint has panicked".into());
        if let Some(written) = outcome.ok_or_else(panicked)?? {
            self.line.add(written.steps, |steps| steps::is_complete(&self.folder, steps));
            self.previous = Some(written);
        }
        Ok(())
    }
}

/// A run that ends early does not leave its last save half done if it can help it.
impl Drop for Saver {
    fn drop(&mut self) {
        self.end(GRACE);
    }
}
