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

use super::{Chain, Sequence, part_of};
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
        let own = &self.parts[cx.divided().own()];
        let (mut values, mut saved) = (Vec::new(), Saved::of([input.clone()]));
        for part in own {
            let (value, mut of_first) = part.layers[0].forward(cx, all.clone())?;
            of_first.replace(&all, &input);
            values.push(value);
            saved.parts.push(of_first);
        }
        // Only the first layers need all rows of the input.
        drop(all);
        let mut sum = SumOfParts::new(own.len());
        for ((part, value), of_part) in own.iter().zip(values).zip(&mut saved.parts) {
            let (output, mut of_rest) = Chain(&part.layers[1..]).forward(cx, value)?;
            of_rest.parts.insert(0, std::mem::take(of_part));
            *of_part = of_rest;
            sum.push(cx.compute, cx.widened(output)?)?;
        }
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
        let parts = &self.parts[cx.divided().own()];
        let pass = PartsPass { parts, input: &input, gathers: self.gathers };
        let d_input = if let Half::Whole { wants_input } = half {
            pass.whole(cx, std::mem::take(&mut saved.parts), d_output, wants_input)?
        } else {
            pass.half(cx, &mut saved.parts, &d_output, half)?
        };
        d_input.map(|d_input| cx.retyped(d_input, input.dtype())).transpose()
    }
}

/// The backward pass of this rank's parts.
struct PartsPass<'a> {
    parts: &'a [Sequence],
    /// The rows that this rank keeps.
    input: &'a Tensor,
    gathers: bool,
}

impl PartsPass<'_> {
    /// Both halves. All rows of the gradient of the output, of that of the input, and of the input are in memory one after the other. If
    /// exchanges overlap, two of them are: the input is gathered beside the layers after the first, and its gradient is scattered beside
    /// the gradients of the first layers' weights.
    fn whole(
        &self,
        cx: &mut Context,
        mut saved: Vec<Saved>,
        d_output: Tensor,
        wants_input: bool,
    ) -> Result<Option<Tensor>> {
        let overlaps = cx.divided().overlaps;
        let early = if overlaps { self.start_gather(cx)? } else { None };
        let mut d_values = Vec::new();
        for (part, saved) in self.parts.iter().zip(&mut saved) {
            let (rest, mut of_rest) = (Chain(&part.layers[1..]), saved.split_off(1));
            let half = Half::Whole { wants_input: true };
            let d_value = rest.backward(cx, &mut of_rest, d_output.clone(), half)?;
            d_values.push(d_value.expect("a gradient that is wanted"));
        }
        drop(d_output);
        let half = Half::Input { wants_input };
        let sum = self.first_layers(cx, (&mut saved, self.input), &d_values, half)?;
        if !overlaps {
            let d_input = sum.map(|sum| cx.sum_rows(sum, self.gathers)).transpose()?;
            let all = self.gather(cx)?;
            self.first_layers(cx, (&mut saved, &all), &d_values, Half::Weight)?;
            return Ok(d_input);
        }
        if early.is_some() {
            cx.finish_exchange()?;
        }
        let d_input = sum.map(|sum| cx.start_sum(sum, self.gathers)).transpose()?;
        let all = early.as_ref().unwrap_or(self.input);
        self.first_layers(cx, (&mut saved, all), &d_values, Half::Weight)?;
        if d_input.is_some() {
            cx.finish_exchange()?;
        }
        Ok(d_input)
    }

    /// A half of the first layers, the gradients of whose outputs are known. The gradients of the weights need all rows of the input.
    fn first_layers(
        &self,
        cx: &mut Context,
        (saved, all): (&mut [Saved], &Tensor),
        d_values: &[Tensor],
        half: Half,
    ) -> Result<Option<Tensor>> {
        let mut sum = SumOfParts::new(self.parts.len());
        for ((part, saved), d_value) in self.parts.iter().zip(saved).zip(d_values) {
            let of_first = &mut saved.parts[0];
            of_first.replace(self.input, all);
            if let Some(d_input) = part.layers[0].backward(cx, of_first, d_value.clone(), half)? {
                sum.push(cx.compute, cx.widened(d_input)?)?;
            }
        }
        Ok(sum.finish())
    }

    /// A half of all layers.
    fn half(
        &self,
        cx: &mut Context,
        saved: &mut [Saved],
        d_output: &Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let all = if half == Half::Weight { self.gather(cx)? } else { self.input.clone() };
        let mut sum = SumOfParts::new(self.parts.len());
        for (part, saved) in self.parts.iter().zip(saved) {
            saved.replace(self.input, &all);
            if let Some(d_input) = part.backward(cx, saved, d_output.clone(), half)? {
                sum.push(cx.compute, cx.widened(d_input)?)?;
            }
            saved.replace(&all, self.input);
        }
        sum.finish().map(|sum| cx.sum_rows(sum, self.gathers)).transpose()
    }

    /// Starts to bring all rows of the input together, if ranks have parts of them.
    fn start_gather(&self, cx: &mut Context) -> Result<Option<Tensor>> {
        if self.gathers { cx.start_gather(self.input) } else { Ok(None) }
    }

    /// All rows of the input.
    fn gather(&self, cx: &mut Context) -> Result<Tensor> {
        if self.gathers { cx.gather_rows(self.input.clone()) } else { Ok(self.input.clone()) }
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
        // The input may be without the rows of other ranks.
        let d_input = cx.scratch(input.dtype(), [d_output.dims()[0], input.dims()[1]])?;
        let begin = self.part.index * d_output.dims()[1];
        divided::place_columns(cx.compute, &d_output, begin, &d_input)?;
        Ok(Some(d_input))
    }
}
