//! The embedding layer: a row of a table for each number.

use paceline_kernels::embedding;
use paceline_memory::Tensor;

use crate::{Context, Half, Init, Layer, ParamId, Result, Saved, UnitBuilder};

/// Maps numbers (batch, seq) of i64 to rows (batch * seq, width) of the type of the parameters, with which the residual
/// stream begins. It is the first layer of a model, since numbers have no gradient.
#[derive(Clone, Debug)]
pub struct Embedding {
    width: usize,
    weight: ParamId,
}

impl Embedding {
    /// Registers weight (len, width).
    pub fn new(unit: &mut UnitBuilder, len: usize, width: usize, init: Init) -> Self {
        Self { width, weight: unit.param("weight", [len, width], init) }
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
        embedding::forward(cx.compute, &input, &table, &rows)?;
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
            embedding::backward(cx.compute, input, &d_output, &d_weight, accumulate)?;
            cx.gradient_ready(self.weight)?;
        }
        Ok(None)
    }
}
