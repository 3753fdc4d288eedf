//! Where a pipeline is cut and in which order its stages run, if that is to follow from measured costs.
//!
//! Takes a configuration that leaves this open. The ranks measure the blocks, each some of them, and a message, and tell each other;
//! then all of them come to the same choice. Returns the configuration with it.

use std::time::Instant;

use paceline_collectives::{Axis, Group};
use paceline_data::BatchShape;
use paceline_failure::{Failure, Result};
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{Batch, BlockCost, Model, block_costs};
use paceline_observe::insight::memory::batch_of;
use paceline_settings::config::TrainConfig;
use paceline_settings::open_data::OpenData;
use paceline_settings::pipeline::{Candidate, Cut, PipelineConfig};
use paceline_strategies::AccumulationOrder;
use paceline_strategies::schedule::{
    BlockCosts, Costs, CutChoice, Plan, SCHEDULES, Schedule, best_cut, named,
};
use paceline_trace::now_ns;

use crate::resolve_ranks::sizes_of_steps;

/// How often each pass is measured.
const TIMES: usize = 3;

/// Chooses the open settings of a configuration by measured costs. `None` if nothing is open. All ranks call this together.
pub(crate) fn choose(
    config: &TrainConfig,
    data: &OpenData,
    world: &Group,
) -> Result<Option<TrainConfig>> {
    let Some(open) = config.pipeline.as_ref().filter(|of| of.is_open()) else { return Ok(None) };
    let model = config.model.build(data.train.as_ref(), world.world_size())?;
    let blocks = measured(config, &model, &BatchShape::of(data.train.as_ref()), world)?;
    let micro_batches = config.micro_batches_per_step();
    let limit = open.memory_bytes.map(|bytes| bytes as f64);
    let ranks = config.mesh.size(Axis::Pp);
    let all = candidates(open, config.strategy.options.accumulation);
    // The last step of an epoch may have fewer micro-batches than others.
    let goes = |schedule: &&'static dyn Schedule| {
        let even = |stages: &_| Costs::even(stages, 1.0, 1.0, 1.0);
        let mut sizes = sizes_of_steps(&config.strategy, config.steps_per_epoch);
        sizes.all(|micro_batches| Plan::new(*schedule, ranks, micro_batches, even).is_ok())
    };
    let cut_of = |schedule: &'static dyn Schedule| {
        let fixed = (open.cut == Cut::ByHand).then_some(open.begins_at.as_slice());
        best_cut(schedule, ranks, micro_batches, &blocks, (limit, fixed)).ok().flatten()
    };
    let mut choices: Vec<CutChoice> = all.into_iter().filter(goes).filter_map(cut_of).collect();
    choices.sort_by(CutChoice::by_step);
    let Some(best) = choices.first() else {
        let problem = match open.memory_bytes {
            Some(bytes) => {
                let limit = bytes as f64 / 1e6;
                format!("--pipeline-memory {limit}: no schedule keeps so little in flight")
            }
            None => format!("--accumulate {micro_batches}: no schedule knows such a step"),
        };
        // All ranks come to the same result, and one reports it.
        return Err(match world.rank() {
            0 => Failure::Usage(format!("{problem}; raise it, or pass a smaller --batch-size")),
            _ => Failure::Consequence(problem),
        });
    };
    let candidate = |choice: &CutChoice| Candidate {
        schedule: choice.schedule.name(),
        step_ms: choice.step,
        kept_bytes: choice.kept as u64,
    };
    let chosen = PipelineConfig {
        schedule: best.schedule.name(),
        begins: best.cut.iter().map(|at| unit_of(&model, *at).to_owned()).collect(),
        begins_at: best.cut.clone(),
        costs: Some(blocks.costs(&best.cut)),
        candidates: choices.iter().map(candidate).collect(),
        ..open.clone()
    };
    Ok(Some(TrainConfig { pipeline: Some(chosen), ..config.clone() }))
}

