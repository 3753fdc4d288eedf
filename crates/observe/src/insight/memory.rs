//! The memory of a rank before the run: the bytes of each category, by formula.
//!
//! Parameters, gradients, unsharded units and communication follow from the strategy's statement
//! ([`Footprint`]); the optimizer's state follows from what the rank owns; activations and scratch
//! memory come from a rehearsal of the step on the device without contents ([`Rehearsal`]); data follow from the loader. Nothing as
//! large as the model is allocated.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use paceline_collectives::{Axis, MeshShape};
use paceline_data::BatchShape;
use paceline_failure::{Failure, Result};
use paceline_host::resources;
use paceline_kernels::{Compute, KernelError};
use paceline_launch::device::Device;
use paceline_memory::{Allocator, Category, MemoryError};
use paceline_model::{Batch, Layout, Model, ModelError, Owned, Rehearsal};
use paceline_settings::config::TrainConfig;
use paceline_settings::named::TransportName;
use paceline_settings::open_data::OpenData;
use paceline_settings::strategy::StrategyConfig;
use paceline_strategies::{
    Commit, Footprint, PeerShard, SHARED_SUMS_BYTES, Strategy, StrategyError, rehearse_stages,
};

use crate::record::event_room::events_bytes;
use crate::record::memory::{Bytes, RESIDENT, TOTAL};

/// Batches that a loader thread has ready or in the making, beside the batches of the step.
const BATCHES_AHEAD: usize = 3;

/// Stacks, queues, records of operations, and copies within matrix products. Measured: the mean of runs with 6 to 250 MB of tensors
/// on 2 and 4 ranks, all within 2 MB of it.
const OWN_PROCESS_BYTES: f64 = 4.5e6;
/// The program's pages in use, shared by the ranks and their launcher, where the system does not say. Measured like the bytes above,
/// with optimization.
const PROGRAM_BYTES: f64 = 6.5e6;

/// A batch of `rows` samples of this length in the memory of an allocator, without contents of its own.
pub fn batch_of(
    shape: &BatchShape,
    allocator: &Allocator,
    rows: usize,
    longest: usize,
) -> std::result::Result<Batch, MemoryError> {
    let tensors = shape.tensors(rows, longest).into_iter().map(|tensor| {
        Ok((tensor.name, allocator.tensor(tensor.dtype, tensor.dims.as_slice(), Category::Data)?))
    });
    Ok(Batch::of(tensors.collect::<std::result::Result<Vec<_>, MemoryError>>()?))
}

