//! The passes of a training step as graphs of a card.
//!
//! Input: the micro-batches of a step. Output: the same samples at fixed addresses, and the graph of the steps that are like this
//! one: their micro-batches have the same shapes and their loss the same factor, because all else that the host
//! decides in a pass follows from the model. This file does not know what a pass does.
//!
//! A graph has what lies between two communications: zero the sums, forward, loss, backward. With NCCL and a strategy that allows it
//! ([`Strategy::is_capturable`]), it has the communication too. The host reads the loss before
//! the optimizer changes anything, so the optimizer's work is a graph of its own ([`paceline_model::Optimizer::as_graph`]).

use paceline_collectives::Group;
use paceline_memory::{Allocator, Category, DType, GraphPool, GraphedWork, Shape, Tensor};
use paceline_model::{Batch, ParamId};

use crate::state::UnusedParams;
use crate::{
    AccumulationOrder, MicroBatch, Replica, ReplicaOptions, Result, Strategy, StrategyError,
};

/// As many graphs are kept, of the kinds of the latest steps. Any other kind is captured again.
const MOST_GRAPHS: usize = 8;

/// A reason why the passes of a step cannot be launched as a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphObstacle {
    /// The stages of a pipeline send to each other.
    Stages,
    /// The strategy communicates.
    Strategy,
    /// [`ReplicaOptions::sync_batch_norm`]
    SyncBatchNorm,
    /// [`ReplicaOptions::static_graph`] is off.
    OpenGraph,
    /// [`ReplicaOptions::no_sync`] is off.
    EveryPass,
    /// [`ReplicaOptions::accumulation`] keeps the gradients of several micro-batches.
    Tree,
}

impl GraphObstacle {
    /// The first reason, if there is one. `passes_are_local` is [`Strategy::passes_are_local`](crate::Strategy::passes_are_local).
    pub fn of(
        passes_are_local: bool,
        options: &ReplicaOptions,
        is_stage: bool,
        num_micro_batches: usize,
    ) -> Option<Self> {
        Some(match options {
            _ if is_stage => Self::Stages,
            _ if !passes_are_local => Self::Strategy,
            ReplicaOptions { sync_batch_norm: true, .. } => Self::SyncBatchNorm,
            ReplicaOptions { static_graph: false, find_unused_parameters: true, .. } => {
                Self::OpenGraph
            }
            ReplicaOptions { no_sync: false, .. } => Self::EveryPass,
            ReplicaOptions {
                accumulation: AccumulationOrder::Tree | AccumulationOrder::OneTree,
                ..
            } if num_micro_batches > 1 => Self::Tree,
            _ => return None,
        })
    }

    /// Errors if there is one.
    pub(crate) fn check(
        strategy: &dyn Strategy,
        options: &ReplicaOptions,
        is_stage: bool,
        num_micro_batches: usize,
    ) -> Result<()> {
        match Self::of(strategy.passes_are_local(), options, is_stage, num_micro_batches) {
            None => Ok(()),
            Some(obstacle) => Err(StrategyError::Setting(obstacle.text(obstacle.option()))),
        }
    }

    /// The reason in words, with the name that the reader knows it by.
    pub fn text(self, name: &str) -> String {
        let does = match self {
            Self::Stages => "sends",
            Self::Strategy | Self::SyncBatchNorm | Self::EveryPass => "communicates",
            Self::OpenGraph => "lets other parameters be used",
            Self::Tree => "keeps memory",
        };
        format!(
            "{name} {does} within the passes of a step, and a graph cannot; leave one of them out"
        )
    }

    /// The name for callers of this crate.
    fn option(self) -> &'static str {
        match self {
            Self::Stages => "a stage of a pipeline",
            Self::Strategy => "this strategy",
            Self::SyncBatchNorm => "ReplicaOptions::sync_batch_norm",
            Self::OpenGraph => "ReplicaOptions::static_graph = false",
            Self::EveryPass => "ReplicaOptions::no_sync = false",
            Self::Tree => "ReplicaOptions::accumulation",
        }
    }
}

