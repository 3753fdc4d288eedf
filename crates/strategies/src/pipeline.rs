//! Pipelines: which blocks a rank computes, what it does in a step, and how messages reach the other stages.
//!
//! Input: the axis `pp` of a mesh, a [`Schedule`] and where the model is cut. Output: a rank's list of actions for each number
//! of micro-batches, and a queue for each kind of message to or from each neighbor, so that none waits for another. A rank
//! without the axis has one stage, which is the whole model. Stages that share parameters have a copy each: see `tied.rs`.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use paceline_collectives::{Axis, Group, Mesh, Work};
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType, Shape, Tensor};
use paceline_model::{Batch, Layout, Model, Param, Precision, UnitId, boundaries};
use paceline_schedule::{Costs, OneFOneB, Placement, Plan, Schedule};
use paceline_trace::lock;

use crate::accumulation::PartialSums;
use crate::{AccumulationOrder, Replica, ReplicaOptions, Result, Strategy, StrategyError};

/// How a model is divided into stages, and in which order they run.
#[derive(Clone)]
pub struct Stages {
    /// The order.
    pub schedule: Arc<dyn Schedule>,
    /// The first block of each stage but the first one. Empty if each stage has about as many blocks as the others.
    pub cut: Vec<usize>,
    /// Into how many micro-batches a step divides its batch. The lists for this number are made and checked with the replica, those
    /// for another number when such a step begins.
    pub micro_batches: usize,
    /// What actions take, from which a schedule may make its lists: the same on all ranks. `None` if all stages count as equal.
    pub costs: Option<Costs>,
    /// The objective computes the gradients of its parameters with its loss, even if the schedule puts off those of the other
    /// layers. What it would keep for them is as large as its outputs: for a language model, an element for each token and word.
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
struct Route {
    from: usize,
    to: usize,
    is_forward: bool,
}

/// A rank's place in a pipeline.
pub(crate) struct Pipeline {
    schedule: Arc<dyn Schedule>,
    /// The stages of all ranks.
    pub(crate) placement: Placement,
    /// The place on the axis `pp`.
    pub(crate) rank: usize,
    /// The blocks of all stages.
    blocks: Vec<Range<usize>>,
    /// See [`Stages::costs`].
    costs: Option<Costs>,
    /// See [`Stages::head_at_once`].
    pub(crate) head_at_once: bool,
    /// The layout of all stages.
    pub(crate) layout: Arc<Layout>,
    precision: Precision,
    /// The ranks of all stages that share this rank's micro-batches; `None` without the axis.
    pub(crate) ranks: Option<Group>,
    queues: Vec<(Route, Group)>,
    /// Whether the rank has the whole model, and takes one micro-batch after the other.
    pub(crate) is_alone: bool,
    /// The units of which this rank and others have a copy each, and these ranks.
    pub(crate) tied: Vec<(UnitId, Group)>,
    /// Inputs of the stages, by the extents of a batch.
    inputs: Mutex<HashMap<Vec<usize>, Inputs>>,
}

/// The shape and element type of each stage's input.
type Inputs = Vec<(Shape, DType)>;

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pipeline({} on rank {})", self.schedule.name(), self.rank)
    }
}

impl Pipeline {
    /// The pipeline of the axis `pp`. Forms its groups: every rank calls this.
    pub(crate) fn new(
        model: &Model,
        precision: Precision,
        mesh: &Mesh,
        stages: &Stages,
    ) -> Result<Self> {
        let (ranks, rank) = (mesh.shape().size(Axis::Pp), mesh.coordinate(Axis::Pp));
        let placement = stages.schedule.placement(ranks);
        let blocks = stages.blocks(model.blocks.len(), placement.stages())?;
        let group = mesh.group(Axis::Pp).filter(|_| ranks > 1).cloned();
        let queues = match &group {
            Some(group) => queues(group, &placement)?,
            None => Vec::new(),
        };
        let mut pipeline = Self {
            schedule: stages.schedule.clone(),
            placement,
            rank,
            blocks,
            costs: stages.costs.clone(),
            head_at_once: stages.head_at_once,
            layout: model.layout.clone(),
            precision,
            ranks: group,
            queues,
            is_alone: false,
            tied: Vec::new(),
            inputs: Mutex::default(),
        };
        pipeline.tied = pipeline.tie(model)?;
        Ok(pipeline)
    }

    /// One stage, which takes the micro-batches one after the other.
    pub(crate) fn alone(model: &Model, precision: Precision) -> Self {
        Self {
            schedule: Arc::new(OneFOneB),
            placement: Placement::line(1),
            rank: 0,
            blocks: std::iter::once(0..model.blocks.len()).collect(),
            costs: None,
            head_at_once: false,
            layout: model.layout.clone(),
            precision,
            ranks: None,
            queues: Vec::new(),
            is_alone: true,
            tied: Vec::new(),
            inputs: Mutex::default(),
        }
    }

    /// The part of the model that this rank computes. Errors, on every rank, if one of them has nothing to train.
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

