//! A replica: one rank's copy of the model, on which a strategy works.
//!
//! Input: a model, a group and a strategy. Output: parameters that begin equal on every rank. This module
//! knows nothing of how gradients are communicated.

use std::ops::Range;

use paceline_collectives::{Axis, Group, Mesh, ReduceOp};
use paceline_kernels::Compute;
use paceline_kernels::loss::SUMS_LEN;
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{
    Batch, Layout, Model, OpenUnits, Optimizer, OptimizerConfig, Owned, ParamId, Precision,
    Storage, UnitId,
};
use paceline_schedule::Plan;
use paceline_trace::{Span, SpanTrack, now_ns};

use crate::accumulation::PartialSums;
use crate::executor::{Acted, Executed};
use crate::graphs::PassGraphs;
use crate::pipeline::Pipeline;
use crate::strategy::span;
use crate::{AccumulationOrder, Result, Stages, Strategy};

/// The number of sums that the ranks share in a step: the loss, the correct samples, and the ranks that ask to stop.
pub(crate) const NUM_SHARED_SUMS: usize = 3;

/// Bytes that a replica takes for these sums, beside what the strategy takes for communication.
pub const SHARED_SUMS_BYTES: usize = NUM_SHARED_SUMS * size_of::<f64>();

/// One rank's share of a micro-batch.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// The rank's samples; there may be none at the end of an epoch.
    pub batch: Batch,
    /// The number of samples in the shares of all ranks together.
    pub global_count: usize,
}

/// Options of the training step that do not depend on the strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaOptions {
    /// Copies rank 0's running statistics to all others before each step.
    pub broadcast_buffers: bool,
    /// Batch norm computes its statistics over the samples of all ranks. Its sums are blocking operations
    /// between the operations of the gradients. So ranks that leave out different layers cannot use this option: they
    /// get an error that names both operations.
    pub sync_batch_norm: bool,
    /// Allows steps that do not use some parameters. The gradients of these parameters are zero. If this is off, such a
    /// step is an error.
    pub find_unused_parameters: bool,
    /// Promises that every step leaves out the same parameters as the first step, so that no rank waits for
    /// their gradients.
    pub static_graph: bool,
    /// The order in which a rank adds up the gradients of its micro-batches.
    pub accumulation: AccumulationOrder,
    /// Whether gradients are reduced only after the last micro-batch of a step, as in PyTorch's `no_sync`. Otherwise they are
    /// reduced after each one, and the reduced gradients are added up as a tree, whatever `accumulation` says.
    pub no_sync: bool,
    /// The element types of parameters, gradients and activations.
    pub precision: Precision,
    /// Launches the passes of a step as one graph of a card, and the optimizer's work as another: see
    /// [`train_step`](crate::train_step). The gradients of micro-batches have to be added up in place, and a pass must not
    /// communicate.
    pub as_graph: bool,
    /// Promises that nothing looks at the gradients between [`train_step`](crate::train_step) and
    /// [`Strategy::optimizer_step`]. Then a strategy may wait for a part of them only before it updates the parameters of that
    /// part.
    pub steps_by_bucket: bool,
}

impl ReplicaOptions {
    /// What [`ReplicaOptions::default`] returns.
    pub const DEFAULT: Self = Self {
        broadcast_buffers: false,
        sync_batch_norm: false,
        find_unused_parameters: false,
        static_graph: true,
        accumulation: AccumulationOrder::Sequential,
        no_sync: true,
        precision: Precision::F32,
        as_graph: false,
        steps_by_bucket: false,
    };

    /// The number of copies of the gradients that a step of `num_micro_batches` keeps: see
    /// [`AccumulationOrder::num_partial_sums`].
    pub fn num_partial_sums(&self, num_micro_batches: usize) -> usize {
        let order = if self.no_sync { self.accumulation } else { AccumulationOrder::Tree };
        order.num_partial_sums(num_micro_batches)
    }
}

