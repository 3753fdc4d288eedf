//! The checkpoints of a run: the part of the training state that each rank writes, and when the ranks wait for each other.
//!
//! [`checkpoint`] knows how it gets to the disk. During steps, no rank waits for another one because of a checkpoint. Where
//! all ranks save, or the run ends, they learn together whether the one before is complete.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;

use paceline_checkpoint::pieces::{self, Piece, Ranges};
use paceline_checkpoint::progress::Progress;
use paceline_checkpoint::{
    self as checkpoint, Checkpoint, Folder, Previous, SAVE_LIMIT, SaveSettings, Saver, hugging_face,
};
use paceline_collectives::Group;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::streams;
use paceline_model::Param;
use paceline_settings::config::TrainConfig;
use paceline_strategies::{Replica, Trainer};

use crate::together::{complete, together};
use crate::{recorded, resume};

/// Saves one rank's part of a run.
#[derive(Debug)]
pub struct Saving {
    saver: Saver,
    /// On rank 0: the folder, which this run holds until the last save has ended.
    folder: Option<Folder>,
    /// The ranges of each rank of the group, from the first save on. A pipeline stage is divided among its own ranks.
    owned: Vec<Ranges>,
    /// The steps of the checkpoint from which this run goes on.
    followed: Option<u64>,
    /// Whether all ranks have begun a save without agreeing on its outcome.
    is_under_way: bool,
    has_warned: bool,
}

/// The folder of the best weights, within that of `--save`.
pub(crate) const BEST: &str = "best";

/// The loss of the best weights that an earlier part of the run has left here, and their entry in the next checkpoint.
pub(crate) fn best_of(folder: &Path) -> Option<(f64, Previous)> {
    let checkpoint = Checkpoint::open(folder).ok()?;
    Some((checkpoint.progress().best.lowest?.0, checkpoint.as_previous(folder)?))
}

impl Saving {
    /// Prepares to save to `path`, which is `folder` on rank 0. Collective. Fails if a rank does not see rank 0's folder.
    pub fn new(
        config: &TrainConfig,
        path: &Path,
        folder: Option<Folder>,
        disk: &Disk,
        world: &Group,
    ) -> Result<Self> {
        let own = format!("{:016x}", RandomState::new().build_hasher().finish());
        let id: String = world.broadcast_object(Some(&own), 0)?;
        // These are small files, but the disk may be slow.
        let on_disk = |act: fn(&Folder, &str) -> Result<()>| {
            let act = || folder.as_ref().map_or(Ok(()), |folder| act(folder, &id));
            together(world, "use the folder of --save", SAVE_LIMIT, act)
        };
        on_disk(Folder::show)?;
        let is_seen = if Folder::is_seen(path, &id) {
            Ok(())
        } else {
            Err(Failure::Usage(format!(
                "--save {}: rank {} does not see the folder of rank 0 there; each rank writes its part of a \
                 checkpoint, so pass a folder that all hosts share",
                path.printable(),
                world.rank()
            )))
        };
        let is_same = together(world, "see the folder of --save", SAVE_LIMIT, || is_seen);
        let is_hidden = on_disk(Folder::hide);
        is_same?;
        is_hidden?;
        let (keep, budget_bytes) =
            (config.checkpoints.save_keep, config.checkpoints.budget_bytes());
        let settings = SaveSettings { keep, budget_bytes, limit: SAVE_LIMIT };
        let (rank, world_size) = (world.rank(), world.world_size());
        let saver = Saver::new(disk.clone(), path, settings, id, rank, world_size);
        let (owned, followed) = (Vec::new(), None);
        Ok(Self { saver, folder, owned, followed, is_under_way: false, has_warned: false })
    }

    /// Goes on from this checkpoint in the folder, which becomes the latest. Collective.
    pub fn follow(&mut self, previous: Previous, world: &Group) -> Result<()> {
        together(world, "use the folder of --save", SAVE_LIMIT, || {
            self.folder.as_ref().map_or(Ok(()), |folder| folder.go_back(previous.steps))
        })?;
        self.followed = Some(previous.steps);
        self.saver.follow(previous);
        Ok(())
    }

    /// Notes that this run ends at this step with a number that is not finite.
    pub fn note_not_finite(&self, step: u64) -> Result<()> {
        self.saver.note_not_finite(step)
    }

