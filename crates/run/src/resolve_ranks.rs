//! Resolves and checks the settings of a run or an evaluation that concern ranks: how many there are, with which batches, and
//! how they meet and talk to each other.

use paceline_choices::strategies::STRATEGIES;
use paceline_collectives::{Axis, MeshShape};
use paceline_data::BatchShape;
use paceline_failure::{Result, usage};
use paceline_files::printable;
use paceline_launch::comm::{self, CommConfig};
use paceline_launch::device::Device;
use paceline_launch::environment::Placement;
use paceline_launch::launcher;
use paceline_launch::pinning::{self, Pinning};
use paceline_model::{BlockCost, Model};
use paceline_observe::insight::flops;
use paceline_settings::flags::RunFlags;
use paceline_settings::pipeline::{AUTO, Cut, PipelineConfig};
use paceline_settings::ranks::InitMethod;
use paceline_settings::strategy::StrategyConfig;
use paceline_strategies::schedule;

use crate::staging::unit_of;

/// The number of ranks.
pub fn resolve_world_size(flags: &RunFlags, placement: Option<&Placement>) -> Result<usize> {
    // The flag is passed to a rank that this command has started, too.
    let is_ours = placement.is_some_and(Placement::is_ours);
    launcher::num_ranks(flags.ranks.nproc.filter(|_| !is_ours), placement)
}

/// Which processors the ranks of this host get, if requested. If there are too few, no rank is pinned, and a warning says so.
pub fn resolve_pinning(
    flags: &RunFlags,
    placement: Option<&Placement>,
    world_size: usize,
    warnings: &mut Vec<String>,
) -> Option<Pinning> {
    let local_ranks = placement.map_or(world_size, |placement| placement.place.local_world_size);
    let pinning =
        flags.host.pin_cores.then(|| pinning::pinning(local_ranks, flags.host.threads))?;
    let refused = |reason| {
        warnings.push(format!("--pin-cores: {reason}; threads run where the system puts them"))
    };
    pinning.map_err(refused).ok()
}

/// Checks that this host and the launcher meet the needs of the ranks.
pub fn check_ranks(flags: &RunFlags, placement: Option<&Placement>) -> Result<()> {
    if let Some(placement) = placement {
        let place = &placement.place;
        placement.check_transport(Some(flags.ranks.transport))?;
        if flags.ranks.init_method == InitMethod::Environment
            && let Err(error) = place.rendezvous()
        {
            return usage(format!("{error}, or pass --init-method file:///PATH"));
        }
    }
    Ok(())
}

/// How the ranks talk to each other.
pub fn resolve_comm(
    flags: &RunFlags,
    placement: Option<&Placement>,
    world_size: usize,
) -> Result<CommConfig> {
    let comm = comm::resolve(&flags.comm, flags.ranks.device, &[flags.ranks.transport])?;
    let is_one_host = placement.is_none_or(|placement| placement.place.is_one_host());
    // A single rank needs no transport, unless a launcher started it.
    let connects = world_size > 1 || placement.is_some();
    let refusal =
        comm.refusal(flags.ranks.transport, world_size).filter(|_| is_one_host && connects);
    match refusal {
        Some(reason) => usage(format!("--transport {}: {reason}", flags.ranks.transport.name())),
        None => Ok(CommConfig { threads: flags.host.threads, ..comm }),
    }
}

/// The grid of ranks without `--mesh`: all ranks shard if the strategy does, and else replicate.
fn default_mesh(strategy: &StrategyConfig, world_size: usize) -> MeshShape {
    let axis = if strategy.axes().contains(&Axis::Shard) { Axis::Shard } else { Axis::Dp };
    MeshShape::new(&[(axis, world_size)]).unwrap_or_else(|_| MeshShape::replicas(world_size))
}

/// The grid of ranks, with the axes of `--mesh`, and one rank along `dp` if that is not named.
pub fn resolve_mesh(
    stated: Option<&MeshShape>,
    strategy: &StrategyConfig,
    world_size: usize,
) -> Result<MeshShape> {
    let Some(shape) = stated else { return Ok(default_mesh(strategy, world_size)) };
    let known = strategy.axes();
    let divides_model = |axis: &Axis| [Axis::Pp, Axis::Tp].contains(axis);
    let is_unknown = |axis: &Axis| !divides_model(axis) && !known.contains(axis);
    if let Some((axis, _)) = shape.axes().iter().find(|(axis, _)| is_unknown(axis)) {
        let able = STRATEGIES.all().into_iter().filter(|choice| choice.of.axes.contains(axis));
        let able: Vec<&str> = able.map(|choice| choice.name).collect();
        let other = match able.as_slice() {
            [] => String::new(),
            names => format!(", or pass --strategy {}", names.join(" or ")),
        };
        let known: Vec<&str> = known.iter().map(|axis| axis.name()).collect();
        return usage(format!(
            "--mesh {shape}: the strategy {} does not know the axis {axis}, only {}; leave {axis} out{other}",
            strategy.name(),
            known.join(" and ")
        ));
    }
    if let Err(error) = shape.check(world_size) {
        return usage(format!(
            "--mesh {shape}: {error}; pass sizes whose product is {world_size}, or another number of ranks \
             (--nproc)"
        ));
    }
    if shape.axes().iter().any(|(axis, _)| *axis == Axis::Dp) {
        return Ok(shape.clone());
    }
    let axes: Vec<_> = std::iter::once((Axis::Dp, 1)).chain(shape.axes().iter().copied()).collect();
    MeshShape::new(&axes).or_else(|e| usage(format!("--mesh {shape}: {e}")))
}

