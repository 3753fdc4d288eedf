//! The work of a micro-batch on a rank: the time of each block, and the bytes that ranks which divide layers exchange.
//!
//! On a card nothing runs: a rehearsal counts the operations and the bytes of each pass, and the slower of the two decides. On this
//! host each block is run alone. Ranks side by side are slower; [`HostSpeed`] says by how much.

use std::sync::Arc;

use paceline_data::BatchShape;
use paceline_failure::{Failure, Result};
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Device, MemoryError};
use paceline_model::{
    Batch, BlockCost, Layout as Params, Model, ModelError, Precision, Rehearsal, block_costs,
};
use paceline_observe::insight::flops;
use paceline_observe::insight::memory::batch_of;
use paceline_run::resolve::resolve_unchecked;
use paceline_settings::named::PrecisionName;
use paceline_trace::now_ns;

use super::flags::RankHardware;
use super::layouts::StepLayout;
use crate::predict::model::Calibration;
use crate::spec::Spec;

/// How often each pass of a block is run on this host. The shortest counts.
const TIMES: usize = 2;

/// All that decides the work of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkKey {
    /// Ranks that divide each layer.
    pub tp: usize,
    /// Samples.
    pub rows: usize,
    /// Whether activations are computed again.
    pub is_checkpointed: bool,
    /// The type of products.
    pub precision: PrecisionName,
}

impl WorkKey {
    /// The key of a layout.
    pub fn of(layout: &StepLayout) -> Self {
        let StepLayout {
            tp,
            micro_batch: rows,
            checkpoint_activations: is_checkpointed,
            precision,
            ..
        } = *layout;
        Self { tp, rows, is_checkpointed, precision }
    }

    /// The flags of a run of one such rank, or of those that divide its layers.
    fn spec(&self, base: &Spec) -> Spec {
        let spec = base
            .without(&["batch-size", "mesh", "schedule"])
            .with("nproc", self.tp)
            .with("global-batch-size", self.rows);
        let spec = spec.with("strategy", if self.tp > 1 { "ddp" } else { "single" });
        let spec = spec.with("precision", self.precision.name());
        let spec = if self.tp > 1 { spec.with("mesh", format!("tp={}", self.tp)) } else { spec };
        if self.is_checkpointed { spec.with("checkpoint-activations", true) } else { spec }
    }
}

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
    /// The part of the time in which the bytes of memory decide, not the operations; `None` where this is not known.
    pub by_memory: Option<f64>,
    /// The bytes that the optimizer reads and writes for each parameter.
    pub optimizer_bytes: f64,
}

impl BlockWork {
    /// Counts or measures. Fails as `paceline train` does with such a layout.
    pub fn of(base: &Spec, key: WorkKey, hardware: &RankHardware) -> Result<Self> {
        let (config, data, model) = resolve_unchecked(&key.spec(base), None)?;
        let (options, samples) = (config.strategy.options, BatchShape::of(data.train.as_ref()));
        let precision = options.precision;
        let counted = flops::per_block(&model, &samples, &options)?;
        let counted = match counted {
            Some(costs) => costs.iter().map(BlockCost::total).collect(),
            None => vec![1.0; model.blocks.len()],
        };
        let meta = BlockRunner::new(config.threads, Allocator::meta(), &samples, key.rows)?;
        let rehearsal = Rehearsal::of(
            &model,
            precision,
            &meta.compute,
            std::slice::from_ref(&meta.batch),
            None,
            false,
        );
        let rehearsal = rehearsal.map_err(failed)?;
        let (costs, by_memory) = match &hardware.on.card {
            Some(card) => {
                let per_s =
                    RankHardware::flop_per_s(card, key.precision, config.tf32, hardware.mfu);
                let per_s = per_s.ok_or_else(|| {
                    Failure::Usage(format!(
                        "{} has no products in {}",
                        card.name,
                        key.precision.name()
                    ))
                })?;
                let compute = &meta.compute;
                let flop = meta.costs(&model, precision, 0, &mut || {
                    (compute.forward_flops() + compute.backward_flops()) as f64
                })?;
                let bytes =
                    meta.costs(&model, precision, 0, &mut || compute.moved_bytes() as f64)?;
                roofline(&flop, &bytes, 1e3 / per_s, 1e3 / card.bytes_per_s)
            }
            None => {
                let here = BlockRunner::new(config.threads, Allocator::new(), &samples, key.rows)?;
                (here.costs(&model, precision, TIMES, &mut || now_ns() as f64 / 1e6)?, None)
            }
        };
        let copies = config.optimizer.config().state_names().len();
        // It reads the gradient, and reads and writes the parameter and its state.
        let optimizer_bytes = (3 + 2 * copies) as f64 * precision.master.size_bytes() as f64;
        let flops = (rehearsal.forward_flops + rehearsal.backward_flops) as f64;
        Ok(Self {
            model,
            costs,
            counted,
            exchanged: rehearsal.exchanged,
            flops,
            by_memory,
            optimizer_bytes,
        })
    }