impl Default for ReplicaOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// One rank's copy of the model, with its means of computing and communicating.
#[derive(Debug)]
pub struct Replica {
    /// The blocks and the objective.
    pub model: Model,
    /// What this rank owns of parameters, gradients and optimizer state.
    pub owned: Owned,
    /// The parameters and gradients.
    pub storage: Storage,
    /// Threads, instructions and memory.
    pub compute: Compute,
    /// All ranks.
    pub world: Group,
    /// The ranks that compute the same part of the model: all ranks, or those of a stage of a pipeline.
    pub group: Group,
    /// The same ranks as a grid, and the groups of its axes.
    pub mesh: Mesh,
    /// Options of the training step.
    pub options: ReplicaOptions,
    /// Whether this rank asks all ranks to stop after the next step. The ranks learn of it with the loss, so all of them
    /// stop after the same step.
    pub asks_to_stop: bool,
    /// The factor of the loss in the next step, the same on all ranks. Gradients have it too, and whoever reads them divides
    /// by it: [`clip_factor`](crate::clip_factor), and the optimizer by [`Optimizer::set_grad_factor`]. 1 by default.
    pub loss_scale: f64,
    /// The objective's sums over this rank's shares in the current step: f64 (3).
    pub(crate) own_sums: Tensor,
    /// Over all ranks: the sum of losses, the correct samples, and the number of ranks that ask to stop: f64 (3). Each rank
    /// knows the number of samples already.
    pub(crate) sums: Tensor,
    /// Those that end as the loss: the same memory, or that of the device, so that no pass waits for the host to read them.
    pub(crate) loss_sums: Tensor,
    /// Which units are open, and which gradients the step has written.
    pub(crate) units: OpenUnits,
    /// The gradients of other micro-batches of the step, if they are not in place.
    pub(crate) partial_sums: PartialSums,
    /// The number of samples on which this rank has trained.
    pub(crate) num_samples: u64,
    /// Which blocks this rank computes, in which order, and its messages.
    pub(crate) pipeline: Pipeline,
    /// What the ranks do in a step of as many micro-batches as the last one.
    pub(crate) plan: Option<Plan>,
    /// What this rank has done in the last step.
    pub(crate) executed: Executed,
    /// The parameters that the first step left out, if the graph is static.
    pub(crate) left_out: Option<LeftOut>,
    /// The passes of steps as graphs of a card, if they are launched as such.
    pub(crate) graphs: Option<PassGraphs>,
}

/// The parameters that a step did not use, or used only in part.
#[derive(Clone, Debug)]
pub(crate) struct LeftOut {
    /// The step wrote nothing to their gradients.
    pub(crate) unused: Vec<ParamId>,
    /// The step wrote a part of their gradients: not all layers that hold them were used, or not in the last
    /// micro-batch.
    pub(crate) unfinished: Vec<ParamId>,
}

/// Allocates a flat tensor of `len` elements for communication, which peers can reduce in place.
pub(crate) fn shared_tensor(
    group: &Group,
    allocator: &Allocator,
    dtype: DType,
    len: usize,
) -> Result<Tensor> {
    let bytes = len * dtype.size_bytes();
    let memory = group.allocate(allocator, bytes, Category::Communication)?;
    Ok(Tensor::new(memory, 0, dtype, [len])?)
}

/// Gives the ranks along an axis that hold the same values those of the first of them, one axis after the other: hosts with
/// other mathematical libraries may compute other initial values. `held` has the ranges that each rank holds.
fn share_values(mesh: &Mesh, storage: &Storage, held: &[Vec<Range<usize>>]) -> Result<()> {
    let rank = mesh.world().rank();
    for &(axis, size) in mesh.shape().axes() {
        let is_same = mesh.shape().along(axis, rank).iter().all(|other| held[*other] == held[rank]);
        if let Some(group) = mesh.group(axis).filter(|_| size > 1 && is_same) {
            group.broadcast(storage.values().tensor(), 0)?;
        }
    }
    Ok(())
}