/// The schedule of a pipeline, if the grid has stages. Checks that the run's settings work with stages.
pub fn resolve_pipeline(
    flags: &RunFlags,
    strategy: &StrategyConfig,
    mesh: &MeshShape,
    (model, samples, batches_per_epoch): (&Model, &BatchShape, usize),
) -> Result<Option<PipelineConfig>> {
    let stages = mesh.size(Axis::Pp);
    if stages == 1 {
        let given = [
            ("--schedule", flags.pipeline.schedule.is_some()),
            ("--stages", !flags.pipeline.stages.is_empty()),
            ("--head-at-once", flags.pipeline.head_at_once),
            ("--pipeline-memory", flags.pipeline.pipeline_memory.is_some()),
        ];
        return match given.iter().find(|(_, is_given)| *is_given) {
            None => Ok(None),
            Some((flag, _)) => {
                usage(format!("{flag}: there are no stages; pass --mesh pp=2 too, or leave it out"))
            }
        };
    }
    let name = flags.pipeline.schedule.as_deref().unwrap_or("1f1b");
    let schedule = schedule::named(name);
    let refused = |flag: &str, why: &str| {
        usage(format!("{flag}: {why}; leave it out, or the axis pp of --mesh"))
    };
    if !strategy.keeps_replicas_equal() && !strategy.is_alone() {
        return refused(
            &strategy.words(),
            "the stages of a pipeline are equal on all ranks that hold them after each step",
        );
    }
    for (flag, is_given) in [
        ("--rank-samples", flags.data.rank_samples.is_some()),
        ("--find-unused-parameters", strategy.options.find_unused_parameters),
        ("--no-sync=false", !strategy.options.no_sync),
    ] {
        if is_given {
            return refused(flag, "pipelines cannot do this yet");
        }
    }
    let least = schedule.map_or(stages, |of| of.placement(stages).stages());
    if least > model.blocks.len() {
        return usage(format!(
            "--mesh {mesh}: {name} needs {least} stages, and the model has {} blocks; pass fewer, or more layers",
            model.blocks.len()
        ));
    }
    // Nothing has been measured. If the ranks measure, they check their plan again.
    let even = |stages: &_| schedule::Costs::even(stages, 1.0, 1.0, 1.0);
    let mut adds_in_order = true;
    if let Some(of) = schedule {
        let full = strategy.micro_batches_of(strategy.accumulate);
        for micro_batches in sizes_of_steps(strategy, batches_per_epoch) {
            let plan = schedule::Plan::new(of, stages, micro_batches, even).or_else(|e| {
                let step = if micro_batches == full { String::new() } else { format!(
                        ", and a step at the end of an epoch of {batches_per_epoch} batches has {micro_batches}"
                    ) };
                usage(format!("--schedule {name} --accumulate {full}{step}: {e}"))
            })?;
            adds_in_order &= plan.adds_in_order();
        }
    }
    let cut = match flags.pipeline.stages.as_slice() {
        [] if name == AUTO => Cut::Measured,
        [] => Cut::Counted,
        [word] if word == MEASURED => Cut::Measured,
        _ => Cut::ByHand,
    };
    if flags.ranks.device != Device::Cpu && (cut == Cut::Measured || name == AUTO) {
        return usage(format!(
            "--device {}: blocks are measured on the processor; name a --schedule, and leave out --stages {MEASURED}",
            flags.ranks.device
        ));
    }
    let begins_at = match cut {
        Cut::Measured => Vec::new(),
        Cut::Counted => {
            let costs = flops::per_block(model, samples, &strategy.options)?;
            let costs = costs.map_or_else(
                || vec![1.0; model.blocks.len()],
                |costs| costs.iter().map(BlockCost::total).collect(),
            );
            schedule::cut(&costs, least).unwrap_or_default()
        }
        // Other schedules may need other numbers of stages.
        Cut::ByHand => cut_at(&flags.pipeline.stages, model, schedule.map(|_| least))?,
    };
    let has_as_many =
        |of: &&dyn schedule::Schedule| of.placement(stages).stages() == begins_at.len() + 1;
    if cut == Cut::ByHand && !schedule::SCHEDULES.iter().any(has_as_many) {
        return usage(format!(
            "--stages {}: these make {} stages, and schedules on {stages} ranks have {stages} or {}",
            printable(&flags.pipeline.stages.join(",")),
            begins_at.len() + 1,
            2 * stages
        ));
    }
    if let Some(schedule) = schedule.filter(|_| cut != Cut::Measured) {
        check_trained(model, &schedule.placement(stages), &begins_at)?;
    }
    let memory_bytes = match flags.pipeline.pipeline_memory {
        Some(_) if cut != Cut::Measured && schedule.is_some() => {
            return usage(
                "--pipeline-memory: it limits what --schedule auto or --stages measured choose from; pass one of \
                 them too, or leave it out"
                    .to_owned(),
            );
        }
        mb => mb.map(|mb| (mb * 1e6) as u64),
    };
    Ok(Some(PipelineConfig {
        schedule: schedule.map_or(AUTO, |of| of.name()),
        cut,
        begins: begins_at.iter().map(|at| unit_of(model, *at).to_owned()).collect(),
        begins_at,
        costs: None,
        head_at_once: flags.pipeline.head_at_once,
        memory_bytes,
        candidates: Vec::new(),
        // The ranks choose from schedules that add up in order.
        adds_in_order,
    }))
}

