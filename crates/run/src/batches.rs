//! One rank's batches, in the order in which it trains on them.
//!
//! Either the ranks share every batch, or each rank has batches of its own shard.

use std::iter::Peekable;
use std::sync::Arc;
use std::time::Duration;

use paceline_data::{
    Batch, BatchShape, Dataset, Decoded, Loader, LoaderConfig, Position, Prefetch, SampleCounts,
    SampleOrder, Sampler, ShareIter, Subset,
};
use paceline_failure::Result;
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, Device, MemoryError};
use paceline_model::Batch as ModelBatch;
use paceline_settings::config::TrainConfig;
use paceline_strategies::{AccumulationOrder, Join, MicroBatch, Replica};
use paceline_trace::Track;

use crate::generated::Generated;

/// The source of a rank's batches.
pub struct BatchStream {
    /// `None` on a rank without samples.
    batches: Option<Peekable<Box<dyn Iterator<Item = Result<Batch>>>>>,
    /// Samples that lie before the first batch of the stream.
    before: SampleCounts,
    /// The micro-batches of a batch.
    per_batch: usize,
}

impl BatchStream {
    /// The batches of this rank, from a position in the data to the end of the run. `track` records the time to make
    /// each.
    pub fn new(
        config: &TrainConfig,
        dataset: Arc<dyn Dataset>,
        replica: &Replica,
        start: Position,
        track: Option<Arc<Track>>,
    ) -> Result<Self> {
        let Replica { group, compute, .. } = replica;
        let (rank, world) = (group.rank(), group.world_size());
        let samplers = (0..world).map(|rank| sampler(config, dataset.len(), rank, world));
        let samplers = samplers.collect::<Result<Vec<_>>>()?;
        let counts = |sampler: &Sampler| sampler.samples_before(start);
        let mut before = samplers[rank].as_ref().map(counts).unwrap_or_default();
        if config.rank_samples.is_some() {
            before.all = samplers.iter().flatten().map(|sampler| counts(sampler).own).sum();
        }
        let Some(sampler) = samplers.into_iter().nth(rank).flatten() else {
            return Ok(Self { batches: None, before, per_batch: 1 });
        };
        let dataset = match &config.rank_samples {
            None => dataset,
            Some(samples) => {
                let first: usize = samples[..rank].iter().sum();
                Arc::new(Subset::new(dataset, first..first + samples[rank])?)
            }
        };
        let lengths = dataset.lengths().filter(|_| config.data.groups_by_length());
        let sampler = match lengths {
            Some(lengths) => sampler.with_lengths(lengths)?,
            None => sampler,
        };
        let per_batch = sampler.shares_per_batch();
        // A rank with fewer samples than others may be at the end of its epoch already.
        let start = Position { batch: start.batch.min(sampler.batches_per_epoch()), ..start };
        let end_epoch = config.epochs as u64;
        let batches: Box<dyn Iterator<Item = _>> = if config.makes_on_device() {
            let shares = ShareIter::new(sampler, start, end_epoch)?;
            let compute = Compute::new(1, compute.allocator.clone())?;
            Box::new(Generated { dataset, shares, compute })
        } else {
            let prefetch = match config.load_ahead {
                0 => Prefetch::None,
                depth => Prefetch::Background { depth },
            };
            let decode = Duration::from_secs_f64(config.decode_us * 1e-6);
            let dataset =
                if decode.is_zero() { dataset } else { Arc::new(Decoded::new(dataset, decode)) };
            let settings = LoaderConfig { start, end_epoch, prefetch, track };
            let memory = match compute.device() {
                // Without the flag, batches lie in ordinary memory.
                Device::Sim | Device::Cuda if !config.copies.pin_memory => Allocator::new(),
                _ => compute.host.clone(),
            };
            let loader = Loader::new(dataset, sampler, memory, settings)?;
            Box::new(loader.map(|batch| Ok(batch?)))
        };
        Ok(Self { batches: Some(batches.peekable()), before, per_batch })
    }

    /// The samples that lie before the position where the stream began.
    pub fn samples_before(&self) -> SampleCounts {
        self.before
    }

    /// The next `num_batches` batches of an epoch, for one step, or their micro-batches. A batch is `None` if only other ranks have more data
    /// in the epoch.
    pub fn step(&mut self, epoch: u64, num_batches: usize) -> Result<Vec<Option<Batch>>> {
        (0..num_batches * self.per_batch).map(|_| self.next(epoch)).collect()
    }

    fn next(&mut self, epoch: u64) -> Result<Option<Batch>> {
        let belongs = |next: &Result<Batch>| {
            next.as_ref().map_or(true, |batch| batch.position.epoch == epoch)
        };
        self.batches.as_mut().and_then(|batches| batches.next_if(belongs)).transpose()
    }
}

/// The sampler of a rank for `len` training samples. `None` for a rank without samples.
fn sampler(config: &TrainConfig, len: usize, rank: usize, world: usize) -> Result<Option<Sampler>> {
    let order = if config.data.is_new_each_epoch() {
        SampleOrder::Sequential
    } else {
        SampleOrder::Shuffled { seed: config.seed }
    };
    let sampler = match config.rank_samples.as_ref().map(|samples| samples[rank]) {
        None => {
            let sampler = Sampler::new(len, config.global_batch_size, rank, world, order)?;
            match (&config.micro_batches, config.strategy.options.accumulation) {
                (Some(of), _) => sampler.with_micro_batches(&of.shares)?,
                // Ranks come before micro-batches in the tree.
                (None, AccumulationOrder::Tree) => {
                    sampler.with_steps_of(config.strategy.accumulate)?
                }
                (None, _) => sampler,
            }
        }
        Some(0) => return Ok(None),
        Some(len) => Sampler::new(len, config.batch_size, 0, 1, order)?,
    };
    Ok(Some(sampler.with_max_batches(config.steps_per_epoch)?))
}

/// A batch in the form that strategies take.
pub fn share_of(batch: Batch) -> MicroBatch {
    let Batch { tensors, global_count, .. } = batch;
    MicroBatch { batch: ModelBatch::of(tensors), global_count }
}

/// The coordination of ranks with their own shards; `None` if ranks share batches.
pub fn join(
    config: &TrainConfig,
    dataset: &dyn Dataset,
    replica: &Replica,
) -> Result<Option<Join>> {
    if config.rank_samples.is_none() {
        return Ok(None);
    }
    let allocator = &replica.compute.host;
    let tensors = BatchShape::of(dataset).empty().into_iter().map(|tensor| {
        Ok((tensor.name, allocator.tensor(tensor.dtype, tensor.dims.as_slice(), Category::Data)?))
    });
    let tensors = tensors.collect::<std::result::Result<Vec<_>, MemoryError>>()?;
    let empty = ModelBatch::of(tensors);
    let memory = &replica.compute.allocator;
    Ok(Some(Join::new(match memory.home() {
        Some(home) => empty.to_device(memory, home, &mut Vec::new())?,
        None => empty,
    })))
}
