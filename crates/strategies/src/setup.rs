//! Makes the replica of a rank, and prepares the strategy to train it.
//!
//! Input: a strategy, a model and the ranks. Output: parameters that begin equal on every rank that holds them. All of it
//! runs before the first step.

use std::ops::Range;
use std::sync::Arc;

use paceline_collectives::{Axis, Group, Mesh};
use paceline_kernels::Compute;
use paceline_model::{Model, Storage};

use crate::pipeline::Pipeline;
use crate::{
    AccumulationOrder, GraphObstacle, Replica, ReplicaOptions, Result, Stages, Strategy,
    StrategyError,
};

impl Replica {
    /// A replica in memory that the strategy allocates, on ranks that form a mesh, or on a group without axes. Along the axis `tp`, each
    /// rank has some of the parts of a model whose layers are divided. All ranks begin with the parameters that follow from rank 0's seed. Ranks along an axis that hold the same parameters begin
    /// with those of the first. Prepares the strategy.
    pub fn new(
        strategy: &mut dyn Strategy,
        model: Model,
        compute: Compute,
        ranks: impl Into<Mesh>,
        seed: u64,
        options: ReplicaOptions,
    ) -> Result<Self> {
        let (mesh, stages) = (ranks.into(), None);
        Self::on_mesh(strategy, model, compute, mesh, stages, (seed, options))
    }

    /// A replica whose model is divided along the axis `pp` of the mesh: this rank has the parameters of its stages only, which
    /// the strategy keeps equal on the ranks of the same place on this axis. Each rank that uses a
    /// parameter of a root unit has a copy of it, and all copies get the sum of their gradients.
    ///
    /// Errors also if the model cannot be divided like this, if the lists of the schedule do not fit together, or if the
    /// options or the strategy lack something that the schedule needs.
    pub fn in_stages(
        strategy: &mut dyn Strategy,
        model: Model,
        compute: Compute,
        mesh: Mesh,
        stages: &Stages,
        (seed, options): (u64, ReplicaOptions),
    ) -> Result<Self> {
        Self::on_mesh(strategy, model, compute, mesh, Some(stages), (seed, options))
    }

    fn on_mesh(
        strategy: &mut dyn Strategy,
        mut model: Model,
        compute: Compute,
        mesh: Mesh,
        stages: Option<&Stages>,
        (seed, options): (u64, ReplicaOptions),
    ) -> Result<Self> {
        let (world, shape) = (mesh.world().clone(), mesh.shape().clone());
        let (part, parts) = (mesh.coordinate(Axis::Tp), shape.size(Axis::Tp));
        model.layout = Arc::new(model.layout.on_rank(part, parts)?);
        let pipeline = match stages {
            None => Pipeline::alone(&model),
            Some(stages) => {
                let pipeline = Pipeline::new(&model, &mesh, stages)?;
                pipeline.plan(stages.micro_batches)?;
                check_stages(strategy, &options)?;
                model.layout = pipeline.part(&model)?;
                pipeline
            }
        };
        let tensor = mesh.group(Axis::Tp).filter(|_| parts > 1).cloned();
        let mesh = if stages.is_some() || parts > 1 {
            // The ranks that have the same part of the model.
            let color = mesh.coordinate(Axis::Pp) * parts + part;
            let same = world.split(Some(color as u32))?;
            let same = same.expect("a rank that passes a color gets a group");
            Mesh::new(same, &shape.without(Axis::Pp).without(Axis::Tp))?
        } else {
            mesh
        };
        Self::of_part(strategy, model, compute, (world, mesh, tensor), pipeline, (seed, options))
    }

    fn of_part(
        strategy: &mut dyn Strategy,
        model: Model,
        compute: Compute,
        (world, mesh, tensor): (Group, Mesh, Option<Group>),
        pipeline: Pipeline,
        (seed, options): (u64, ReplicaOptions),
    ) -> Result<Self> {
        let group = mesh.world().clone();
        let storage = strategy.allocate(&model, options.precision, &compute, &mesh)?;
        let owned = strategy.owned(&model, mesh.shape(), group.rank());
        if options.as_graph {
            GraphObstacle::check(strategy, &options, pipeline.ranks.is_some(), 1)?;
        }
        let mut seeds = [seed as i64];
        world.broadcast_slice(&mut seeds, 0)?;
        storage.initialize(seeds[0] as u64)?;
        let held = group.all_gather_object(&storage.values().ranges().to_vec())?;
        share_values(&mesh, &storage, &held)?;
        pipeline.share_tied(&model.layout, &storage)?;
        let replica =
            Self { model, owned, storage, compute, world, group, mesh, tensor, options, pipeline };
        strategy.prepare(&replica)?;
        Ok(replica)
    }
}

/// Gives the ranks along an axis that hold the same values those of the first, one axis after the other: hosts with
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

/// Errors if parameters may be left out, and their gradients are put aside or reduced after each micro-batch: the stages of a
/// rank end a micro-batch at different moments.
fn check_stages(strategy: &dyn Strategy, options: &ReplicaOptions) -> Result<()> {
    let each_apart =
        options.accumulation != AccumulationOrder::Sequential || strategy.reduces_every_pass();
    if each_apart && options.find_unused_parameters {
        return Err(StrategyError::Setting(format!(
            "a pipeline with {} cannot leave out parameters if the gradients of each micro-batch are put aside or reduced: \
             add up whole gradients in sequence",
            strategy.name()
        )));
    }
    Ok(())
}
