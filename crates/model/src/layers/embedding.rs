//! The embedding layer: a row of a table for each number.

use std::ops::Range;

use paceline_kernels::{divided, embedding};
use paceline_memory::Tensor;

use crate::{Context, Half, Init, Layer, ParamId, ParamPart, Result, Saved, UnitBuilder};

/// Maps numbers (batch, seq) of i64 to rows (batch * seq, width) of the type of the parameters, with which the residual
/// stream begins. It is the first layer of a model, since numbers have no gradient.
#[derive(Clone, Debug)]
pub struct Embedding {
    width: usize,
    weight: ParamId,
    /// The rows of the table that it has, and their number with those of all other parts, if the table is divided.
    part: Option<(Range<usize>, usize)>,
}

impl Embedding {
    /// Registers weight (len, width).
    pub fn new(unit: &mut UnitBuilder, len: usize, width: usize, init: Init) -> Self {
        Self { width, weight: unit.param("weight", [len, width], init), part: None }
    }

    /// One of equal parts of the table of `len` rows. The rows of other parts are zero.
    pub(crate) fn part(
        unit: &mut UnitBuilder,
        len: usize,
        width: usize,
        ParamPart { index, count, .. }: ParamPart,
        init: Init,
    ) -> Self {
        let own = len / count;
        let part = Some((index * own..(index + 1) * own, len));
        Self { part, ..Self::new(unit, own, width, init) }
    }

    /// The table, for a head that is tied to it.
    pub fn weight(&self) -> ParamId {
        self.weight
    }
}

impl Layer for Embedding {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let table = cx.param(self.weight)?;
        let rows = cx.scratch(table.dtype(), [input.num_elems(), self.width])?;
        match self.part.clone() {
            None => embedding::forward(cx.compute, &input, &table, &rows)?,
            Some(part) => divided::embedding(cx.compute, &input, &table, part, &rows)?,
        }
        Ok((cx.widened(rows)?, Saved::of([input])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        if half.writes_weights() && cx.trains(self.weight) {
            let [input] = saved.tensors()?;
            let (d_weight, accumulate) = (cx.grad(self.weight)?, cx.accumulates(self.weight));
            match self.part.clone() {
                None => embedding::backward(cx.compute, input, &d_output, &d_weight, accumulate)?,
                Some((rows, _)) => divided::embedding_backward(
                    cx.compute, input, &d_output, &d_weight, rows, accumulate,
                )?,
            }
            cx.gradient_ready(self.weight)?;
        }
        Ok(None)
    }
}
