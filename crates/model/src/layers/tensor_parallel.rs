//! A layer that is divided into equal parts, each of which one of several ranks computes (tensor parallelism).
//!
//! Each part is a chain of layers with its share of the parameters, such as some heads of attention with the projections before and after
//! them. All parts see the same input, and their outputs are added up. So the ranks exchange a tensor twice in a forward pass, and twice in a
//! backward pass. Between divided layers each rank has some of the rows (sequence parallelism), so that the sum is scattered and the next
//! input gathered, with as many bytes as one all-reduce.
//!
//! Sources: Shoeybi and others, Megatron-LM (2019); Korthikanti and others, Reducing Activation Recomputation in Large
//! Transformer Models (2022).

use paceline_kernels::divided::{self, SumOfParts};
use paceline_kernels::linear::Activation;
use paceline_memory::Tensor;

use super::{Sequence, part_of};
use crate::{Context, Half, Init, Layer, ParamId, ParamPart, Result, Saved, UnitBuilder};

/// The sum of the parts' outputs, added up as a tree in the type of the parameters.
///
/// Where rows are divided, its input and output are the rows of this rank. The input is gathered again in the backward pass, so that
/// no rank keeps more than its own rows.
pub struct TensorParallel {
    /// All of them. A rank computes its own.
    parts: Vec<Sequence>,
    /// Whether the input has this rank's rows only. If not, all ranks have all of it.
    pub(crate) gathers: bool,
    /// Whether the output has this rank's rows only.
    pub(crate) scatters: bool,
}

impl TensorParallel {
    /// A layer of `count` parts between rows that are divided. `part` makes one of them.
    ///
    /// Errors if a part does.
    pub fn new(count: usize, part: impl FnMut(usize) -> Result<Sequence>) -> Result<Self> {
        let parts = (0..count).map(part).collect::<Result<_>>()?;
        Ok(Self { parts, gathers: true, scatters: true })
    }
}

impl Layer for TensorParallel {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let all = if self.gathers { cx.gather_rows(input.clone())? } else { input.clone() };
        let own = cx.divided().own();
        let (mut saved, mut sum) = (Saved::of([input.clone()]), SumOfParts::new(own.len()));
        for part in &self.parts[own] {
            let (output, mut of_part) = part.forward(cx, all.clone())?;
            of_part.replace(&all, &input);
            saved.parts.push(of_part);
            sum.push(cx.compute, cx.widened(output)?)?;
        }
        drop(all);
        let sum = sum.finish().expect("a rank has a part");
        Ok((cx.sum_rows(sum, self.scatters)?, saved))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let [input] = saved.tensors()?.clone();
        let d_output = if self.scatters { cx.gather_rows(d_output)? } else { d_output };
        let gathered = if self.gathers { cx.start_gather(&input)? } else { None };
        let own = cx.divided().own();
        let mut pass =
            PartsPass { parts: &self.parts[own], saved, d_output, all: &gathered, input: &input };
        let overlaps = cx.divided().overlaps && half == Half::Whole { wants_input: true };
        if !overlaps {
            if gathered.is_some() {
                cx.finish_exchange()?;
            }
            let Some(sum) = pass.run(cx, half)? else { return Ok(None) };
            drop(gathered);
            let d_input = cx.sum_rows(sum, self.gathers)?;
            return cx.retyped(d_input, input.dtype()).map(Some);
        }
        // The input half needs no input. Its result is added up while the weight half computes.
        let Some(sum) = pass.run(cx, Half::Input { wants_input: true })? else { return Ok(None) };
        if gathered.is_some() {
            cx.finish_exchange()?;
        }
        let d_input = cx.start_sum(sum, self.gathers)?;
        pass.run(cx, Half::Weight)?;
        cx.finish_exchange()?;
        cx.retyped(d_input, input.dtype()).map(Some)
    }
}

/// The backward pass of this rank's parts, or a half of it.
struct PartsPass<'a> {
    parts: &'a [Sequence],
    saved: &'a mut Saved,
    d_output: Tensor,
    /// All rows of the input, if they were gathered.
    all: &'a Option<Tensor>,
    input: &'a Tensor,
}

impl PartsPass<'_> {
    /// The sum of the gradients of the input, if the half wants it.
    fn run(&mut self, cx: &mut Context, half: Half) -> Result<Option<Tensor>> {
        let all = self.all.as_ref().unwrap_or(self.input);
        let mut sum = SumOfParts::new(self.parts.len());
        for (part, saved) in self.parts.iter().zip(&mut self.saved.parts) {
            saved.replace(self.input, all);
            if let Some(d_input) = part.backward(cx, saved, self.d_output.clone(), half)? {
                sum.push(cx.compute, cx.widened(d_input)?)?;
            }
            saved.replace(all, self.input);
        }
        Ok(sum.finish())
    }
}

/// `y = activation(x + bias)`, for the sum that a divided layer makes. x is of the type of the parameters.
pub struct Bias {
    bias: ParamId,
    activation: Activation,
    /// Whether rows are divided here.
    by_rows: bool,
}

impl Bias {
    /// Registers the bias (columns).
    pub(crate) fn new(
        unit: &mut UnitBuilder,
        name: &str,
        (columns, init): (usize, Init),
        activation: Activation,
        by_rows: bool,
    ) -> Self {
        Self { bias: unit.param(name, [columns], init), activation, by_rows }
    }
}

impl Layer for Bias {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let output = cx.activation(input.shape())?;
        let bias = cx.widened(cx.param(self.bias)?)?;
        divided::add_bias(cx.compute, &input, &bias, self.activation, &output)?;
        Ok((output.clone(), Saved::of([output])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let [output] = saved.tensors()?;
        let d_sum = match self.activation {
            Activation::None => d_output,
            Activation::Relu => {
                let d_sum = cx.activation(output.shape())?;
                paceline_kernels::elementwise::relu_backward(
                    cx.compute, output, &d_output, &d_sum,
                )?;
                d_sum
            }
        };
        if half.writes_weights() && cx.trains(self.bias) {
            let rows = (d_sum.dims()[0], self.by_rows);
            cx.gradient_over_rows(self.bias, rows, |cx, rows, d_bias, accumulate| {
                debug_assert!(!accumulate, "sums over runs of rows are new");
                Ok(divided::sum_rows(cx.compute, &part_of(&d_sum, &rows)?, d_bias)?)
            })?;
        }
        Ok(half.wants_input().then_some(d_sum))
    }
}

/// Some of the columns of its input, as a matrix of their own. Its gradient is zero in the other columns.
pub(crate) struct ColumnsOfPart {
    pub part: ParamPart,
}

impl Layer for ColumnsOfPart {
    fn has_parameters(&self) -> bool {
        false
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let (rows, all) = (input.dims()[0], input.dims()[1]);
        let columns = all / self.part.count;
        let output = cx.scratch(input.dtype(), [rows, columns])?;
        divided::copy_columns(cx.compute, &input, self.part.index * columns, &output)?;
        Ok((output, Saved::of([input])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        _: Half,
    ) -> Result<Option<Tensor>> {
        let [input] = saved.tensors()?;
        let d_input = cx.gradient_of(input)?;
        let begin = self.part.index * d_output.dims()[1];
        divided::place_columns(cx.compute, &d_output, begin, &d_input)?;
        Ok(Some(d_input))
    }
}
