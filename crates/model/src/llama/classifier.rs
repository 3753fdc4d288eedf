//! The objective of a sequence classifier: a linear layer on the last token of each sequence, and the cross-entropy.

use paceline_kernels::linear::{self, Activation};
use paceline_kernels::{embedding, linear_cross_entropy};
use paceline_memory::{DType, Tensor};

use super::head;
use crate::{Batch, Context, Objective, ParamId, Result, Saved, UnitId};

/// Classifies each sequence by its last token that is not padding: that row of (batch * seq, width) becomes logits over the
/// classes, which are compared with the target, (batch) of i64. The mean is over the sequences.
///
/// A text may end with the token that also pads. `transformers` takes it for padding there too, so its models were trained
/// to classify by the token before it.
#[derive(Clone, Debug)]
pub(super) struct Classifier {
    pub unit: UnitId,
    /// (classes, width).
    pub weight: ParamId,
    /// The token that pads, if the settings name it.
    pub pad: Option<i64>,
}

impl Classifier {
    /// The last token of each sequence, (batch, width), and the rows where these lie, (batch).
    fn last_tokens(&self, cx: &Context, output: &Tensor) -> Result<[Tensor; 2]> {
        let (inputs, lengths) = (cx.batch(Batch::INPUTS)?, cx.batch(Batch::LENGTHS)?);
        let rows = cx.scratch(DType::I64, lengths.shape())?;
        embedding::last_rows(cx.compute, inputs, lengths, self.pad, &rows)?;
        let last = cx.scratch(output.dtype(), [rows.num_elems(), output.dims()[1]])?;
        embedding::forward(cx.compute, &rows, output, &last)?;
        Ok([last, rows])
    }
}

impl Objective for Classifier {
    fn unit(&self) -> Option<UnitId> {
        Some(self.unit)
    }

    fn classifies(&self) -> bool {
        true
    }

    fn logits(&self, cx: &mut Context, output: &Tensor) -> Result<Option<Tensor>> {
        let [last, _] = self.last_tokens(cx, output)?;
        let weight = cx.param(self.weight)?;
        let logits = cx.wide_activation([last.dims()[0], weight.dims()[0]])?;
        linear::forward(cx.compute, &last, &weight, None, Activation::None, &logits)?;
        Ok(Some(logits))
    }

    fn evaluate(&self, cx: &mut Context, output: &Tensor, sums: &Tensor) -> Result<()> {
        let [last, _] = self.last_tokens(cx, output)?;
        let (weight, targets) = (cx.param(self.weight)?, cx.batch(Batch::TARGETS)?);
        Ok(linear_cross_entropy::evaluate(cx.compute, &last, &weight, targets, sums)?)
    }

    fn differentiate(
        &self,
        cx: &mut Context,
        output: &Tensor,
        scale: f64,
        sums: &Tensor,
        _put_off: Option<&mut Saved>,
    ) -> Result<Tensor> {
        let [last, rows] = self.last_tokens(cx, output)?;
        let targets = cx.batch(Batch::TARGETS)?;
        let d_last = head::differentiate(cx, self.weight, &last, targets, scale, sums, None)?;
        let d_output = cx.gradient_of(output)?;
        embedding::backward(cx.compute, &rows, &d_last, &d_output, false)?;
        Ok(d_output)
    }
}
