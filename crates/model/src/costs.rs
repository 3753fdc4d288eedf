//! The cost of each block of a model, counted or measured.
//!
//! Input: a model, a batch, and a clock: that of the machine, or the operations that a rehearsal has counted. Output: the cost
//! of each pass of each block. Blocks are run alone, so that a model need not fit into memory. This file knows no stages.

use std::sync::Arc;

use paceline_kernels::Compute;
use paceline_kernels::loss::SUMS_LEN;
use paceline_memory::{Allocator, Category, DType, Device, Shape, Tensor};
use serde::{Deserialize, Serialize};

use crate::rehearsal::boundaries;
use crate::{
    Batch, Context, Half, Layer, Layout, Model, OpenUnits, ParamId, Precision, Result, Saved,
    Storage, UnitId,
};

/// The cost of a block for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockCost {
    /// The forward pass.
    pub forward: f64,
    /// The input half of the backward pass.
    pub backward_input: f64,
    /// The weight half.
    pub backward_weight: f64,
    /// The loss and its gradient, for the last block.
    pub loss: f64,
    /// The gradients of the objective's parameters.
    pub loss_weight: f64,
    /// Bytes of its output.
    pub output_bytes: u64,
    /// Bytes of activations from the forward pass to the end of the backward pass.
    pub kept_bytes: u64,
    /// Bytes that the objective keeps for the gradients of its parameters, if it has halves.
    pub loss_kept_bytes: u64,
}

impl BlockCost {
    /// All of it together.
    pub fn total(&self) -> f64 {
        self.forward + self.backward_input + self.backward_weight + self.loss + self.loss_weight
    }

    /// The cost of which each part is `both` of the same part of two.
    pub fn with(&self, other: &Self, mut both: impl FnMut(f64, f64) -> f64) -> Self {
        Self {
            forward: both(self.forward, other.forward),
            backward_input: both(self.backward_input, other.backward_input),
            backward_weight: both(self.backward_weight, other.backward_weight),
            loss: both(self.loss, other.loss),
            loss_weight: both(self.loss_weight, other.loss_weight),
            ..*self
        }
    }
}

/// The costs of the blocks that `wants` chooses; zero for the others. `clock` returns the time, or the work done so far. Each
/// pass runs `times + 1` times, and the least of the last ones counts.
///
/// On the processor, all inputs are zeros, lengths are the longest, and parameters have their first values.
pub fn block_costs(
    model: &Model,
    precision: Precision,
    compute: &Compute,
    batch: &Batch,
    wants: impl Fn(usize) -> bool,
    (clock, times): (&mut dyn FnMut() -> f64, usize),
) -> Result<Vec<BlockCost>> {
    let all: Vec<usize> = (0..model.blocks.len()).collect();
    let meta = Compute::new(1, Allocator::meta())?;
    let inputs = boundaries(model, model.layout.clone(), precision, &meta, batch, &all)?;
    let mut costs = vec![BlockCost::default(); all.len()];
    for at in all.into_iter().filter(|at| wants(*at)) {
        let is_last = at + 1 == costs.len();
        let block = &model.blocks[at];
        let objective = model.objective.unit().filter(|_| is_last);
        let is_used = |unit: UnitId| {
            unit == block.unit || Some(unit) == objective || model.layout.unit(unit).is_root
        };
        let run = BlockRun { model, precision, compute, batch, at, is_last };
        let num_uses = |id| model.layout.param(id).num_uses;
        let layout = Arc::new(model.layout.part(is_used, num_uses));
        costs[at] = run.cost(layout, inputs[at], clock, times)?;
    }
    Ok(costs)
}

/// A block that is run alone.
struct BlockRun<'a> {
    model: &'a Model,
    precision: Precision,
    compute: &'a Compute,
    batch: &'a Batch,
    at: usize,
    is_last: bool,
}

impl BlockRun<'_> {
    fn cost(
        &self,
        layout: Arc<Layout>,
        (shape, dtype): (Shape, DType),
        clock: &mut dyn FnMut() -> f64,
        times: usize,
    ) -> Result<BlockCost> {
        let allocator = &self.compute.allocator;
        let storage = Storage::private(layout.clone(), self.precision, allocator)?;
        if self.compute.device() != Device::Meta {
            storage.initialize(0)?;
        }
        let input = match self.at {
            0 => self.batch.inputs().clone(),
            _ => allocator.tensor(dtype, shape, Category::Activations)?,
        };
        let mut least: Option<BlockCost> = None;
        for time in 0..=times {
            let mut units = OpenUnits::new(&layout);
            let cost = self.once(&storage, &mut units, &input, clock)?;
            let before = least.filter(|_| time > 1).unwrap_or(cost);
            least = Some(cost.with(&before, f64::min));
        }
        Ok(least.unwrap_or_default())
    }

    fn once(
        &self,
        storage: &Storage,
        units: &mut OpenUnits,
        input: &Tensor,
        clock: &mut dyn FnMut() -> f64,
    ) -> Result<BlockCost> {
        let Self { model, compute, batch, at, is_last, .. } = *self;
        let allocator = &compute.allocator;
        let sums = allocator.tensor(DType::F64, [SUMS_LEN], Category::Workspace)?;
        let block = &model.blocks[at];
        let mut hooks = |_: ParamId| Ok(());
        let cx = Context::training(compute, storage, units, &mut hooks);
        let mut cx = cx.with_batch(batch);
        cx.open_roots()?;
        let in_use = || allocator.usage(Category::Activations).current_bytes;
        let before = in_use();
        let begin = clock();
        let (output, mut saved) = block.forward(&mut cx, input.clone())?;
        let forward = clock();
        let after = in_use();
        let (mut of_loss, before_loss) = (Saved::default(), clock());
        let has_halves = is_last && model.objective.has_halves();
        let d_output = if is_last {
            let put_off = has_halves.then_some(&mut of_loss);
            model.differentiate(&mut cx, &output, 1.0, &sums, put_off)?
        } else {
            cx.gradient_of(&output)?
        };
        let loss = clock();
        let gradient_bytes = num_bytes(&d_output);
        let loss_kept_bytes =
            if has_halves { in_use().saturating_sub(after + gradient_bytes) } else { 0 };
        if has_halves {
            model.backward_weight_of_objective(&mut cx, &of_loss)?;
        }
        let loss_weight = clock();
        if at > 0 {
            let half = Half::Input { wants_input: true };
            block.backward(&mut cx, &mut saved, d_output.clone(), half)?;
        }
        let input_half = clock();
        block.backward(&mut cx, &mut saved, d_output, Half::Weight)?;
        let weight_half = clock();
        cx.close_roots()?;
        Ok(BlockCost {
            forward: forward - begin,
            backward_input: input_half - loss_weight,
            backward_weight: weight_half - input_half,
            loss: loss - before_loss,
            loss_weight: loss_weight - loss,
            output_bytes: num_bytes(&output),
            kept_bytes: after.saturating_sub(before),
            loss_kept_bytes,
        })
    }
}

fn num_bytes(tensor: &Tensor) -> u64 {
    (tensor.num_elems() * tensor.dtype().size_bytes()) as u64
}
