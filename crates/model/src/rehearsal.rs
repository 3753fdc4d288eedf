//! A training step without arithmetic: what it takes of activations and of scratch memory.
//!
//! Input: a model, element types, a compute handle of [`Device::Meta`], and micro-batches of that device. Output: memory by
//! category after each phase, its peaks, and the floating-point operations of the forward passes. The passes are
//! those of a real step, so nothing is estimated, and a model may be larger than any memory. This file knows
//! nothing of ranks.

use std::ops::Range;
use std::sync::Arc;

use paceline_kernels::loss::SUMS_LEN;
use paceline_kernels::{Compute, norm};
use paceline_memory::{Category, DType, Device, PhaseUsage, Shape, Tensor, Usage};

use crate::{
    Batch, Context, Layer, Layout, Model, ModelError, OpenUnits, ParamId, PartExchange, PassHooks,
    Precision, Result, Storage,
};

/// The memory of a step by phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rehearsal {
    /// After the forward pass and the loss.
    pub forward: PhaseUsage,
    /// After the backward pass.
    pub backward: PhaseUsage,
    /// After the norm of the gradients, if they are clipped. The optimizer takes no scratch memory.
    pub step: PhaseUsage,
    /// The floating-point operations of the products of all forward passes and losses ([`Compute::forward_flops`]), without
    /// those that a backward pass repeats.
    pub forward_flops: u64,
    /// Those of the backward passes ([`Compute::backward_flops`]): a frozen layer has no gradient of its weight, and the
    /// first block of a model no gradient of its input.
    pub backward_flops: u64,
    /// The bytes that the operations of both passes and of the loss read and write ([`Compute::moved_bytes`]).
    pub moved_bytes: u64,
    /// The exchanges with the ranks that divide the layers, and the bytes that they combine.
    pub exchanged: (u64, u64),
}

impl Rehearsal {
    /// Rehearses a step over these micro-batches, one after the other. `clipped` are the elements of flat storage whose
    /// norm is taken before the optimizer's step, if any. `syncs_statistics` is [`PassHooks::syncs_statistics`].
    ///
    /// Errors if `compute` is not of [`Device::Meta`].
    pub fn of(
        model: &Model,
        precision: Precision,
        compute: &Compute,
        micro_batches: &[Batch],
        clipped: Option<&[Range<usize>]>,
        syncs_statistics: bool,
    ) -> Result<Self> {
        let mut forward_flops = 0;
        let pass = |cx: &mut Context, sums: &Tensor, batch: &Batch| {
            let flops_before = compute.forward_flops();
            let (output, saved) = model.network().forward(cx, batch.inputs().clone())?;
            cx.begin_pass();
            let d_output = model.differentiate(cx, &output, 1.0, sums, None)?;
            drop(output);
            forward_flops += compute.forward_flops() - flops_before;
            compute.allocator.end_phase(FORWARD);
            model.backward(cx, saved, d_output)?;
            compute.allocator.end_phase(BACKWARD);
            Ok(())
        };
        let extra = (clipped, syncs_statistics);
        let layout = model.layout.clone();
        let rehearsal = Self::of_passes(layout, precision, compute, micro_batches, extra, pass)?;
        Ok(Self { forward_flops, ..rehearsal })
    }

    /// The same with other passes, such as those of a pipeline's stages, which may end phases of their own. `layout` has the parameters
    /// that they use. Each gets a context with a batch, memory for the sums of the loss, and the batch.
    pub fn of_passes(
        layout: Arc<Layout>,
        precision: Precision,
        compute: &Compute,
        batches: &[Batch],
        (clipped, syncs_statistics): (Option<&[Range<usize>]>, bool),
        mut pass: impl FnMut(&mut Context, &Tensor, &Batch) -> Result<()>,
    ) -> Result<Self> {
        check_meta(compute)?;
        let allocator = &compute.allocator;
        let storage = Storage::private(layout, precision, allocator)?;
        let sums = allocator.tensor(DType::F64, [SUMS_LEN], Category::Workspace)?;
        let mut units = OpenUnits::new(storage.layout());
        let mut hooks = OneRank { syncs_statistics, exchanged: (0, 0) };
        let counts = || [compute.forward_flops(), compute.backward_flops(), compute.moved_bytes()];
        let before = counts();
        allocator.begin_phase();
        allocator.forget_phases();
        Context::resumed(compute, &storage, &mut units, &mut hooks).open_roots()?;
        for batch in batches {
            let cx = Context::resumed(compute, &storage, &mut units, &mut hooks);
            pass(&mut cx.with_batch(batch), &sums, batch)?;
        }
        let [forward_flops, backward_flops, moved_bytes] =
            std::array::from_fn(|at| counts()[at] - before[at]);
        if let Some(ranges) = clipped {
            let trained = storage.layout().trained().map(|(_, param)| param.range());
            let rows = norm::RowRanges::new(trained);
            for range in ranges {
                let grads = storage.grads().slice(range.clone())?;
                norm::squares(compute, &grads, range.start, &rows, rows.within(range))?;
            }
        }
        let step = allocator.end_phase(STEP);
        let phases = allocator.phases();
        let named = |name: &str| {
            let phase = phases.iter().find(|(known, _)| *known == name);
            phase.map(|(_, usage)| *usage).unwrap_or_default()
        };
        let (forward, backward) = (named(FORWARD), named(BACKWARD));
        let exchanged = hooks.exchanged;
        Ok(Self { forward, backward, step, forward_flops, backward_flops, moved_bytes, exchanged })
    }

