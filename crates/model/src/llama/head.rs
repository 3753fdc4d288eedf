//! The objective of a language model: its head and the cross-entropy, fused.

use paceline_kernels::linear_cross_entropy::{self, Gradients};
use paceline_memory::Tensor;

use crate::{Batch, Context, ModelError, Objective, ParamId, Result, UnitId};

/// Predicts a target for each position: (batch * seq, width) becomes logits over the vocabulary, a chunk at a time, and
/// these are compared with the targets, (batch, seq) of i64. The mean is over all tokens.
#[derive(Clone, Debug)]
pub(super) struct LanguageModelHead {
    /// `None` if the weight is that of the embedding.
    pub unit: Option<UnitId>,
    /// (vocabulary, width).
    pub weight: ParamId,
}

impl Objective for LanguageModelHead {
    fn unit(&self) -> Option<UnitId> {
        self.unit
    }

    fn has_parameters(&self) -> bool {
        true
    }

    fn classifies(&self) -> bool {
        true
    }

    fn count(&self, batch: &Batch) -> Result<usize> {
        match batch.get(Batch::TARGETS) {
            Some(targets) => {
                let (count, len) = (linear_cross_entropy::count(targets)?, targets.num_elems());
                // Otherwise the ranks would have to add up their counts before each step.
                match count == len {
                    true => Ok(count),
                    false => Err(ModelError::Config(format!(
                        "{count} of {len} tokens of a batch have a target; a language model needs a target for each token"
                    ))),
                }
            }
            None => Ok(0),
        }
    }

    fn count_of_all(&self, batch: &Batch, num_samples: usize) -> usize {
        num_samples * batch.inputs().dims().get(1).copied().unwrap_or(1)
    }

    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()> {
        let (weight, targets) = (cx.param(self.weight)?, cx.batch(Batch::TARGETS)?);
        Ok(linear_cross_entropy::evaluate(cx.compute, output, &weight, targets, sums)?)
    }

    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
    ) -> Result<Tensor> {
        let (weight, targets) = (cx.param(self.weight)?, cx.batch(Batch::TARGETS)?);
        let d_input = cx.gradient_of(output)?;
        let trains = cx.trains(self.weight);
        let d_weight = trains.then(|| cx.grad(self.weight)).transpose()?;
        let accumulate = cx.accumulates(self.weight);
        let gradients = Gradients { d_input: &d_input, d_weight: d_weight.as_ref(), accumulate };
        linear_cross_entropy::differentiate(
            cx.compute, output, &weight, targets, scale, gradients, sums,
        )?;
        if trains {
            cx.gradient_ready(self.weight)?;
        }
        Ok(d_input)
    }
}