impl Replica {
    /// A replica in memory that the strategy allocates, on ranks that form a mesh, or on a group without axes. All ranks
    /// begin with the parameters that follow from rank 0's seed. Ranks along an axis that hold the same parameters begin
    /// with those of the first of them. Prepares the strategy to train the replica.
    pub fn new(
        strategy: &mut dyn Strategy,
        model: Model,
        compute: Compute,
        ranks: impl Into<Mesh>,
        seed: u64,
        options: ReplicaOptions,
    ) -> Result<Self> {
        let mesh = ranks.into();
        let (world, pipeline) = (mesh.world().clone(), Pipeline::alone(&model, options.precision));
        Self::of_stage(strategy, model, compute, (world, mesh), pipeline, (seed, options))
    }

    /// A replica whose model is divided along the axis `pp` of the mesh: this rank has the parameters of its stages only, and
    /// shares them with the ranks of the same place on this axis. The strategy keeps those equal. Each rank that uses a
    /// parameter of a root unit has a copy of it, and all copies get the sum of their gradients.
    ///
    /// Errors also if the model cannot be divided like this, if the lists of the schedule do not fit together, or if the schedule
    /// needs something that the options or the strategy do not have.
    pub fn in_stages(
        strategy: &mut dyn Strategy,
        mut model: Model,
        compute: Compute,
        mesh: Mesh,
        stages: &Stages,
        (seed, options): (u64, ReplicaOptions),
    ) -> Result<Self> {
        let pipeline = Pipeline::new(&model, options.precision, &mesh, stages)?;
        let world = mesh.world().clone();
        let plan = pipeline.plan(stages.micro_batches)?;
        pipeline.check(&options, strategy)?;
        model.layout = pipeline.part(&model)?;
        let stage = world.split(Some(mesh.coordinate(Axis::Pp) as u32))?;
        let stage = stage.expect("a rank that passes a color gets a group");
        let mesh = Mesh::new(stage, &mesh.shape().without(Axis::Pp))?;
        let mut replica =
            Self::of_stage(strategy, model, compute, (world, mesh), pipeline, (seed, options))?;
        replica.plan = Some(plan);
        Ok(replica)
    }

    fn of_stage(
        strategy: &mut dyn Strategy,
        model: Model,
        compute: Compute,
        (world, mesh): (Group, Mesh),
        pipeline: Pipeline,
        (seed, options): (u64, ReplicaOptions),
    ) -> Result<Self> {
        let group = mesh.world().clone();
        let storage = strategy.allocate(&model, options.precision, &compute, &mesh)?;
        let owned = strategy.owned(&model, mesh.shape(), group.rank());
        // The host reads and writes them.
        let sums = shared_tensor(&world, &compute.host, DType::F64, NUM_SHARED_SUMS)?;
        let loss_sums = match compute.allocator.home() {
            Some(_) => {
                let memory = &compute.allocator;
                memory.tensor(DType::F64, [NUM_SHARED_SUMS], Category::Communication)?
            }
            None => sums.clone(),
        };
        let own_sums = compute.allocator.tensor(DType::F64, [SUMS_LEN], Category::Workspace)?;
        let of_whole = (&compute, pipeline.ranks.is_some());
        let graphs = options.as_graph.then(|| PassGraphs::new(strategy, &options, of_whole));
        let graphs = graphs.transpose()?;
        let mut seeds = [seed as i64];
        world.broadcast_slice(&mut seeds, 0)?;
        storage.initialize(seeds[0] as u64)?;
        let held = group.all_gather_object(&storage.values().ranges().to_vec())?;
        share_values(&mesh, &storage, &held)?;
        pipeline.share_tied(&model.layout, &storage)?;
        let units = OpenUnits::new(&model.layout);
        let partial_sums = pipeline.partial_sums(&model);
        let replica = Self {
            model,
            owned,
            storage,
            compute,
            world,
            group,
            mesh,
            options,
            asks_to_stop: false,
            loss_scale: 1.0,
            own_sums,
            sums,
            loss_sums,
            units,
            partial_sums,
            num_samples: 0,
            pipeline,
            plan: None,
            executed: Executed::default(),
            left_out: None,
            graphs,
        };
        strategy.prepare(&replica)?;
        Ok(replica)
    }

