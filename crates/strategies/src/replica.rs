//! What a strategy works on: one rank's copy of the model.

use paceline_collectives::{Group, ReduceOp};
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{GradientBooks, Model, ParamId, Storage};
use paceline_trace::SpanTrack;

use crate::strategy::span;
use crate::{Result, Strategy};

/// One rank's share of a batch.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// The rank's samples (n, ...); n may be zero at the tail of an epoch.
    pub inputs: Tensor,
    /// Their targets: labels (n) or values (n, columns).
    pub targets: Tensor,
    /// Samples in the shares of all ranks together.
    pub global_count: usize,
}

/// What the training step does beyond gradients, whatever the strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaOptions {
    /// Rank 0's running statistics are copied to all others before each step.
    pub broadcast_buffers: bool,
    /// Batch norm takes its statistics over the samples of all ranks. Its sums are blocking operations
    /// between those of the gradients, so ranks that leave out different layers cannot use it: they get
    /// an error that names both operations.
    pub sync_batch_norm: bool,
    /// Parameters may be left out of a step; their gradient is zero then. Otherwise that is an error.
    pub find_unused_parameters: bool,
    /// Every step leaves out the parameters that the first one left out, so that nobody waits for
    /// their gradients.
    pub static_graph: bool,
}

impl Default for ReplicaOptions {
    fn default() -> Self {
        Self {
            broadcast_buffers: false,
            sync_batch_norm: false,
            find_unused_parameters: false,
            static_graph: true,
        }
    }
}

/// One rank's copy of the model, with its means of computing and communicating.
#[derive(Debug)]
pub struct Replica {
    /// The network and its loss.
    pub model: Model,
    /// Its parameters and gradients.
    pub storage: Storage,
    /// Threads, instructions and memory.
    pub compute: Compute,
    /// The ranks that train together.
    pub group: Group,
    /// What the training step does beyond gradients.
    pub options: ReplicaOptions,
    /// Sums over the batch that all ranks agree on: loss, correct.
    pub(crate) sums: Tensor,
    /// Which gradients the step has written.
    pub(crate) books: GradientBooks,
    /// Samples that this rank has trained on.
    pub(crate) num_samples: u64,
    /// What the first step left out, where every other one does too.
    pub(crate) left_out: Option<LeftOut>,
}

/// The parameters that a step did not use, or not to the end.
#[derive(Debug)]
pub(crate) struct LeftOut {
    /// It wrote nothing of their gradients.
    pub(crate) unused: Vec<ParamId>,
    /// It wrote a part: not all layers that hold them were used, or not in the last micro-batch.
    pub(crate) unfinished: Vec<ParamId>,
}

/// A flat tensor of `len` elements for communication, where peers can reduce it in place.
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
    /// A replica in memory of the strategy's choice, with parameters as the seed gives them on rank
    /// 0, everywhere; the strategy is ready to train it.
    pub fn new(
        strategy: &mut dyn Strategy,
        model: Model,
        compute: Compute,
        group: Group,
        seed: u64,
        options: ReplicaOptions,
    ) -> Result<Self> {
        let storage = strategy.backing(&model, &compute, &group)?;
        let sums = shared_tensor(&group, &compute.allocator, DType::F64, 2)?;
        storage.initialize(seed)?;
        group.broadcast(storage.values(), 0)?;
        let books = GradientBooks::new(&model.layout);
        let replica = Self {
            model,
            storage,
            compute,
            group,
            options,
            sums,
            books,
            num_samples: 0,
            left_out: None,
        };
        strategy.prepare(&replica)?;
        Ok(replica)
    }

    /// Goes on where a run stands in which this rank has trained on so many samples.
    pub fn resume_after(&mut self, num_samples: u64) {
        self.num_samples = num_samples;
    }

    /// Copies the buffers of rank `root`, the running statistics of batch norm, to all other ranks. Of a
    /// model without buffers there is nothing to copy, and no communication.
    pub fn broadcast_buffers(&self, root: usize, track: &mut SpanTrack) -> Result<()> {
        let buffers = self.storage.buffers();
        if buffers.num_elems() > 0 && self.group.world_size() > 1 {
            track.record(span::EXPOSED, || self.group.broadcast(buffers, root))?;
        }
        Ok(())
    }

    /// Gives all ranks the same buffers. Each rank's follow its own samples, unless the statistics are
    /// synchronised, and whoever evaluates, or wants the model of the run, needs the same ones everywhere:
    /// those of the rank that has trained on most samples, the first of equals.
    pub fn settle_buffers(&self, track: &mut SpanTrack) -> Result<()> {
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