/// The outcome of a rehearsal. `None` if a layer of the user's own reads values, which a rehearsal lacks.
pub(super) fn if_possible<T>(
    rehearsed: std::result::Result<T, ModelError>,
) -> std::result::Result<Option<T>, ModelError> {
    match rehearsed {
        Ok(rehearsal) => Ok(Some(rehearsal)),
        Err(
            ModelError::Memory(MemoryError::NoContents(_))
            | ModelError::Kernel(KernelError::Memory(MemoryError::NoContents(_))),
        ) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A run whose memory is predicted.
#[derive(Clone)]
pub struct Shape<'a> {
    /// Its configuration.
    pub config: &'a TrainConfig,
    /// Its data.
    pub data: &'a OpenData,
    /// The strategy with its options; not always the strategy of the configuration.
    pub strategy: &'a StrategyConfig,
    /// The grid of ranks of this strategy.
    pub mesh: &'a MeshShape,
    /// Samples of a batch, by rank.
    pub rows: Vec<usize>,
    /// Bytes of the data sets, which each process keeps.
    pub data_set_bytes: f64,
    /// This process's share of the program's pages in use. Without optimization they are three times as many.
    pub program_bytes: f64,
}

impl<'a> Shape<'a> {
    /// The shape of a run on this data set.
    pub fn of(config: &'a TrainConfig, data: &'a OpenData) -> Self {
        let sets = [Some(&data.train), data.test.as_ref()].into_iter().flatten();
        let program_bytes = resources::program_bytes().map(|bytes| bytes as f64);
        Self {
            config,
            data,
            strategy: &config.strategy,
            mesh: &config.mesh,
            rows: rows(config, data.train.len()),
            data_set_bytes: sets.map(|of| config.data.resident_bytes(of.as_ref())).sum(),
            program_bytes: program_bytes
                .unwrap_or(PROGRAM_BYTES / (config.world_size as f64 + 1.0)),
        }
    }

    fn samples(&self) -> BatchShape {
        BatchShape::of(self.data.train.as_ref())
    }

    fn num_batches(&self) -> usize {
        self.strategy.micro_batches_of(self.strategy.accumulate.min(self.config.steps_per_epoch))
    }

    /// Whether the device has streams of its own, and copies batches.
    fn has_streams(&self) -> bool {
        matches!(self.config.device, Device::Sim(_))
    }
}

/// The most samples of a batch on each rank, with a data set of `len` samples.
fn rows(config: &TrainConfig, len: usize) -> Vec<usize> {
    let world = config.world_size;
    if let Some(of) = &config.micro_batches {
        return vec![config.global_batch_size.min(len).div_ceil(of.count()); world];
    }
    match &config.rank_samples {
        Some(samples) => samples.iter().map(|samples| config.batch_size.min(*samples)).collect(),
        None => {
            let all = config.global_batch_size.min(len);
            let shares = world / config.mesh.num_parts();
            let share = |rank| all / shares + usize::from(rank < all % shares);
            (0..world).map(|rank| share(config.mesh.of_part(rank).1)).collect()
        }
    }
}

/// The memory of one rank while it makes steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The most bytes at once, by category.
    by_category: [u64; Category::ALL.len()],
    /// The most bytes at once in all categories.
    pub total: u64,
    /// Memory other than tensors of a step, by purpose.
    pub besides: [(&'static str, u64); 4],
    /// The PSS of the rank, if it is a process: all of the above, and the memory of the process itself.
    pub resident: Option<u64>,
    /// Whether activations are only a lower bound, because the step cannot be rehearsed.
    pub is_at_least: bool,
}

impl Need {
    /// The most bytes of a category at once.
    pub fn of(&self, category: Category) -> u64 {
        self.by_category[category as usize]
    }

    /// The most bytes at once, with the rank's other memory.
    pub fn whole(&self) -> u64 {
        self.besides.iter().fold(self.total, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// All categories, and their sum, by name.
    pub fn bytes(&self) -> Bytes {
        let by_category = Category::ALL.map(|category| (category.name(), self.of(category)));
        let resident = self.resident.map(|bytes| (RESIDENT, bytes));
        let all = by_category.into_iter().chain([(TOTAL, self.total)]).chain(resident);
        all.map(|(name, bytes)| (name.to_owned(), bytes)).collect()
    }
}

/// The memory needs of the ranks of a run, each in its step.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// By rank.
    pub ranks: Vec<Need>,
}

impl Needs {
    /// The needs of the ranks of a run of this shape. `model` is built for their number.
    pub fn of(shape: &Shape, model: &Model) -> Result<Self> {
        let strategy = shape.strategy.build()?;
        let mut known: BTreeMap<(usize, usize), (Passes, Option<Model>)> = BTreeMap::new();
        let mut ranks = Vec::new();
        for (rank, &rows) in shape.rows.iter().enumerate() {
            let (passes, part) = match known.entry((rows, shape.mesh.coordinate(Axis::Pp, rank))) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(Passes::of_rank(shape, &*strategy, model, rank)?),
            };
            ranks.push(need(shape, &*strategy, part.as_ref().unwrap_or(model), passes, rank));
        }
        Ok(Self { ranks })
    }

    /// The needs of one rank of a run of this shape.
    pub fn of_rank(shape: &Shape, model: &Model, rank: usize) -> Result<Need> {
        let strategy = shape.strategy.build()?;
        let (passes, part) = Passes::of_rank(shape, &*strategy, model, rank)?;
        Ok(need(shape, &*strategy, part.as_ref().unwrap_or(model), &passes, rank))
    }

    /// The first of the ranks that need the most.
    pub fn largest_rank(&self) -> usize {
        let most = self.ranks.iter().map(|need| need.total).max();
        self.ranks.iter().position(|need| Some(need.total) == most).unwrap_or(0)
    }

    /// The needs of this rank.
    pub fn largest(&self) -> &Need {
        &self.ranks[self.largest_rank()]
    }

    /// The sum of the needs of the first `num_ranks` ranks.
    pub fn sum(&self, num_ranks: usize) -> f64 {
        // In floating point, because a batch may be larger than any memory.
        self.ranks.iter().take(num_ranks).map(|need| need.whole() as f64).sum()
    }
}

/// The memory needs of the passes of a step, which depend on the strategy only if gradients are clipped.
#[derive(Default)]
struct Passes {
    activations: u64,
    workspace: u64,
    both: u64,
    gaps: u64,
    is_at_least: bool,
}

impl Passes {
    fn rehearsed(rehearsal: &Rehearsal) -> Self {
        Self {
            activations: rehearsal.peak_bytes(Category::Activations),
            workspace: rehearsal.peak_bytes(Category::Workspace),
            both: rehearsal.peak_of_step_bytes(),
            gaps: rehearsal.gaps_bytes(),
            is_at_least: false,
        }
    }

    /// The needs of a rank and, if it has stages of a pipeline, the model with the layout of these.
    fn of_rank(
        shape: &Shape,
        strategy: &dyn Strategy,
        model: &Model,
        rank: usize,
    ) -> Result<(Self, Option<Model>)> {
        let (config, options) = (shape.config, shape.strategy.options);
        let precision = options.precision;
        let clipped = config
            .takes_grad_norm()
            .then(|| strategy.owned(model, &shape.mesh.of_part(0).0, 0).grads);
        let clipped = clipped.as_deref();
        let stages = config.pipeline.as_ref().and_then(|of| of.stages(shape.num_batches()));
        let rehearse = || -> std::result::Result<(Rehearsal, Option<Arc<Layout>>), ModelError> {
            let compute = Compute::new(config.threads, Allocator::meta())?;
            let samples = shape.samples();
            let longest = samples.max_length().unwrap_or(1);
            let batch = batch_of(&samples, &compute.allocator, shape.rows[rank], longest)?;
            if let Some(stages) = &stages {
                let place = (shape.mesh.size(Axis::Pp), shape.mesh.coordinate(Axis::Pp, rank));
                let rehearsed = rehearse_stages(model, stages, place, precision, &compute, &batch);
                let (layout, rehearsal) = rehearsed.map_err(|error| match error {
                    StrategyError::Model(error) => error,
                    other => ModelError::Config(other.to_string()),
                })?;
                return Ok((rehearsal, Some(layout)));
            }
            // The third micro-batch of a step would need as much as the second one.
            let batches = vec![batch; shape.num_batches().clamp(1, 2)];
            let syncs = options.sync_batch_norm;
            Ok((Rehearsal::of(model, precision, &compute, &batches, clipped, syncs)?, None))
        };
        match if_possible(rehearse()) {
            Ok(Some((rehearsal, layout))) => {
                let passes = Self::rehearsed(&rehearsal);
                let part = |layout| -> Result<Model> {
                    let built = config.model.build(shape.data.train.as_ref(), shape.rows.len())?;
                    Ok(Model { layout, ..built })
                };
                Ok((passes, layout.map(part).transpose()?))
            }
            Ok(None) => Ok((Self { is_at_least: true, ..Self::default() }, None)),
            // More bytes than a number has room for.
            Err(
                ModelError::Memory(MemoryError::OutOfMemory { .. })
                | ModelError::Kernel(KernelError::Memory(MemoryError::OutOfMemory { .. })),
            ) => {
                let (activations, both) = (u64::MAX, u64::MAX);
                Ok((Self { activations, both, is_at_least: true, ..Self::default() }, None))
            }
            Err(error) => Err(Failure::Usage(format!("the memory of a step: {error}"))),
        }
    }
}

fn need(
    shape: &Shape,
    strategy: &dyn Strategy,
    model: &Model,
    passes: &Passes,
    rank: usize,
) -> Need {
    let (config, options) = (shape.config, shape.strategy.options);
    let precision = options.precision;
    let ([footprint, copy], state) = of_strategy(shape, strategy, model, rank);
    let state_bytes = state * precision.master.size_bytes();
    let num_partial_sums = options.num_partial_sums(shape.num_batches());
    let bytes_of = |category: Category| -> u64 {
        match category {
            Category::Parameters => (footprint.parameters + copy.parameters) as u64,
            // Sums over earlier micro-batches are as long as the gradients.
            Category::Gradients => {
                (footprint.gradients * (1 + num_partial_sums) + copy.gradients) as u64
            }
            Category::Optimizer => {
                (state_bytes * config.optimizer.config().state_names().len()) as u64
            }
            Category::Unsharded => footprint.unsharded as u64,
            Category::Activations => passes.activations,
            Category::Workspace => passes.workspace,
            Category::Communication => (footprint.communication + SHARED_SUMS_BYTES) as u64,
            Category::Data => data_bytes(shape, shape.rows[rank]),
            Category::Snapshots => snapshot_bytes(shape, strategy, model, rank),
        }
    };
    let by_category = Category::ALL.map(bytes_of);
    let in_passes = [Category::Activations, Category::Workspace];
    let lasting = Category::ALL.into_iter().filter(|category| !in_passes.contains(category));
    let total = lasting
        .map(|category| by_category[category as usize])
        .fold(passes.both, u64::saturating_add);
    let process = OWN_PROCESS_BYTES + shape.program_bytes;
    let profile = config.profile.as_ref();
    let events =
        profile.map_or(0, |of| events_bytes(of, config.threads, shape.has_streams()) as u64);
    let besides = [
        ("the data set", shape.data_set_bytes as u64),
        ("events of --profile", events),
        ("gaps between buffers", passes.gaps),
        ("batches to evaluate on", evaluated_bytes(shape, shape.rows[rank])),
    ];
    let mut need =
        Need { by_category, total, besides, resident: None, is_at_least: passes.is_at_least };
    let has_processes = config.transport != TransportName::Thread;
    need.resident = has_processes.then_some(need.whole().saturating_add(process as u64));
    need
}

/// The memory of the strategy and that of a copy of another rank's shard, and the elements with optimizer state in both.
fn of_strategy(
    shape: &Shape,
    strategy: &dyn Strategy,
    model: &Model,
    rank: usize,
) -> ([Footprint; 2], usize) {
    let (precision, copies) = (shape.strategy.options.precision, shape.config.replicate_shards);
    let (mesh, place) = shape.mesh.of_part(rank);
    let footprint = strategy.footprint(model, precision, &mesh, place);
    let (mut copy, mut state) = (Footprint::default(), strategy.owned(model, &mesh, place).state);
    if copies > 1 {
        copy = Commit::footprint((strategy, copies), model, precision, &mesh, place);
        let copied = PeerShard::owned_by(strategy, model, &mesh, place);
        state.extend(copied.into_iter().flat_map(|of| of.state));
    }
    ([footprint, copy], state.iter().map(Range::len).sum())
}

/// The most bytes that a rank copies for a checkpoint: its part of the values and of the optimizer's state, divided evenly among
/// ranks that own the same elements. The copy shrinks while it is written.
fn snapshot_bytes(shape: &Shape, strategy: &dyn Strategy, model: &Model, rank: usize) -> u64 {
    let config = shape.config;
    if config.checkpoints.save.is_none() {
        return 0;
    }
    let (mesh, rank) = shape.mesh.of_part(rank);
    let owned = |rank| strategy.owned(model, &mesh, rank);
    let part = |of: fn(&Owned) -> &Vec<Range<usize>>, all: usize| -> f64 {
        let len = |rank| of(&owned(rank)).iter().map(Range::len).sum::<usize>() as f64;
        let held: f64 = (0..shape.rows.len() / shape.mesh.num_parts()).map(len).sum();
        if held > 0.0 { len(rank) * all as f64 / held } else { 0.0 }
    };
    let (layout, copies) = (&model.layout, config.optimizer.config().state_names().len());
    let elems = part(|of| &of.values, layout.len())
        + part(|of| &of.state, layout.trained_len()) * copies as f64;
    let elem_bytes = shape.strategy.options.precision.master.size_bytes() as f64;
    let most = config.checkpoints.budget_bytes().unwrap_or(usize::MAX);
    ((elems * elem_bytes) as u64).min(most as u64)
}

/// The batches of an evaluation between steps, in addition to those of training.
fn evaluated_bytes(shape: &Shape, rows: usize) -> u64 {
    let test = shape.data.test.as_deref().filter(|_| shape.config.evaluation.eval_every.is_some());
    let of_row = test.map_or(0, |test| BatchShape::of(test).max_bytes());
    let num_ahead = if shape.has_streams() { 0 } else { BATCHES_AHEAD };
    (of_row as u64).saturating_mul(rows as u64).saturating_mul(1 + num_ahead as u64)
}

/// The batches of the step, and those that the loader's thread has made or makes.
fn data_bytes(shape: &Shape, rows: usize) -> u64 {
    let (config, num_batches) = (shape.config, shape.num_batches());
    let num_ahead = match (shape.has_streams(), config.load_ahead) {
        (true, _) if config.copies.copy_stream => num_batches,
        (true, _) | (_, 0) => 0,
        // One more is being made.
        (_, depth) => depth + 1,
    };
    let of_run = config.steps_per_epoch.saturating_mul(config.epochs);
    let count = (num_batches + num_ahead).min(of_run).max(1);
    (shape.samples().max_bytes() as u64).saturating_mul(rows as u64).saturating_mul(count as u64)
}