    /// Records that the ranks of a pipeline have waited for each other until now.
    pub(crate) fn ends_barrier(&self, start_ns: u64, track: &mut SpanTrack) {
        if self.is_stage() {
            track.push(span::BARRIER, Span { start_ns, end_ns: now_ns() });
        }
    }

    /// The layout of the model of all stages. Without a pipeline it is that of this replica.
    pub fn whole_layout(&self) -> &Layout {
        &self.pipeline.layout
    }

    /// Whether a strategy may leave gradients on their way until the optimizer needs them: the options promise it, and neither
    /// the sum of tied gradients of a pipeline, nor that of several reductions, nor a graph needs all of them before.
    pub(crate) fn steps_by_bucket(&self) -> bool {
        let ReplicaOptions { steps_by_bucket, no_sync, as_graph, .. } = self.options;
        steps_by_bucket && no_sync && !as_graph && !self.is_stage()
    }

    /// Whether this rank has a stage of a pipeline, and other ranks have the others.
    pub fn is_stage(&self) -> bool {
        self.pipeline.ranks.is_some()
    }

    /// Whether this rank's copy of a unit counts: of the stages that have one, a single stage writes it.
    pub fn speaks_for(&self, unit: UnitId) -> bool {
        self.pipeline.speaks_for(&self.model, unit)
    }

    /// What this rank has done in the last step, in order.
    pub fn acted(&self) -> &[Acted] {
        &self.executed.acted
    }

    /// Continues a run in which this rank has trained on `num_samples` samples.
    pub fn resume_after(&mut self, num_samples: u64) {
        self.num_samples = num_samples;
    }

    /// Copies the buffers of rank `root`, the running statistics of batch norm, to all other ranks. A model
    /// without buffers has nothing to copy and does not communicate.
    pub fn broadcast_buffers(&self, root: usize, track: &mut SpanTrack) -> Result<()> {
        let buffers = self.storage.buffers();
        if buffers.num_elems() > 0 && self.group.world_size() > 1 {
            track.record(span::EXPOSED, || self.group.broadcast(buffers, root))?;
        }
        Ok(())
    }

    /// An optimizer of the parameters whose state this rank owns, before its first step.
    pub fn optimizer(&self, config: OptimizerConfig) -> Result<Optimizer> {
        let ranges = self.owned.state.clone();
        let memory = &self.compute.allocator;
        let optimizer = Optimizer::of_ranges(config, &self.storage, ranges, memory)?;
        Ok(if self.options.as_graph {
            optimizer.as_graph(&self.storage, memory)?
        } else {
            optimizer
        })
    }

    /// Gives all ranks the same buffers. Unless the statistics are synchronized, each rank's buffers follow
    /// its own samples. But an evaluation and a checkpoint need the same buffers on every rank. All ranks take the
    /// buffers of the rank that has trained on the most samples (the lowest such rank).
    pub fn sync_buffers(&self, track: &mut SpanTrack) -> Result<()> {
        if self.storage.buffers().num_elems() == 0 || self.group.world_size() == 1 {
            return Ok(());
        }
        let mut samples = vec![0; self.group.world_size()];
        samples[self.group.rank()] = self.num_samples as i64;
        let sum = || self.group.all_reduce_slice(&mut samples, ReduceOp::Sum);
        track.record(span::EXPOSED, sum)?;
        let most = samples.iter().max();
        let root = samples.iter().position(|count| Some(count) == most).unwrap_or(0);
        self.broadcast_buffers(root, track)
    }
}