    /// The most bytes of a category at once in the whole step.
    pub fn peak_bytes(&self, category: Category) -> u64 {
        let peak = |phase: &PhaseUsage| phase.of(category).peak_bytes;
        peak(&self.forward).max(peak(&self.backward)).max(peak(&self.step))
    }

    /// The most bytes of activations and scratch memory together: less than the sum of both peaks.
    pub fn peak_of_step_bytes(&self) -> u64 {
        let constant = |phase: &PhaseUsage| -> u64 {
            let lasting = [Category::Parameters, Category::Gradients, Category::Data];
            lasting.into_iter().map(|category| phase.of(category).current_bytes).sum()
        };
        let peak = |phase: &PhaseUsage| {
            let Usage { peak_bytes, .. } = phase.total;
            peak_bytes - constant(phase)
        };
        peak(&self.forward).max(peak(&self.backward)).max(peak(&self.step))
    }

    /// Bytes that the allocator has taken from the system beyond the most that was in use: gaps too small for any buffer.
    pub fn gaps_bytes(&self) -> u64 {
        let phases = [&self.forward, &self.backward, &self.step];
        let most = |of: fn(&PhaseUsage) -> Usage| {
            phases.map(|phase| of(phase).peak_bytes).into_iter().max()
        };
        most(|phase| phase.reserved)
            .unwrap_or(0)
            .saturating_sub(most(|phase| phase.total).unwrap_or(0))
    }
}

/// The shapes and element types of the inputs of the blocks `starts`, in order, in a forward pass of a batch with these extents.
/// `layout` is the whole model's. Errors if `compute` is not of [`Device::Meta`].
pub fn boundaries(
    model: &Model,
    layout: Arc<Layout>,
    precision: Precision,
    compute: &Compute,
    batch: &Batch,
    starts: &[usize],
) -> Result<Vec<(Shape, DType)>> {
    check_meta(compute)?;
    let allocator = &compute.allocator;
    let storage = Storage::private(layout, precision, allocator)?;
    let shaped_like = |(name, tensor): &(&'static str, Tensor)| {
        Ok((*name, allocator.tensor(tensor.dtype(), tensor.shape(), Category::Data)?))
    };
    let batch = Batch::of(batch.tensors().iter().map(shaped_like).collect::<Result<_>>()?);
    let mut units = OpenUnits::new(storage.layout());
    let mut hooks = |_: ParamId| Ok(());
    let cx = Context::evaluation(compute, &storage, &mut units, &mut hooks);
    let mut cx = cx.with_batch(&batch);
    cx.open_roots()?;
    let (mut value, mut found) = (batch.inputs().clone(), Vec::new());
    for (at, block) in model.blocks.iter().enumerate() {
        if starts.contains(&at) {
            found.push((value.shape(), value.dtype()));
        }
        value = block.forward(&mut cx, value)?.0;
    }
    Ok(found)
}

/// Errors unless nothing is computed.
fn check_meta(compute: &Compute) -> Result<()> {
    match compute.device() {
        Device::Meta => Ok(()),
        device @ (Device::Cpu | Device::Sim | Device::Cuda) => {
            let reason = format!("a rehearsal needs the device meta, not {device}");
            Err(ModelError::Config(reason))
        }
    }
}

const FORWARD: &str = "forward";
const BACKWARD: &str = "backward";
const STEP: &str = "step";

/// Sums nothing: the sums of one rank are as large as those of all ranks.
struct OneRank {
    syncs_statistics: bool,
    exchanged: (u64, u64),
}

impl PassHooks for OneRank {
    fn gradient_ready(&mut self, _: ParamId) -> Result<()> {
        Ok(())
    }

    fn syncs_statistics(&self) -> bool {
        self.syncs_statistics
    }

    fn start_exchange(&mut self, of: PartExchange) -> Result<()> {
        let bytes = match of {
            PartExchange::Gather { all: tensor, .. }
            | PartExchange::Scatter { sum: tensor, .. } => tensor.num_bytes(),
            // It is scattered, and gathered again.
            PartExchange::Sum(tensor) | PartExchange::Max(tensor) => 2 * tensor.num_bytes(),
        };
        self.exchanged.0 += 1;
        self.exchanged.1 += bytes as u64;
        Ok(())
    }
}