    /// Waits for the save before, then begins to save a run at `progress`. Replicas must be as equal as the strategy makes
    /// them. Collective. With `waits`, the checkpoint is complete on return.
    pub fn save(
        &mut self,
        config: &TrainConfig,
        num_samples: usize,
        trainer: &Trainer,
        progress: &Progress,
        waits: bool,
    ) -> Result<()> {
        let Trainer { replica, optimizer, strategy, .. } = trainer;
        let Replica { world, group, model, mesh, compute, .. } = replica;
        if self.followed == Some(progress.steps) {
            // It was complete before ranks were lost that had not got so far.
            return Ok(());
        }
        self.finish(world)?;
        if self.owned.is_empty() {
            // Another rank writes its copy of these.
            let params = model.layout.params().iter();
            let copies: Vec<_> =
                params.filter(|param| !replica.counts(param)).map(Param::range).collect();
            let owned =
                |rank| Ranges::from(&strategy.owned(model, mesh.shape(), rank)).without(&copies);
            self.owned = (0..group.world_size()).map(owned).collect();
        }
        let pieces = self.pieces(config, trainer)?;
        self.warn_of_budget(config, world.rank(), &pieces);
        let settings = resume::settings(config, num_samples);
        let kind = config.strategy.kind();
        let steps = optimizer.steps();
        let mut head = checkpoint::head(world.world_size(), kind, &settings, steps, progress);
        head.run.insert(recorded::KEY.into(), recorded::of_run(config));
        head.run.extend(hugging_face::origin(config.data.tokenizer(), config.model.folder()));
        self.is_under_way = true;
        let limit = self.saver.limit();
        let begin = || self.saver.begin(head, progress, &pieces, &compute.host);
        match config.checkpoints.budget_bytes() {
            // The copy waits for this rank's disk.
            Some(_) => together(world, "write its part of the checkpoint", limit, begin)?,
            None => begin()?,
        }
        if waits { self.finish(world) } else { Ok(()) }
    }

    /// Ends a save to which another rank may never write its part.
    pub fn give_up(&mut self) {
        self.saver.give_up();
    }

    /// Fails if the save under way has failed on this rank. Does not wait.
    pub fn look(&mut self) -> Result<()> {
        self.saver.look()
    }

    /// Waits until the save under way is complete. Collective.
    fn finish(&mut self, world: &Group) -> Result<()> {
        if !std::mem::take(&mut self.is_under_way) {
            return Ok(());
        }
        complete(&mut self.saver, world)
    }

    /// The pieces that this rank writes.
    fn pieces(&self, config: &TrainConfig, trainer: &Trainer) -> Result<Vec<Piece>> {
        let Trainer { replica, optimizer, strategy, .. } = trainer;
        let Replica { world, group, storage, .. } = replica;
        let rank = group.rank();
        let is_first = rank == 0;
        let mut pieces = if config.strategy.is_alone() || config.strategy.keeps_replicas_equal() {
            let own = pieces::share(&self.owned, rank);
            pieces::of_ranges("", &own, storage, optimizer)?
        } else if is_first {
            pieces::of_ranges("", &self.owned[0], storage, optimizer)?
        } else {
            // Each rank has its own optimizer: another number of ranks goes on from rank 0's, the same number from their
            // own.
            let state = self.owned[rank].state.clone();
            let own = Ranges { values: Vec::new(), state };
            pieces::of_ranges(&pieces::strategy_prefix(rank), &own, storage, optimizer)?
        };
        if is_first {
            pieces.extend(pieces::of_buffers(storage, |unit| replica.counts_buffers(unit))?);
        }
        pieces.extend(pieces::of_strategy(world.rank(), strategy.state()));
        Ok(pieces)
    }

    /// Warns once that training waits for the disk because the copy would take too much memory.
    fn warn_of_budget(&mut self, config: &TrainConfig, rank: usize, pieces: &[Piece]) {
        if rank > 0 || self.has_warned || !self.saver.is_over_budget(pieces) {
            return;
        }
        self.has_warned = true;
        let budget = config.checkpoints.budget_bytes().unwrap_or(0) >> 20;
        let needed = pieces.iter().map(|piece| piece.data.num_bytes()).sum::<usize>() as f64;
        streams::stderr().line(&format!(
            "warning: --save-budget-mb {budget}: a rank's part of a checkpoint has {:.0} MiB, so training waits \
             while the rest is written",
            (needed / f64::from(1 << 20)).ceil()
        ));
    }
}