/// The unit of a block.
pub(crate) fn unit_of(model: &Model, block: usize) -> &str {
    &model.layout.unit(model.blocks[block].unit).name
}

/// The schedules to choose from, without those that would give other bits than the others in this order of sums.
fn candidates(
    open: &PipelineConfig,
    accumulation: AccumulationOrder,
) -> Vec<&'static dyn Schedule> {
    match named(open.schedule) {
        Some(schedule) => vec![schedule],
        None => {
            let keeps_order = |of: &&'static dyn Schedule| {
                accumulation != AccumulationOrder::Sequential || of.name() != "looped_bfs"
            };
            SCHEDULES.into_iter().filter(keeps_order).collect()
        }
    }
}

/// The costs of the blocks, in milliseconds and bytes.
fn measured(
    config: &TrainConfig,
    model: &Model,
    samples: &BatchShape,
    world: &Group,
) -> Result<BlockCosts> {
    let compute = Compute::new(config.threads, Allocator::new())?;
    let longest = samples.max_length().unwrap_or(1);
    let batch = batch_of(samples, &compute.allocator, config.batch_size.max(1), longest)?;
    if let Some(lengths) = batch.get(Batch::LENGTHS) {
        lengths.write::<i64>()?.fill(longest as i64);
    }
    let precision = config.strategy.options.precision;
    let (rank, ranks) = (world.rank(), world.world_size());
    let own = |at: usize| at % ranks == rank;
    let mut clock = || now_ns() as f64 / 1e6;
    let costs = block_costs(model, precision, &compute, &batch, own, (&mut clock, TIMES));
    let costs = costs.map_err(|error| Failure::Run(format!("measuring the blocks: {error}")))?;
    let message = message_ms(world, costs.iter().map(|of| of.output_bytes).max().unwrap_or(0))?;
    let all: Vec<(Vec<BlockCost>, f64)> = world.all_gather_object(&(costs, message))?;
    let message = all.iter().map(|(_, ms)| *ms).fold(0.0, f64::max);
    let of = |at: usize| all[at % ranks].0[at];
    let each =
        |part: fn(BlockCost) -> f64| (0..model.blocks.len()).map(|at| part(of(at))).collect();
    let puts_off = !config.pipeline.as_ref().is_some_and(|of| of.head_at_once);
    let mut blocks = BlockCosts {
        forward: each(|of| of.forward),
        backward_input: each(|of| of.backward_input + of.loss),
        backward_weight: each(|of| of.backward_weight + of.loss_weight),
        kept: each(|of| of.kept_bytes as f64),
        message,
        has_barrier: config.takes_grad_norm(),
    };
    let last = model.blocks.len() - 1;
    if puts_off {
        blocks.kept[last] += of(last).loss_kept_bytes as f64
    } else {
        blocks.backward_input[last] += of(last).loss_weight;
        blocks.backward_weight[last] -= of(last).loss_weight;
    }
    Ok(blocks)
}

/// The time of a message of this size from the first rank to the second, in milliseconds; zero on the other ranks. All ranks call
/// this with the sizes that they know.
fn message_ms(world: &Group, own_bytes: u64) -> Result<f64> {
    let bytes = world.all_gather_object(&own_bytes)?.into_iter().max().unwrap_or(0);
    let elems = usize::try_from(bytes).unwrap_or(0) / DType::F32.size_bytes();
    if world.rank() > 1 || world.world_size() < 2 {
        return Ok(0.0);
    }
    let message: Tensor =
        Allocator::new().tensor(DType::F32, [elems.max(1)], Category::Communication)?;
    let mut least = f64::INFINITY;
    for _ in 0..=TIMES {
        let begin = Instant::now();
        match world.rank() {
            0 => world.send(&message, 1)?,
            _ => world.recv(&message, 0)?,
        };
        least = least.min(begin.elapsed().as_secs_f64() * 1e3);
    }
    Ok(least)
}