/// The graphs of a replica's passes.
#[derive(Debug)]
pub(crate) struct PassGraphs {
    pool: GraphPool,
    /// The kinds of steps, that of the last step at the end.
    known: Vec<StepPasses>,
    /// The number of kinds so far.
    num_kinds: u32,
    /// Dropped after the graphs, since NCCL waits until those with its work are gone.
    _world: Group,
}

/// The passes of steps that are alike.
#[derive(Debug)]
pub(crate) struct StepPasses {
    kind: StepKind,
    /// Where the passes find their samples.
    pub(crate) batches: Vec<MicroBatch>,
    pub(crate) work: GraphedWork<Passed>,
    /// The number of the kind, and how many of its steps have run. The same on all ranks.
    pub(crate) number: u32,
    pub(crate) num_runs: u32,
}

/// The result of the passes of a step.
#[derive(Clone, Debug)]
pub(crate) struct Passed {
    /// The parameters that the passes have not used.
    pub(crate) left_out: UnusedParams,
    /// The gradients that are announced after the passes of a graph, in the order in which they became final.
    pub(crate) deferred: Vec<ParamId>,
}

/// Everything that the work of a step depends on.
#[derive(Debug, PartialEq)]
struct StepKind {
    /// For each micro-batch its tensors.
    tensors: Vec<Vec<(&'static str, DType, Shape)>>,
    /// The samples or tokens of all ranks, by which the mean loss is divided.
    count: usize,
    loss_scale: f64,
    is_shared: bool,
}

impl PassGraphs {
    /// No graphs yet. Errors if the memory is not that of a card.
    pub(crate) fn new(memory: &Allocator, world: &Group) -> Result<Self> {
        let (pool, known) = (GraphPool::new(memory)?, Vec::new());
        Ok(Self { pool, known, num_kinds: 0, _world: world.clone() })
    }

    /// The passes of a step on these micro-batches, whose samples are copied to their addresses. `None` if the number of their
    /// tokens becomes known only within the step, since a graph has fixed numbers.
    pub(crate) fn of_step(
        &mut self,
        replica: &Replica,
        micro_batches: &[MicroBatch],
        loss_scale: f64,
        is_shared: bool,
    ) -> Result<Option<StepPasses>> {
        let objective = &replica.model.objective;
        let of_all = |own: &MicroBatch| objective.count_of_all(&own.batch, own.global_count);
        let Some(count) = micro_batches.iter().map(of_all).sum() else { return Ok(None) };
        let tensor = |(name, of): &(&'static str, Tensor)| (*name, of.dtype(), of.shape());
        let tensors = |own: &MicroBatch| own.batch.tensors().iter().map(tensor).collect();
        let tensors = micro_batches.iter().map(tensors).collect();
        let kind = StepKind { tensors, count, loss_scale, is_shared };
        let of_kind = match self.known.iter().position(|known| known.kind == kind) {
            Some(at) => self.known.remove(at),
            None => {
                if self.known.len() == MOST_GRAPHS {
                    self.known.remove(0);
                }
                let memory = &replica.compute.allocator;
                let batches = micro_batches.iter().map(|own| shaped_like(own, memory));
                let batches = batches.collect::<Result<_>>()?;
                let (number, work) = (self.num_kinds, GraphedWork::new(&self.pool));
                self.num_kinds += 1;
                StepPasses { kind, batches, work, number, num_runs: 0 }
            }
        };
        for (fixed, own) in of_kind.batches.iter().zip(micro_batches) {
            for ((_, to), (_, from)) in fixed.batch.tensors().iter().zip(own.batch.tensors()) {
                to.copy_from(from)?;
            }
        }
        Ok(Some(of_kind))
    }

    pub(crate) fn keep(&mut self, mut passes: StepPasses) {
        passes.num_runs += 1;
        self.known.push(passes);
    }
}

/// Memory for micro-batches like this one.
fn shaped_like(own: &MicroBatch, memory: &Allocator) -> Result<MicroBatch> {
    let tensor = |(name, of): &(&'static str, Tensor)| -> Result<(&'static str, Tensor)> {
        Ok((*name, memory.tensor(of.dtype(), of.shape(), Category::Data)?))
    };
    let tensors = own.batch.tensors().iter().map(tensor).collect::<Result<_>>()?;
    Ok(MicroBatch { batch: Batch::of(tensors), global_count: own.global_count })
}