    /// The part of the model with these blocks, and with the objective if the last one is among them.
    pub fn part(&self, blocks: &[usize]) -> Arc<Params> {
        let has_last = blocks.contains(&(self.model.blocks.len() - 1));
        let tied = self.model.objective.tied().map(|id| self.model.layout.param(id).unit);
        let of_objective = [self.model.objective.unit(), tied];
        let is_used = |unit| {
            blocks.iter().any(|at| self.model.blocks[*at].unit == unit)
                || (has_last && of_objective.contains(&Some(unit)))
        };
        Arc::new(self.model.layout.part(is_used, |id| self.model.layout.param(id).num_uses))
    }

    /// The milliseconds of all blocks.
    pub fn total(&self) -> f64 {
        self.costs.iter().map(BlockCost::total).sum()
    }
}

/// A device on which blocks are run, and a batch there.
struct BlockRunner {
    compute: Compute,
    batch: Batch,
}

impl BlockRunner {
    fn new(
        threads: usize,
        allocator: Allocator,
        samples: &BatchShape,
        rows: usize,
    ) -> Result<Self> {
        let compute = Compute::new(threads, allocator).map_err(|error| failed(error.into()))?;
        let longest = samples.max_length().unwrap_or(1);
        let memory = |error: MemoryError| failed(error.into());
        let batch = batch_of(samples, &compute.allocator, rows, longest).map_err(memory)?;
        if let Some(lengths) =
            batch.get(Batch::LENGTHS).filter(|_| compute.device() != Device::Meta)
        {
            lengths.write::<i64>().map_err(memory)?.fill(longest as i64);
        }
        Ok(Self { compute, batch })
    }

    fn costs(
        &self,
        model: &Model,
        precision: Precision,
        times: usize,
        clock: &mut dyn FnMut() -> f64,
    ) -> Result<Vec<BlockCost>> {
        block_costs(model, precision, &self.compute, &self.batch, |_| true, (clock, times))
            .map_err(failed)
    }
}

fn failed(error: ModelError) -> Failure {
    Failure::Usage(format!("the work of a step: {error}"))
}

/// The time of each part by the slower of operations and bytes, and the part of all time in which bytes are slower.
fn roofline(
    flop: &[BlockCost],
    bytes: &[BlockCost],
    per_flop: f64,
    per_byte: f64,
) -> (Vec<BlockCost>, Option<f64>) {
    let mut by_memory = 0.0;
    let mut slower = |flop: f64, bytes: f64| {
        let (flop, bytes) = (flop * per_flop, bytes * per_byte);
        by_memory += if bytes > flop { bytes } else { 0.0 };
        flop.max(bytes)
    };
    let of = |(flop, bytes): (&BlockCost, &BlockCost)| BlockCost {
        forward: slower(flop.forward, bytes.forward),
        backward_input: slower(flop.backward_input, bytes.backward_input),
        backward_weight: slower(flop.backward_weight, bytes.backward_weight),
        loss: slower(flop.loss, bytes.loss),
        loss_weight: slower(flop.loss_weight, bytes.loss_weight),
        ..*flop
    };
    let costs: Vec<BlockCost> = flop.iter().zip(bytes).map(of).collect();
    let all: f64 = costs.iter().map(BlockCost::total).sum();
    (costs, Some(by_memory / all.max(f64::MIN_POSITIVE)))
}

/// How much longer passes take in a run of all ranks on this host than alone, and the speed of the optimizer there.
#[derive(Clone, Copy, Debug)]
pub struct HostSpeed {
    /// The time of the passes in the run, by that of the blocks alone.
    pub scale: f64,
    /// Bytes that the optimizer reads and writes in a second.
    pub optimizer_bytes_per_s: f64,
}

impl HostSpeed {
    /// From a run without communication, and the work of its micro-batch.
    pub fn of(run: &Calibration, work: &BlockWork) -> Self {
        let bytes = work.optimizer_bytes * work.model.layout.trained_len() as f64;
        let optimizer_ms = (run.step_ms - run.backward_end_ms).max(1e-3);
        Self {
            scale: run.backward_end_ms / work.total(),
            optimizer_bytes_per_s: 1e3 * bytes / optimizer_ms,
        }
    }
}
