//! Pipelines: which blocks a rank computes, what it does in a step, and how messages reach the other stages.
//!
//! Input: the axis `pp` of a mesh, a [`Schedule`] and where the model is cut. Output: a rank's list of actions for each number
//! of micro-batches, and a queue for each kind of message to or from each neighbor, so that no message waits for another.
//! Without the axis, a rank's one stage is the whole model. Stages that share parameters have a copy each: see `tied.rs`.

use std::ops::Range;
use std::sync::Arc;

use paceline_collectives::{Axis, Group, Mesh, Work};
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType, Shape, Tensor};
use paceline_model::{Batch, Layout, Model, Param, Precision, UnitId, boundaries};
use paceline_schedule::{Costs, OneFOneB, Placement, Plan, Schedule};

use crate::accumulation::PartialSums;
use crate::{Result, StrategyError};

/// How a model is divided into stages, and in which order they run.
#[derive(Clone)]
pub struct Stages {
    /// The order.
    pub schedule: Arc<dyn Schedule>,
    /// The first block of each stage but the first one. Empty if stages have about as many blocks each.
    pub cut: Vec<usize>,
    /// Into how many micro-batches a step divides its batch. The lists for this number are made and checked with the replica, those
    /// for another number when such a step begins.
    pub micro_batches: usize,
    /// The times of actions, from which a schedule may make its lists: the same on all ranks. `None` if all stages count as equal.
    pub costs: Option<Costs>,
    /// The objective computes the gradients of its parameters with its loss, even if the schedule puts off those of the other
    /// layers. It would keep as much as its outputs for them: for a language model, an element for each token and word.
    pub head_at_once: bool,
}

impl Stages {
    /// Stages with about as many blocks each, which count as equal.
    pub fn even(schedule: impl Schedule + 'static, micro_batches: usize) -> Self {
        let (schedule, cut) = (Arc::new(schedule), Vec::new());
        Self { schedule, cut, micro_batches, costs: None, head_at_once: false }
    }

    /// The blocks of each stage.
    fn blocks(&self, num_blocks: usize, stages: usize) -> Result<Vec<Range<usize>>> {
        let cut: Vec<usize> = match self.cut.as_slice() {
            [] => (1..stages).map(|stage| stage * num_blocks / stages).collect(),
            cut => cut.to_vec(),
        };
        let bounds: Vec<usize> = std::iter::once(0).chain(cut).chain([num_blocks]).collect();
        let is_cut = bounds.len() == stages + 1 && bounds.windows(2).all(|pair| pair[0] < pair[1]);
        if !is_cut {
            let name = self.schedule.name();
            return Err(StrategyError::Setting(format!(
                "{name} needs {stages} stages of at least one block each; the model has {num_blocks} blocks, cut at {:?}",
                &bounds[1..bounds.len() - 1]
            )));
        }
        Ok(bounds.windows(2).map(|pair| pair[0]..pair[1]).collect())
    }
}

/// Messages of one kind from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MessageRoute {
    from: usize,
    to: usize,
    is_forward: bool,
}

/// A rank's place in a pipeline.
pub(crate) struct Pipeline {
    pub(crate) stages: Stages,
    /// The stages of all ranks.
    pub(crate) placement: Placement,
    /// The place on the axis `pp`.
    pub(crate) rank: usize,
    /// The blocks of all stages.
    blocks: Vec<Range<usize>>,
    /// The layout of all stages.
    pub(crate) layout: Arc<Layout>,
    /// The ranks of all stages that share this rank's micro-batches; `None` without the axis.
    pub(crate) ranks: Option<Group>,
    queues: Vec<(MessageRoute, Group)>,
    /// Whether the rank has the whole model, and takes one micro-batch after the other.
    pub(crate) is_alone: bool,
    /// The units that this rank shares with others, which have copies too, and the group of these ranks.
    pub(crate) tied: Vec<(UnitId, Group)>,
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pipeline({} on rank {})", self.stages.schedule.name(), self.rank)
    }
}

impl Pipeline {
    /// The pipeline of the axis `pp`. Forms its groups: every rank calls this.
    pub(crate) fn new(model: &Model, mesh: &Mesh, stages: &Stages) -> Result<Self> {
        let (ranks, rank) = (mesh.shape().size(Axis::Pp), mesh.coordinate(Axis::Pp));
        let mut pipeline = Self::without_groups(model, stages, ranks, rank)?;
        pipeline.ranks = mesh.group(Axis::Pp).filter(|_| ranks > 1).cloned();
        if let Some(group) = &pipeline.ranks {
            pipeline.queues = queues(group, &pipeline.placement)?;
        }
        pipeline.tied = pipeline.tie(model)?;
        Ok(pipeline)
    }

    /// One stage, which takes the micro-batches one after the other.
    pub(crate) fn alone(model: &Model) -> Self {
        Self {
            stages: Stages::even(OneFOneB, 1),
            placement: Placement::line(1),
            rank: 0,
            blocks: std::iter::once(0..model.blocks.len()).collect(),
            layout: model.layout.clone(),
            ranks: None,
            queues: Vec::new(),
            is_alone: true,
            tied: Vec::new(),
        }
    }

    /// A rank of `ranks` on the axis that neither sends nor receives.
    pub(crate) fn without_groups(
        model: &Model,
        stages: &Stages,
        ranks: usize,
        rank: usize,
    ) -> Result<Self> {
        let placement = stages.schedule.placement(ranks);
        let blocks = stages.blocks(model.blocks.len(), placement.stages())?;
        let stages = stages.clone();
        Ok(Self { stages, placement, rank, blocks, is_alone: false, ..Self::alone(model) })
    }

