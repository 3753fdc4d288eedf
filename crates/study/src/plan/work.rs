//! The work of a micro-batch on a rank: the time of each block, and the bytes that ranks which divide layers exchange.
//!
//! On a card nothing runs: a rehearsal counts the operations and the bytes of each pass, and the slower of the two decides. On this
//! host each block is run alone. Ranks side by side are slower; [`RankSpeed`] says by how much.

use std::sync::Arc;

use paceline_data::BatchShape;
use paceline_failure::{Failure, Result};
use paceline_host::resources;
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Device};
use paceline_model::{Batch, BlockCost, Layout, Model, ModelError, Rehearsal, block_costs};
use paceline_observe::insight::memory::batch_of;
use paceline_run::resolve::resolve_unchecked;
use paceline_trace::now_ns;

use super::flags::RankHardware;
use super::layouts::StepLayout;
use crate::predict::model::Calibration;
use crate::spec::Spec;

/// How often each pass of a block is run on this host. The shortest counts.
const TIMES: usize = 2;

/// The work of a micro-batch on a rank that has all stages.
pub struct BlockWork {
    /// The model with the parts of a rank.
    pub model: Model,
    /// The milliseconds of each block.
    pub costs: Vec<BlockCost>,
    /// The floating-point operations of each block, by which a pipeline is cut.
    pub counted: Vec<f64>,
    /// The exchanges within layers, and their bytes.
    pub exchanged: (u64, u64),
    /// FLOP of a micro-batch.
    pub flops: f64,
    /// Whether the bytes of memory decide most of the time, not the operations. Not known on this host.
    pub is_by_memory: bool,
    /// The bytes that the optimizer reads and writes for each parameter.
    pub optimizer_bytes: f64,
}

impl BlockWork {
    /// Counts or measures the work of a layout of one stage. Fails as `paceline train` does with such a layout.
    pub fn of(base: &Spec, layout: &StepLayout, hardware: &RankHardware) -> Result<Self> {
        let (config, data, model) = resolve_unchecked(&layout.spec(base), None)?;
        let per_s = hardware.peak(layout.precision, config.tf32).map(|peak| peak * hardware.mfu);
        if let Some(card) = hardware.card.filter(|_| per_s.is_none()) {
            let name = layout.precision.name();
            return Err(Failure::Usage(format!("{} has no products in {name}", card.name)));
        }
        let samples = BatchShape::of(data.train.as_ref());
        let precision = config.strategy.options.precision;
        let copies = config.optimizer.config().state_names().len();
        // It reads the gradient, and reads and writes the parameter and its state.
        let optimizer_bytes = (3 + 2 * copies) as f64 * precision.master.size_bytes() as f64;
        let batch_on = |allocator| batch_on(config.threads, allocator, &samples, layout);
        let count = || -> std::result::Result<Self, ModelError> {
            let (meta, batch) = batch_on(Allocator::meta())?;
            let batches = std::slice::from_ref(&batch);
            let rehearsal = Rehearsal::of(&model, precision, &meta, batches, None, false)?;
            let counted = |clock: &mut dyn FnMut() -> f64| {
                block_costs(&model, precision, &meta, &batch, |_| true, (clock, 0))
            };
            let flop = counted(&mut || (meta.forward_flops() + meta.backward_flops()) as f64)?;
            let (costs, is_by_memory) = match hardware.card.zip(per_s) {
                Some((card, per_s)) => {
                    let bytes = counted(&mut || meta.moved_bytes() as f64)?;
                    roofline(&flop, &bytes, [1e3 / per_s, 1e3 / card.bytes_per_s])
                }
                None => {
                    let (here, batch) = batch_on(Allocator::new())?;
                    let clock: &mut dyn FnMut() -> f64 = &mut || now_ns() as f64 / 1e6;
                    (
                        block_costs(&model, precision, &here, &batch, |_| true, (clock, TIMES))?,
                        false,
                    )
                }
            };
            Ok(Self {
                counted: flop.iter().map(BlockCost::total).collect(),
                costs,
                exchanged: rehearsal.exchanged,
                flops: (rehearsal.forward_flops + rehearsal.backward_flops) as f64,
                is_by_memory,
                optimizer_bytes,
                model,
            })
        };
        count().map_err(|error| Failure::Usage(format!("the work of a step: {error}")))
    }

    /// The part of the model with these blocks, and with the objective if the last one is among them.
    pub fn part(&self, blocks: &[usize]) -> Arc<Layout> {
        let Model { layout, objective, blocks: all, .. } = &self.model;
        let of_objective = [objective.unit(), objective.tied().map(|id| layout.param(id).unit)];
        let has_last = blocks.contains(&(all.len() - 1));
        let is_used = |unit| {
            blocks.iter().any(|at| all[*at].unit == unit)
                || (has_last && of_objective.contains(&Some(unit)))
        };
        Arc::new(layout.part(is_used, |id| layout.param(id).num_uses))
    }

    /// The milliseconds of all blocks.
    pub fn total(&self) -> f64 {
        self.costs.iter().map(BlockCost::total).sum()
    }
}

/// A device, and a micro-batch there.
fn batch_on(
    threads: usize,
    allocator: Allocator,
    samples: &BatchShape,
    layout: &StepLayout,
) -> std::result::Result<(Compute, Batch), ModelError> {
    let compute = Compute::new(threads, allocator)?;
    let longest = samples.max_length().unwrap_or(1);
    let batch = batch_of(samples, &compute.allocator, layout.micro_batch, longest)?;
    if let Some(lengths) = batch.get(Batch::LENGTHS).filter(|_| compute.device() != Device::Meta) {
        lengths.write::<i64>()?.fill(longest as i64);
    }
    Ok((compute, batch))
}

/// The time of each part by the slower of operations and bytes, and whether bytes are slower in most of all time.
fn roofline(flop: &[BlockCost], bytes: &[BlockCost], ms: [f64; 2]) -> (Vec<BlockCost>, bool) {
    let mut by_memory = 0.0;
    let mut slower = |flop: f64, bytes: f64| {
        let [flop, bytes] = [flop * ms[0], bytes * ms[1]];
        by_memory += if bytes > flop { bytes } else { 0.0 };
        flop.max(bytes)
    };
    let of = |(flop, bytes): (&BlockCost, &BlockCost)| flop.with(bytes, &mut slower);
    let costs: Vec<BlockCost> = flop.iter().zip(bytes).map(of).collect();
    let all: f64 = costs.iter().map(BlockCost::total).sum();
    (costs, by_memory > 0.5 * all)
}

/// How fast a rank is.
#[derive(Clone, Copy, Debug)]
pub struct RankSpeed {
    /// The time of passes on a core of their own, by that of [`BlockWork::costs`].
    pub scale: f64,
    /// How many ranks share a core.
    pub sharing: f64,
    /// Bytes that the optimizer reads and writes in a second.
    pub optimizer_bytes_per_s: f64,
}

impl RankSpeed {
    /// Of a rank of this host, by a run of all ranks without communication, and the work of its micro-batch.
    pub fn of(hardware: &RankHardware, run: &Calibration, work: &BlockWork) -> Self {
        let sharing = (hardware.ranks as f64 / resources::num_cores() as f64).max(1.0);
        let bytes = work.optimizer_bytes * work.model.layout.trained_len() as f64;
        let optimizer_ms = (run.step_ms - run.backward_end_ms).max(1e-3);
        Self {
            scale: run.backward_end_ms / work.total() / sharing,
            sharing,
            optimizer_bytes_per_s: 1e3 * bytes / optimizer_ms,
        }
    }
}
