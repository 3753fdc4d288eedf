//! The objective of a language model: its head and the cross-entropy, fused.

use paceline_kernels::linear_cross_entropy::{self, Gradients, Then};
use paceline_memory::{DType, Tensor};

use crate::{Batch, Context, ModelError, Objective, ParamId, Result, Saved, UnitId};

/// Predicts a target for each position: (batch * seq, width) becomes logits over the vocabulary, a chunk at a time, and
/// these are compared with the targets, (batch, seq) of i64. The mean is over all tokens that have a target: if the batch has
/// lengths, those within them whose target is not [`linear_cross_entropy::IGNORED`], and otherwise all.
#[derive(Clone, Debug)]
pub(super) struct LanguageModelHead {
    /// `None` if the weight is that of the embedding.
    pub unit: Option<UnitId>,
    /// (vocabulary, width).
    pub weight: ParamId,
}

/// The targets without those of the padding.
pub(super) fn targets(cx: &Context) -> Result<Tensor> {
    let targets = cx.batch(Batch::TARGETS)?;
    let Some(lengths) = cx.optional(Batch::LENGTHS) else { return Ok(targets.clone()) };
    let inputs = cx.batch(Batch::INPUTS)?;
    if targets.shape() != inputs.shape() {
        return Err(ModelError::Config(format!(
            "the targets are {} and the inputs {}; a language model needs a target for each token, so make both fields \
             ragged, or none of them",
            targets.shape(),
            inputs.shape()
        )));
    }
    let real = cx.scratch(DType::I64, targets.shape())?;
    linear_cross_entropy::ignore_padding(cx.compute, targets, lengths, &real)?;
    Ok(real)
}

/// The number of tokens that have a target.
pub(super) fn count(batch: &Batch) -> Result<usize> {
    let Some(targets) = batch.on_host(Batch::TARGETS) else {
        // The host cannot look: each token has a target, see `Batch::of`.
        return Ok(batch.get(Batch::TARGETS).map_or(0, Tensor::num_elems));
    };
    let (count, len) = match batch.on_host(Batch::LENGTHS) {
        Some(lengths) => return Ok(linear_cross_entropy::count_within(targets, lengths)?),
        None => (linear_cross_entropy::count(targets)?, targets.num_elems()),
    };
    // Without lengths, the other ranks assume that each token counts.
    if count == len {
        Ok(count)
    } else {
        Err(ModelError::Config(format!(
            "{count} of {len} tokens of a batch have a target, and the batch has no lengths; give a target for each \
             token, or make inputs and targets ragged fields (Field::ragged_i64), whose batches have lengths"
        )))
    }
}

/// Batches with lengths have as many targets as their tokens say.
pub(super) fn count_of_all(batch: &Batch, num_samples: usize) -> Option<usize> {
    match batch.get(Batch::LENGTHS) {
        Some(_) => None,
        None => Some(num_samples * batch.inputs().dims().get(1).copied().unwrap_or(1)),
    }
}

/// Adds the loss of `rows` to `sums`. Returns the gradient of `rows`. The gradient of the weight is written and announced, or
/// put off.
pub(super) fn differentiate(
    cx: &mut Context,
    id: ParamId,
    rows: &Tensor,
    targets: &Tensor,
    scale: f64,
    sums: &Tensor,
    put_off: Option<&mut Saved>,
) -> Result<Tensor> {
    let weight = cx.param(id)?;
    let d_input = cx.gradient_of(rows)?;
    let trains = cx.trains(id);
    let put_off = put_off.filter(|_| trains);
    let shape = [targets.num_elems(), weight.dims()[0]];
    let d_outputs = put_off.is_some().then(|| cx.scratch(weight.dtype(), shape)).transpose()?;
    let d_weight = (trains && put_off.is_none()).then(|| cx.grad(id)).transpose()?;
    let then = match &d_outputs {
        Some(d_outputs) => Then::Keep(d_outputs),
        None => Then::weight(d_weight.as_ref(), cx.accumulates(id)),
    };
    let gradients = Gradients { d_input: &d_input, then };
    linear_cross_entropy::differentiate(
        cx.compute, rows, &weight, targets, scale, gradients, sums,
    )?;
    match (put_off, d_outputs) {
        (Some(saved), Some(d_outputs)) => *saved = Saved::of([rows.clone(), d_outputs]),
        _ if trains => cx.gradient_ready(id)?,
        _ => {}
    }
    Ok(d_input)
}

impl Objective for LanguageModelHead {
    fn unit(&self) -> Option<UnitId> {
        self.unit
    }

    fn has_parameters(&self) -> bool {
        true
    }

    fn tied(&self) -> Option<ParamId> {
        self.unit.is_none().then_some(self.weight)
    }

    fn classifies(&self) -> bool {
        true
    }

    fn count(&self, batch: &Batch) -> Result<usize> {
        count(batch)
    }

    fn count_of_all(&self, batch: &Batch, num_samples: usize) -> Option<usize> {
        count_of_all(batch, num_samples)
    }

    fn reads_lengths(&self) -> bool {
        true
    }

    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()> {
        let (weight, targets) = (cx.param(self.weight)?, targets(cx)?);
        Ok(linear_cross_entropy::evaluate(cx.compute, output, &weight, &targets, sums)?)
    }

    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
        put_off: Option<&mut Saved>,
    ) -> Result<Tensor> {
        let targets = targets(cx)?;
        differentiate(cx, self.weight, output, &targets, scale, sums, put_off)
    }

    fn has_halves(&self) -> bool {
        true
    }

    fn backward_weight(&self, cx: &mut Context, saved: &Saved) -> Result<()> {
        if !cx.trains(self.weight) {
            return Ok(());
        }
        let [output, d_outputs] = saved.tensors()?;
        let (d_weight, accumulate) = (cx.grad(self.weight)?, cx.accumulates(self.weight));
        linear_cross_entropy::backward_weight(
            cx.compute, output, d_outputs, &d_weight, accumulate,
        )?;
        cx.gradient_ready(self.weight)
    }
}
