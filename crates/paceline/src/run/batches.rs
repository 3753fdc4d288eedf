//! One rank's batches, in the order in which it trains on them.
//!
//! Either the ranks share every batch, or each has batches of its own, from a shard of its own. It
//! knows nothing of what is done with a batch.

use std::iter::Peekable;
use std::sync::Arc;

use paceline_data::{
    Batch, DataError, Dataset, Loader, LoaderConfig, Order, Position, Prefetch, Sampler, Subset,
    TargetSpec,
};
use paceline_memory::{Category, DType};
use paceline_strategies::{Join, MicroBatch, Replica};
use paceline_trace::Track;

use crate::cli::TrainArgs;
use crate::config::TrainConfig;
use crate::{Failure, Result};

/// Where a rank's batches come from.
pub struct BatchStream {
    /// Nothing on a rank without samples.
    loader: Option<Peekable<Loader>>,
}

impl BatchStream {
    /// The batches of this rank, from the start of an epoch to the end of the run. The making of each is
    /// recorded on `track`.
    pub fn new(
        config: &TrainConfig,
        dataset: Arc<dyn Dataset>,
        replica: &Replica,
        first_epoch: u64,
        track: Option<Arc<Track>>,
    ) -> Result<Self> {
        let Replica { group, compute, .. } = replica;
        let (rank, world) = (group.rank(), group.world_size());
        let generated = config.data.is_generated();
        let order =
            if generated { Order::Sequential } else { Order::Shuffled { seed: config.seed } };
        let (dataset, sampler) = match &config.rank_samples {
            None => {
                let batch = config.global_batch_size;
                let sampler = Sampler::new(dataset.len(), batch, rank, world, order)?;
                (dataset, sampler)
            }
            Some(samples) if samples[rank] == 0 => return Ok(Self { loader: None }),
            Some(samples) => {
                let start: usize = samples[..rank].iter().sum();
                let shard = Subset::new(dataset, start..start + samples[rank])?;
                let sampler = Sampler::new(shard.len(), config.batch_size, 0, 1, order)?;
                (Arc::new(shard) as Arc<dyn Dataset>, sampler)
            }
        };
        let sampler = sampler.with_max_steps(config.steps_per_epoch)?;
        // Making samples costs time that would be taken from the step that is being measured.
        let prefetch = if generated { Prefetch::None } else { Prefetch::Background { depth: 2 } };
        let start = Position { epoch: first_epoch, step: 0 };
        let settings = LoaderConfig { start, end_epoch: config.epochs as u64, prefetch, track };
        let loader = Loader::new(dataset, sampler, compute.allocator.clone(), settings)?;
        Ok(Self { loader: Some(loader.peekable()) })
    }

    /// The next batches of an epoch, which make one step; nothing in place of those that this rank has
    /// not got any more.
    pub fn step(&mut self, epoch: u64, num_batches: usize) -> Result<Vec<Option<Batch>>> {
        (0..num_batches).map(|_| self.next(epoch)).collect()
    }

    fn next(&mut self, epoch: u64) -> Result<Option<Batch>> {
        let belongs = |next: &std::result::Result<Batch, DataError>| {
            next.as_ref().map_or(true, |batch| batch.epoch == epoch)
        };
        let next = self.loader.as_mut().and_then(|loader| loader.next_if(belongs));
        Ok(next.transpose()?)
    }
}

/// A batch as a strategy takes it.
pub fn share_of(batch: Batch) -> MicroBatch {
    let Batch { inputs, targets, global_count, .. } = batch;
    MicroBatch { inputs, targets, global_count }
}

/// Checks the samples of each rank's own shard against a training set of so many.
pub fn check_rank_samples(
    args: &TrainArgs,
    samples: &[usize],
    world_size: usize,
    available: usize,
) -> Result<()> {
    let usage = |problem: String| Err(Failure::Usage(problem));
    let all = samples.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
    if args.global_batch_size.is_some() {
        return usage(format!(
            "--rank-samples {all}: each rank takes batches of its own; pass --batch-size instead of \
             --global-batch-size"
        ));
    }
    if samples.len() != world_size {
        return usage(format!(
            "--rank-samples {all}: there are {world_size} ranks; pass one number for each"
        ));
    }
    match samples.iter().try_fold(0usize, |sum, &samples| sum.checked_add(samples)) {
        Some(0) => usage(format!("--rank-samples {all}: at least one rank must have samples")),
        Some(sum) if sum <= available => Ok(()),
        _ => usage(format!(
            "--rank-samples {all}: more in all than the training set, which has {available} samples; \
             lower them"
        )),
    }
}

/// What ranks with shards of their own need to train together.
pub fn join(
    config: &TrainConfig,
    dataset: &dyn Dataset,
    replica: &Replica,
) -> Result<Option<Join>> {
    if config.rank_samples.is_none() {
        return Ok(None);
    }
    let allocator = &replica.compute.allocator;
    let inputs = [&[0], dataset.input_shape()].concat();
    let inputs = allocator.tensor(DType::F32, inputs.as_slice(), Category::Data)?;
    let targets = match dataset.target() {
        TargetSpec::Class { .. } => allocator.tensor(DType::I64, [0], Category::Data)?,
        TargetSpec::Values { dim } => allocator.tensor(DType::F32, [0, dim], Category::Data)?,
    };
    Ok(Some(Join::new(inputs, targets)))
}
