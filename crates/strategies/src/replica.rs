//! A replica: one rank's copy of the model, on which a strategy works.
//!
//! Input: what a rank has, made by `setup.rs`. Output: questions about it, and its buffers on all ranks. A step changes only the
//! contents of its memory. This file does not know how gradients are communicated.

use std::borrow::Cow;

use paceline_collectives::{Group, Mesh, ReduceOp};
use paceline_kernels::{Compute, elementwise};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{
    Batch, Held, Layout, Model, Optimizer, OptimizerConfig, Owned, Param, Precision, Storage,
    UnitId,
};
use paceline_trace::SpanTrack;

use crate::pipeline::Pipeline;
use crate::{AccumulationOrder, Result, span};

/// The number of sums that the ranks share in a step: the loss, the correct samples, and the ranks that ask to stop and to meet again.
pub(crate) const NUM_SHARED_SUMS: usize = 4;

/// Bytes for these sums, in addition to those of the strategy.
pub const SHARED_SUMS_BYTES: usize = NUM_SHARED_SUMS * size_of::<f64>();

/// One rank's share of a micro-batch.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// The rank's samples; it may have no sample at the end of an epoch.
    pub batch: Batch,
    /// The number of samples in the shares of all ranks together.
    pub global_count: usize,
}

/// Options of the training step that do not depend on the strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaOptions {
    /// Copies rank 0's running statistics to all others before each step.
    pub broadcast_buffers: bool,
    /// Batch norm computes its statistics over the samples of all ranks, with blocking operations
    /// between those of the gradients. So ranks that leave out different layers cannot use this option: they
    /// get an error that names both operations.
    pub sync_batch_norm: bool,
    /// Allows steps that do not use some parameters, whose gradients are then zero. Otherwise such a step is an error.
    pub find_unused_parameters: bool,
    /// Promises that every step leaves out the same parameters as the first, so that no rank waits for their gradients.
    pub static_graph: bool,
    /// The order in which a rank adds up the gradients of its micro-batches.
    pub accumulation: AccumulationOrder,
    /// Whether gradients are reduced only after the last micro-batch of a step, as in PyTorch's `no_sync`. Otherwise they are
    /// reduced after each one, and added up as a tree, whatever `accumulation` says.
    pub no_sync: bool,
    /// The element types of parameters, gradients and activations.
    pub precision: Precision,
    /// Launches the passes of a step as one graph of a card, and the optimizer's work as another: see
    /// [`train_step`](crate::train_step). Gradients must be added up in place, and a pass must not communicate.
    pub as_graph: bool,
    /// Promises that nothing looks at the gradients between [`train_step`](crate::train_step) and
    /// [`Strategy::optimizer_step`](crate::Strategy::optimizer_step). Then a strategy may wait for a part of them just before it
    /// updates their parameters.
    pub steps_by_bucket: bool,
}

impl ReplicaOptions {
    /// The default.
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

    /// Whether sums are those of one tree over the micro-batches of all ranks.
    pub fn is_one_tree(&self) -> bool {
        self.accumulation == AccumulationOrder::OneTree
    }

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
    /// The ranges of parameters, gradients and optimizer state that this rank owns.
    pub owned: Owned,
    /// The parameters and gradients.
    pub storage: Storage,
    /// Threads, instructions and memory.
    pub compute: Compute,
    /// All ranks.
    pub world: Group,
    /// The ranks that compute the same part of the model: all ranks, or those of a stage of a pipeline, or of a part of its layers.
    pub group: Group,
    /// The same ranks as a grid, and the groups of its axes.
    pub mesh: Mesh,
    /// The ranks that divide the layers of this rank's part of the model, if several do (tensor parallelism).
    pub tensor: Option<Group>,
    /// Options of the training step.
    pub options: ReplicaOptions,
    /// Which blocks this rank computes, in which order, and its messages.
    pub(crate) pipeline: Pipeline,
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

impl Replica {
    /// The layout of all stages, and of all ranks that divide layers.
    pub fn whole_layout(&self) -> Cow<'_, Layout> {
        match self.tensor {
            None => Cow::Borrowed(&self.pipeline.layout),
            Some(_) => Cow::Owned(self.pipeline.layout.whole()),
        }
    }

    /// Whether other ranks have other parts of the same layers, and this rank is not the first of them.
    fn is_further_part(&self) -> bool {
        self.tensor.as_ref().is_some_and(|ranks| ranks.rank() > 0)
    }