    /// Errors if parameters may be left out, and their gradients are put aside or reduced after each micro-batch: the stages of a
    /// rank end a micro-batch at different moments.
    pub(crate) fn check(&self, options: &ReplicaOptions, strategy: &dyn Strategy) -> Result<()> {
        let each_apart =
            options.accumulation == AccumulationOrder::Tree || strategy.reduces_every_pass();
        if each_apart && options.find_unused_parameters {
            return Err(StrategyError::Setting(format!(
                "a pipeline with {} cannot leave out parameters if the gradients of each micro-batch are put aside or reduced: \
                 add up whole gradients in sequence",
                strategy.name()
            )));
        }
        Ok(())
    }

    /// The gradients that this rank adds up.
    pub(crate) fn partial_sums(&self, model: &Model) -> PartialSums {
        PartialSums::new(
            &model.layout,
            (!self.is_alone).then_some(|unit| self.num_visits(model, unit)),
        )
    }

    /// The blocks of a stage.
    pub(crate) fn blocks_of(&self, stage: usize) -> &Range<usize> {
        &self.blocks[stage]
    }

    /// Whether this rank computes the loss.
    pub(crate) fn has_last_stage(&self) -> bool {
        self.placement.rank(self.placement.stages() - 1) == self.rank
    }

    /// A parameter on all stages. `own` is its value on the stage that has it. Every rank calls this.
    pub(crate) fn shared(
        &self,
        replica: &Replica,
        param: &Param,
        own: Option<Tensor>,
    ) -> Result<Tensor> {
        let Some(ranks) = &self.ranks else {
            return Ok(own.expect("a rank without a pipeline has all parameters"));
        };
        let (dtype, memory) = (self.precision.master, &replica.compute.allocator);
        let shared = memory.tensor(dtype, param.shape, Category::Communication)?;
        let root = self.ranks_of(&replica.model, param.unit)[0];
        let own = own.filter(|_| root == self.rank);
        let own = own.map(|own| own.view(param.shape)).transpose()?;
        ranks.broadcast_into(own.as_ref(), &shared, root)?;
        Ok(shared)
    }

    /// The lists of a step.
    pub(crate) fn plan(&self, micro_batches: usize) -> Result<Plan> {
        let (schedule, ranks) = (self.schedule.as_ref(), self.placement.ranks());
        let costs = |stages: &Placement| {
            self.costs.clone().unwrap_or_else(|| Costs::even(stages, 1.0, 1.0, 1.0))
        };
        Plan::new(schedule, ranks, micro_batches, costs).map_err(|error| {
            StrategyError::Setting(format!(
                "{} in {micro_batches} micro-batches: {error}",
                schedule.name()
            ))
        })
    }

    /// Memory for the input of a stage, or for its gradient.
    pub(crate) fn input(&self, replica: &Replica, batch: &Batch, stage: usize) -> Result<Tensor> {
        let extents =
            batch.tensors().iter().flat_map(|(_, tensor)| tensor.dims().to_vec()).collect();
        let mut inputs = lock(&self.inputs);
        let known = match inputs.entry(extents) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                let meta = Compute::new(1, Allocator::meta())?;
                let starts: Vec<usize> = self.blocks.iter().map(|blocks| blocks.start).collect();
                let (model, layout) = (&replica.model, self.layout.clone());
                new.insert(boundaries(model, layout, self.precision, &meta, batch, &starts)?)
            }
        };
        let (shape, dtype) = known[stage];
        Ok(replica.compute.allocator.tensor(dtype, shape, Category::Activations)?)
    }

    /// Sends the output of a stage to the next one, or the gradient of its input to the one before.
    pub(crate) fn send(&self, stage: usize, is_forward: bool, tensor: &Tensor) -> Result<Work> {
        let to = if is_forward { stage + 1 } else { stage - 1 };
        let (from, to) = (self.rank, self.placement.rank(to));
        let queue = self.queue(Route { from, to, is_forward });
        Ok(queue.send_async(tensor, 1 - queue.rank())?)
    }

    /// Receives the input of a stage, or the gradient of its output.
    pub(crate) fn receive(&self, stage: usize, is_forward: bool, tensor: &Tensor) -> Result<Work> {
        let from = if is_forward { stage - 1 } else { stage + 1 };
        let (from, to) = (self.placement.rank(from), self.rank);
        let queue = self.queue(Route { from, to, is_forward });
        Ok(queue.recv_async(tensor, 1 - queue.rank())?)
    }

    fn queue(&self, route: Route) -> &Group {
        let queue = self.queues.iter().find(|(own, _)| *own == route);
        &queue.expect("a message between neighboring stages").1
    }
}

/// This rank's queues. Routes that share no rank are formed together.
fn queues(group: &Group, placement: &Placement) -> Result<Vec<(Route, Group)>> {
    let mut left: Vec<Route> = Vec::new();
    for stage in 1..placement.stages() {
        let (from, to) = (placement.rank(stage - 1), placement.rank(stage));
        let routes =
            [Route { from, to, is_forward: true }, Route { from: to, to: from, is_forward: false }];
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