    /// The part of the model that this rank computes. Errors, on every rank, if a rank has nothing to train.
    pub(crate) fn part(&self, model: &Model) -> Result<Arc<Layout>> {
        let part = |rank| {
            let is_here = |unit| self.ranks_of(model, unit).contains(&rank);
            model.layout.part(is_here, |id| self.num_uses(model, id, rank))
        };
        let mut parts: Vec<Layout> = (0..self.placement.ranks()).map(part).collect();
        if parts.iter().any(|part| part.trained_len() == 0) {
            return Err(StrategyError::Setting(
                "a stage of a pipeline has nothing to train; choose fewer stages, or freeze less"
                    .to_owned(),
            ));
        }
        Ok(Arc::new(parts.swap_remove(self.rank)))
    }

    pub(crate) fn partial_sums(&self, model: &Model) -> PartialSums {
        PartialSums::new(
            &model.layout,
            (!self.is_alone).then_some(|unit| self.num_visits(model, unit)),
        )
    }

    pub(crate) fn blocks_of(&self, stage: usize) -> &Range<usize> {
        &self.blocks[stage]
    }

    /// Whether this rank computes the loss.
    pub(crate) fn has_last_stage(&self) -> bool {
        self.placement.rank(self.placement.stages() - 1) == self.rank
    }

    /// A whole parameter on all stages. `own` is its value on the stage that has it. Every rank calls this.
    pub(crate) fn shared(
        &self,
        model: &Model,
        param: &Param,
        own: Option<Tensor>,
        dtype: DType,
        memory: &Allocator,
    ) -> Result<Tensor> {
        let Some(ranks) = &self.ranks else {
            return Ok(own.expect("a rank without a pipeline has all parameters"));
        };
        let shared = memory.tensor(dtype, param.whole_shape(), Category::Communication)?;
        let root = self.ranks_of(model, param.unit)[0];
        let own = own.filter(|_| root == self.rank);
        let own = own.map(|own| own.view(shared.shape())).transpose()?;
        ranks.broadcast_into(own.as_ref(), &shared, root)?;
        Ok(shared)
    }

    pub(crate) fn plan(&self, micro_batches: usize) -> Result<Plan> {
        let Stages { schedule, costs, .. } = &self.stages;
        let (schedule, ranks) = (schedule.as_ref(), self.placement.ranks());
        let costs = |stages: &Placement| {
            costs.clone().unwrap_or_else(|| Costs::even(stages, 1.0, 1.0, 1.0))
        };
        Plan::new(schedule, ranks, micro_batches, costs).map_err(|error| {
            StrategyError::Setting(format!(
                "{} in {micro_batches} micro-batches: {error}",
                schedule.name()
            ))
        })
    }

    /// The shape and element type of each stage's input, for a batch of these extents.
    pub(crate) fn inputs(
        &self,
        model: &Model,
        precision: Precision,
        batch: &Batch,
    ) -> Result<Vec<(Shape, DType)>> {
        let meta = Compute::new(1, Allocator::meta())?;
        let starts: Vec<usize> = self.blocks.iter().map(|blocks| blocks.start).collect();
        Ok(boundaries(model, self.layout.clone(), precision, &meta, batch, &starts)?)
    }

    /// Sends the output of a stage to the next one, or the gradient of its input back.
    pub(crate) fn send(&self, stage: usize, is_forward: bool, tensor: &Tensor) -> Result<Work> {
        let to = if is_forward { stage + 1 } else { stage - 1 };
        let (from, to) = (self.rank, self.placement.rank(to));
        let queue = self.queue(MessageRoute { from, to, is_forward });
        Ok(queue.send_async(tensor, 1 - queue.rank())?)
    }

    /// Receives the input of a stage, or the gradient of its output.
    pub(crate) fn receive(&self, stage: usize, is_forward: bool, tensor: &Tensor) -> Result<Work> {
        let from = if is_forward { stage - 1 } else { stage + 1 };
        let (from, to) = (self.placement.rank(from), self.rank);
        let queue = self.queue(MessageRoute { from, to, is_forward });
        Ok(queue.recv_async(tensor, 1 - queue.rank())?)
    }

    fn queue(&self, route: MessageRoute) -> &Group {
        let queue = self.queues.iter().find(|(own, _)| *own == route);
        &queue.expect("a message between neighboring stages").1
    }
}

/// This rank's queues. Routes that share no rank are formed together.
fn queues(group: &Group, placement: &Placement) -> Result<Vec<(MessageRoute, Group)>> {
    let mut left: Vec<MessageRoute> = Vec::new();
    for stage in 1..placement.stages() {
        let (from, to) = (placement.rank(stage - 1), placement.rank(stage));
        let routes = [
            MessageRoute { from, to, is_forward: true },
            MessageRoute { from: to, to: from, is_forward: false },
        ];
        left.extend(
            routes
                .into_iter()
                .filter(|route| from != to && !left.contains(route))
                .collect::<Vec<_>>(),
        );
    }
    let mut queues = Vec::new();
    while !left.is_empty() {
        let mut used = vec![false; group.world_size()];
        let mut own = None;
        left.retain(|route| {
            let is_free = !used[route.from] && !used[route.to];
            if is_free {
                (used[route.from], used[route.to]) = (true, true);
                if [route.from, route.to].contains(&group.rank()) {
                    own = Some(*route);
                }
            }
            !is_free
        });
        let formed = group.split(own.map(|route| route.from as u32))?;
        queues.extend(own.zip(formed));
    }
    Ok(queues)
}