    /// Whether this rank's loss and samples count. All stages of a pipeline have the same samples, and all ranks that divide layers.
    pub fn counts_samples(&self) -> bool {
        self.pipeline.has_last_stage() && !self.is_further_part()
    }

    /// Whether this rank's copy of a parameter counts in norms and checkpoints: one of all stages' copies does, and one of those of the
    /// ranks that divide layers.
    pub fn counts(&self, param: &Param) -> bool {
        self.counts_unit(param.unit) && (param.part.is_some() || !self.is_further_part())
    }

    /// Whether a strategy may leave gradients on their way until the optimizer needs them: the options promise it, and no
    /// sum of tied gradients or of several reductions, and no graph, needs all of them before.
    pub(crate) fn steps_by_bucket(&self) -> bool {
        let ReplicaOptions { steps_by_bucket, no_sync, as_graph, .. } = self.options;
        steps_by_bucket && no_sync && !as_graph && !self.is_stage()
    }

    /// Whether the graph of a step's passes can have the communication of the gradients and of the loss, too: all ranks have the same
    /// part of the model, and NCCL connects them.
    pub(crate) fn sends_in_graph(&self) -> bool {
        let Self { world, group, compute, options, .. } = self;
        let are_alike = world.world_size() > 1 && world.number() == group.number();
        options.as_graph && are_alike && group.is_capturable(&compute.allocator)
    }

    /// How the gradients of the ranks are combined: by their mean, or by their sum if the loss is divided by all samples.
    pub fn reduce_op(&self) -> ReduceOp {
        if self.options.is_one_tree() { ReduceOp::Sum } else { ReduceOp::Mean }
    }

    /// The number of ranks over which gradients are averaged; 1 if they are added up.
    pub fn num_averaged(&self) -> usize {
        if self.options.is_one_tree() { 1 } else { self.group.world_size() }
    }

    /// Divides a sum over the ranks by their number, if gradients are averaged.
    pub(crate) fn average(&self, sum: &Tensor) -> Result<()> {
        if self.options.is_one_tree() {
            return Ok(());
        }
        Ok(elementwise::divide(&self.compute, sum, self.group.world_size() as f64)?)
    }

    /// Whether other ranks have other stages of a pipeline.
    pub fn is_stage(&self) -> bool {
        self.pipeline.ranks.is_some()
    }

    /// Whether this rank's running statistics of a unit count: those of one of the ranks that have them.
    pub fn counts_buffers(&self, unit: UnitId) -> bool {
        self.counts_unit(unit) && !self.is_further_part()
    }

    /// Whether this rank's stage has the copy of a unit that counts in norms and checkpoints.
    pub fn counts_unit(&self, unit: UnitId) -> bool {
        self.pipeline.counts_unit(&self.model, unit)
    }

    /// A whole parameter, or all parts of one whose first part is `param`, on all ranks that divide the model. `values` has those of
    /// its unit that this rank has; `None` if another stage has the unit. All these ranks call this.
    pub fn whole_param(&self, param: &Param, values: Option<&Held>) -> Result<Tensor> {
        let (dtype, memory) = (self.options.precision.master, &self.compute.allocator);
        let own = values.map(|values| self.with_all_parts(param, values)).transpose()?;
        self.pipeline.shared(&self.model, param, own, dtype, memory)
    }

    /// All parts of a parameter, from the ranks that have them.
    fn with_all_parts(&self, param: &Param, values: &Held) -> Result<Tensor> {
        if param.part.is_none() {
            return Ok(values.slice(param.range())?);
        }
        let (memory, dtype) = (&self.compute.host, values.dtype());
        let whole =
            memory.tensor(dtype, [param.whole_shape().num_elems()], Category::Communication)?;
        let (params, own) = (self.model.layout.params(), self.model.layout.divided().own());
        for of in params.iter().filter(|of| of.name == param.name) {
            let Some(part) = of.part else { continue };
            let len = of.shape.num_elems();
            let shared = memory.tensor(dtype, [len], Category::Communication)?;
            if own.contains(&part.index) {
                shared.copy_from(&values.slice(of.range())?.to_host()?)?;
            }
            if let Some(ranks) = &self.tensor {
                ranks.broadcast(&shared, part.index / own.len())?;
            }
            for (run, start) in of.in_whole(0..len) {
                let to = whole.slice(start..start + run.len())?;
                to.copy_from(&shared.slice(run)?)?;
            }
        }
        Ok(whole)
    }

    /// Copies the buffers of rank `root`, the running statistics of batch norm, to all other ranks. Does not communicate if
    /// there are no buffers.
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
}
