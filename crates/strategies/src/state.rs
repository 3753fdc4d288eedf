//! The state of a rank's training, and the context that the methods of a strategy get.
//!
//! Input: a replica, which no step changes. Output: all else that a step changes. This file knows
//! nothing of strategies.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use paceline_collectives::{OpTimes, ReduceOp, Work};
use paceline_kernels::Compute;
use paceline_kernels::loss::SUMS_LEN;
use paceline_memory::{Category, DType, Shape, Tensor};
use paceline_model::{Batch, ParamId};
use paceline_schedule::{Action, Plan};
use paceline_trace::{Span, SpanTrack, now_ns};

use crate::accumulation::PartialSums;
use crate::graphs::{PassGraphs, StepPasses};
use crate::observer::Observer;
use crate::replica::{NUM_SHARED_SUMS, shared_tensor};
use crate::span;
use crate::{Replica, Result};

/// The requests of a rank to all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asks {
    /// To stop.
    pub to_stop: bool,
    /// To meet again, because others wait to join them.
    pub to_regroup: bool,
}

/// The state of a rank's training: what the steps change, and what the caller says about the next one.
#[derive(Debug)]
pub struct StepState {
    /// The requests of this rank to all ranks for after the next step. They learn of them with the loss, so all do it after the same step.
    pub asks: Asks,
    /// The factor of the loss in the next step, the same on all ranks. Gradients have it too, and
    /// [`clip_factor`](crate::clip_factor) and the optimizer
    /// ([`Optimizer::set_grad_factor`](paceline_model::Optimizer::set_grad_factor)) divide by it. 1 by default.
    pub loss_scale: f64,
    /// Whether the ranks synchronize in the next step. If not, the strategy gets no gradients, and the loss is not shared. True by
    /// default; see [`SyncBlocks`](crate::SyncBlocks).
    pub synchronizes: bool,
    /// The number of samples on which this rank has trained.
    num_samples: u64,
    pub(crate) sums: LossSums,
    /// The gradients of other micro-batches of the step, if they are not in place.
    pub(crate) partial_sums: PartialSums,
    /// The parameters that the first step left out, if the graph is static.
    pub(crate) left_out: Option<Arc<UnusedParams>>,
    pub(crate) executor: ExecutorState,
    /// The passes of steps as graphs of a card, if they are launched as such.
    pub(crate) graphs: Option<PassGraphs>,
}

/// Sums over the samples of a step.
#[derive(Debug)]
pub(crate) struct LossSums {
    /// The objective's sums over this rank's shares: f64 (3), or (micro-batches, 3) if they are added up by micro-batch.
    pub(crate) own: Tensor,
    /// Memory of the host for the sums of all ranks: the losses, the correct samples, and the ranks that ask to stop and to meet
    /// again: f64 (4).
    pub(crate) on_host: Tensor,
    /// Destination of these sums: the same memory, or the device's, so that no pass waits for the host to read them.
    pub(crate) of_all: Tensor,
}

impl LossSums {
    /// Has a row for each of `count` micro-batches.
    pub(crate) fn hold_rows(&mut self, compute: &Compute, count: usize) -> Result<()> {
        let len = count.max(1) * SUMS_LEN;
        if self.own.num_elems() != len {
            self.own = compute.allocator.tensor(DType::F64, [len], Category::Workspace)?;
        }
        Ok(())
    }
}

/// The parameters that a step did not use, or used only in part.
#[derive(Clone, Debug)]
pub(crate) struct UnusedParams {
    /// The step wrote nothing to their gradients.
    pub(crate) unused: Vec<ParamId>,
    /// The step wrote a part of their gradients: not all layers that hold them were used, or not in the last micro-batch.
    pub(crate) unfinished: Vec<ParamId>,
}

/// An action as it was carried out. Times are nanoseconds of [`now_ns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActionTimes {
    /// The action.
    pub action: Action,
    /// Arithmetic: when it ran. A message: when it was handed to its queue.
    pub span: Span,
    /// Since when the rank had nothing else to do, and the message for which it waited, if any.
    pub awaited: Option<(u64, OpTimes)>,
}

/// The part of the state that the executor changes.
#[derive(Debug, Default)]
pub(crate) struct ExecutorState {
    /// Takes digests of tensors, if layouts are to be compared.
    pub(crate) observer: Option<Observer>,
    /// The actions of all ranks in a step of as many micro-batches as the last one.
    plan: Option<Arc<Plan>>,
    /// The actions of the last step, in order.
    pub(crate) actions: Vec<ActionTimes>,
    /// Messages that may still travel, with their tensors. A sender need not wait for the receiver.
    pub(crate) sending: Vec<(Work, Tensor)>,
    /// The inputs of the stages, by the extents of a batch.
    inputs: HashMap<Vec<usize>, Arc<[(Shape, DType)]>>,
}