/// The word of `--stages` that has the ranks measure.
const MEASURED: &str = "measured";

/// The blocks that begin with these units.
fn cut_at(names: &[String], model: &Model, stages: Option<usize>) -> Result<Vec<usize>> {
    let stated = printable(&names.join(",")).into_owned();
    let units: Vec<&str> = (0..model.blocks.len()).map(|at| unit_of(model, at)).collect();
    if let Some(stages) = stages.filter(|stages| names.len() + 1 != *stages) {
        return usage(format!(
            "--stages {stated}: these begin {} stages after the first one, and the schedule needs {}",
            names.len(),
            stages - 1
        ));
    }
    let mut cut = Vec::new();
    for name in names {
        let Some(at) = units.iter().position(|unit| unit == name) else {
            return usage(format!(
                "--stages {stated}: no block has the unit {}; there are {}",
                printable(name),
                units.join(", ")
            ));
        };
        if at <= cut.last().copied().unwrap_or(0) {
            return usage(format!(
                "--stages {stated}: each begins after the one before, and the first stage has a block: {}",
                units.join(", ")
            ));
        }
        cut.push(at);
    }
    Ok(cut)
}

/// The numbers of micro-batches of steps; the last step of an epoch may have fewer.
pub(crate) fn sizes_of_steps(
    strategy: &StrategyConfig,
    batches: usize,
) -> impl Iterator<Item = usize> {
    let most = strategy.accumulate.min(batches);
    let sizes = [most, batches % most.max(1)].into_iter().filter(|of| *of > 0);
    sizes.map(|batches| strategy.micro_batches_of(batches))
}

/// Errors if a rank of a pipeline would have nothing to train.
fn check_trained(
    model: &Model,
    placement: &schedule::Placement,
    begins_at: &[usize],
) -> Result<()> {
    let is_trained = |unit| {
        let unit = model.layout.unit(unit);
        !unit.is_frozen && !unit.range.is_empty()
    };
    let mut trains = vec![false; placement.ranks()];
    for (at, block) in model.blocks.iter().enumerate() {
        let stage = begins_at.partition_point(|begin| *begin <= at);
        trains[placement.rank(stage)] |= is_trained(block.unit);
    }
    let tied = model.objective.tied().map(|id| model.layout.param(id).unit);
    let last = placement.rank(placement.stages() - 1);
    trains[last] |= model.objective.unit().into_iter().chain(tied).any(is_trained);
    match trains.iter().position(|trains| !trains) {
        None => Ok(()),
        Some(place) => usage(format!(
            "--freeze: rank {place} of the pipeline would have nothing to train; freeze less, or pass other --stages or fewer \
             of them"
        )),
    }
}

/// Samples of a batch on all ranks together. By default each rank has `default` samples.
pub fn resolve_batch(flags: &RunFlags, world_size: usize, default: usize) -> Result<usize> {
    match (flags.training.batch_size, flags.training.global_batch_size) {
        (_, Some(global)) if global < world_size => usage(format!(
            "--global-batch-size {global} is smaller than the {world_size} ranks that share it; \
             raise it, or lower --nproc"
        )),
        (_, Some(global)) => Ok(global),
        (local, None) => local
            .unwrap_or(default)
            .checked_mul(world_size)
            .map_or_else(|| usage("--batch-size is too large"), Ok),
    }
}