impl StepState {
    /// The state before the first step of a replica. Every rank calls this.
    pub fn new(replica: &Replica) -> Result<Self> {
        let Replica { model, compute, world, options, pipeline, .. } = replica;
        let on_host = shared_tensor(world, &compute.host, DType::F64, NUM_SHARED_SUMS)?;
        let memory = &compute.allocator;
        let of_all = match memory.home() {
            Some(_) => memory.tensor(DType::F64, [NUM_SHARED_SUMS], Category::Communication)?,
            None => on_host.clone(),
        };
        let own = memory.tensor(DType::F64, [SUMS_LEN], Category::Workspace)?;
        let plan = Some(Arc::new(pipeline.plan(pipeline.stages.micro_batches)?));
        let graphs = options.as_graph.then(|| PassGraphs::new(memory, world)).transpose()?;
        Ok(Self {
            asks: Asks::default(),
            loss_scale: 1.0,
            synchronizes: true,
            num_samples: 0,
            sums: LossSums { own, on_host, of_all },
            partial_sums: pipeline.partial_sums(model),
            left_out: None,
            executor: ExecutorState { plan, ..ExecutorState::default() },
            graphs,
        })
    }

    /// The actions of this rank in the last step, in order.
    pub fn actions(&self) -> &[ActionTimes] {
        &self.executor.actions
    }

    /// The observer that takes digests of the tensors of a step, if layouts are to be compared.
    pub fn observer(&mut self) -> &mut Option<Observer> {
        &mut self.executor.observer
    }

    /// Continues a run in which this rank has trained on `num_samples` samples.
    pub fn resume_after(&mut self, num_samples: u64) {
        self.num_samples = num_samples;
    }

    /// Remembers a step that has succeeded: how many samples it had, what it left out, and its graph.
    pub(crate) fn end_step(
        &mut self,
        num_samples: usize,
        left_out: Option<UnusedParams>,
        graph: Option<StepPasses>,
    ) {
        self.num_samples += num_samples as u64;
        if let Some(left_out) = left_out {
            self.left_out.get_or_insert(Arc::new(left_out));
        }
        if let Some((graphs, graph)) = self.graphs.as_mut().zip(graph) {
            graphs.keep(graph);
        }
    }
}

/// The context of a strategy's methods.
///
/// See the example of [`Strategy`](crate::Strategy).
#[derive(Debug)]
pub struct StepContext<'a> {
    /// The model, its memory, and the groups of ranks.
    pub replica: &'a Replica,
    /// The state of the training.
    pub state: &'a mut StepState,
    /// Records the spans of the step.
    pub track: &'a mut SpanTrack,
}

impl StepContext<'_> {
    /// The same context, for a shorter time.
    pub(crate) fn reborrow(&mut self) -> StepContext<'_> {
        StepContext { replica: self.replica, state: self.state, track: self.track }
    }

    /// Waits for an operation of this step, and records the time as [`span::EXPOSED`].
    pub fn wait(&mut self, work: &Work) -> Result<OpTimes> {
        Ok(self.track.record(span::EXPOSED, || work.wait())?)
    }

    /// Records that the ranks of a pipeline have waited for each other since `start_ns`.
    pub(crate) fn end_barrier(&mut self, start_ns: u64) {
        if self.replica.is_stage() {
            self.track.push(span::BARRIER, Span { start_ns, end_ns: now_ns() });
        }
    }

    pub(crate) fn plan(&mut self, micro_batches: usize) -> Result<Arc<Plan>> {
        let known = self.state.executor.plan.as_ref();
        if let Some(plan) = known.filter(|plan| plan.shape().micro_batches == micro_batches) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(self.replica.pipeline.plan(micro_batches)?);
        self.state.executor.plan = Some(plan.clone());
        Ok(plan)
    }

    /// The shape and element type of each stage's input.
    pub(crate) fn stage_inputs(&mut self, batch: &Batch) -> Result<Arc<[(Shape, DType)]>> {
        let Replica { model, options, pipeline, .. } = self.replica;
        let extents = batch.tensors().iter().flat_map(|(_, of)| of.dims().to_vec()).collect();
        Ok(match self.state.executor.inputs.entry(extents) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(new) => {
                new.insert(pipeline.inputs(model, options.precision, batch)?.into()).clone()
            }
        })
    }

    /// Gives all ranks the buffers of the rank that has trained on the most samples (the lowest such rank), for an evaluation or
    /// a checkpoint. Unless the statistics are synchronized, each rank's buffers follow its own samples. By micro-batch, those of
    /// the first rank follow the first micro-batch of each step.
    pub fn sync_buffers(&mut self) -> Result<()> {
        let Replica { group, storage, options, .. } = self.replica;
        if storage.buffers().num_elems() == 0 || group.world_size() == 1 {
            return Ok(());
        }
        if options.is_one_tree() {
            return self.replica.broadcast_buffers(0, self.track);
        }
        let mut samples = vec![0; group.world_size()];
        samples[group.rank()] = self.state.num_samples as i64;
        let sum = || group.all_reduce_slice(&mut samples, ReduceOp::Sum);
        self.track.record(span::EXPOSED, sum)?;
        let most = samples.iter().max();
        let root = samples.iter().position(|count| Some(count) == most).unwrap_or(0);
        self.replica.broadcast_buffers(root, self.track)
    }
}
