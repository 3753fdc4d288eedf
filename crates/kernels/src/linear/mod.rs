//! The fully connected layer: `y = x w^T + b`, optionally without `b`, and optionally followed by ReLU.
//!
//! Shapes: x (m, k), w (n, k), b (n), y (m, n).
//!
//! Element types: all f32, all f64, or mixed with bf16. The mixed form is chosen by the activations, which are x and y or
//! their gradients: if at least one of the two is bf16, each other tensor is f32 or bf16. Products then round their
//! operands to bf16 and sum in f32, see [`matmul::product`](crate::matmul::product); a bias is added in f32.

mod mixed;

use paceline_memory::{DType, Device, ReadGuard, Tensor};

pub use crate::activation::Activation;
use crate::compute::batches;
use crate::error::expect_shape;
use crate::matmul::{Matrix, matmul};
use crate::meta::{self, MetaScratch};
use crate::{Compute, KernelError, Real, Result, elementwise};

const OP: &str = "linear";

/// The three sizes: rows of x, outputs, inputs.
fn sizes(operand: &'static str, x: &Tensor, weight: &Tensor) -> Result<(usize, usize, usize)> {
    let &[n, k] = weight.dims() else {
        let (expected, got) = ([0, 0].into(), weight.shape());
        return Err(KernelError::Shape { op: OP, operand: "weight", expected, got });
    };
    let m = x.dims().first().copied().unwrap_or(0);
    expect_shape(OP, operand, x.shape(), [m, if operand == "input" { k } else { n }])?;
    Ok((m, n, k))
}

/// Whether an activation is bf16.
fn is_mixed(activations: [&Tensor; 2]) -> bool {
    activations.iter().any(|tensor| tensor.dtype() == DType::BF16)
}

/// Writes `output` (m, n). f32, f64, or mixed with bf16; overwrites.
pub fn forward(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    output: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("linear_forward", [input, weight]);
    let (m, n, k) = sizes("input", input, weight)?;
    if let Some(bias) = bias {
        expect_shape(OP, "bias", bias.shape(), [n])?;
    }
    expect_shape(OP, "output", output.shape(), [m, n])?;
    if is_mixed([input, output]) {
        let (sizes, operands) = ((m, n, k), (input, weight));
        return mixed::forward(compute, sizes, operands, bias, activation, output);
    }
    match compute.device_of(OP, [input, weight, output].into_iter().chain(bias))? {
        Device::Cpu => match input.dtype() {
            DType::F32 => forward_of::<f32>(compute, input, weight, bias, activation, output),
            DType::F64 => forward_of::<f64>(compute, input, weight, bias, activation, output),
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            compute.count_products([m, n, k]);
            let dtype = meta::float(OP, input)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [input, weight])?;
            let mut pretended = pretended.reads(dtype, bias)?.writes(dtype, [output])?;
            match is_transposed(m, k) {
                true => pretended.scratch(dtype, m.saturating_mul(n)),
                false => Ok(()),
            }
        }
    }
}

/// Whether `w x^T` is computed instead of `x w^T`. The weights are then read in the order of memory, but the result has
/// to be turned back. With few rows of x that costs less than to bring all weights into another order.
/// The ratio is measured, see docs/log.md.
fn is_transposed(m: usize, k: usize) -> bool {
    k >= 2 * m
}

fn forward_of<T: Real>(
    compute: &Compute,
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    output: &Tensor,
) -> Result<()> {
    let (m, n, k) = sizes("input", input, weight)?;
    let (x, w, mut y) = (input.read::<T>()?, weight.read::<T>()?, output.write::<T>()?);
    let (x, w) = (Matrix::new(&x, m, k), Matrix::new(&w, n, k));
    let with_relu = activation == Activation::Relu;
    if is_transposed(m, k) {
        let mut turned = compute.scratch(m * n)?;
        matmul(compute, w, x.transposed(), &mut turned, false);
        let bias = Bias::of(bias, n)?;
        return compute.threads.for_each(batches(compute, &mut y, n, m), |(first, y)| {
            elementwise::turn_add_bias(compute.simd, &turned, m, first, bias.elems(), with_relu, y);
            Ok(())
        });
    }
    matmul(compute, x, w.transposed(), &mut y, false);
    if bias.is_none() && !with_relu {
        return Ok(());
    }
    let bias = Bias::of(bias, n)?;
    compute.threads.for_each(batches(compute, &mut y, n, m), |(_, y)| {
        elementwise::add_bias(compute.simd, bias.elems(), with_relu, y);
        Ok(())
    })
}

/// A bias, or zeros: adding these costs less than a second form of each loop.
enum Bias<T: Real> {
    Given(ReadGuard<T>),
    Zeros(Vec<T>),
}

impl<T: Real> Bias<T> {
    fn of(bias: Option<&Tensor>, n: usize) -> Result<Self> {
        Ok(match bias {
            Some(bias) => Self::Given(bias.read()?),
            None => Self::Zeros(vec![T::default(); n]),
        })
    }

    fn elems(&self) -> &[T] {
        match self {
            Self::Given(elems) => elems,
            Self::Zeros(elems) => elems,
        }
    }
}

/// Gradients of weight and bias from `d_output` (m, n), the gradient before the activation:
/// `dw = dy^T x`, `db = sum over rows of dy`. Overwrites, or adds to what is there if `accumulate`.
/// f32, f64, or mixed with bf16.
pub fn backward_weight(
    compute: &Compute,
    input: &Tensor,
    d_output: &Tensor,
    d_weight: &Tensor,
    d_bias: Option<&Tensor>,
    accumulate: bool,
) -> Result<()> {
    let _time = compute.time_old("linear_backward_weight", [input, d_output]);
    let (m, n, k) = sizes("input", input, d_weight)?;
    expect_shape(OP, "d_output", d_output.shape(), [m, n])?;
    if let Some(d_bias) = d_bias {
        expect_shape(OP, "d_bias", d_bias.shape(), [n])?;
    }
    if is_mixed([input, d_output]) {
        let (sizes, operands) = ((m, n, k), (input, d_output));
        return mixed::backward_weight(compute, sizes, operands, d_weight, d_bias, accumulate);
    }
    macro_rules! product {
        ($real:ty) => {{
            let (x, dy) = (input.read::<$real>()?, d_output.read::<$real>()?);
            let (a, b) = (Matrix::new(&dy, m, n).transposed(), Matrix::new(&x, m, k));
            matmul(compute, a, b, &mut d_weight.write::<$real>()?, accumulate);
            if let Some(d_bias) = d_bias {
                let mut db = d_bias.write::<$real>()?;
                elementwise::add_rows(compute.simd, &dy, &mut db, accumulate);
            }
        }};
    }
    match compute.device_of(OP, [input, d_output, d_weight].into_iter().chain(d_bias))? {
        Device::Cpu => match input.dtype() {
            DType::F32 => product!(f32),
            DType::F64 => product!(f64),
            dtype => return Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            compute.count_backward([m, n, k]);
            let dtype = meta::float(OP, input)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [input, d_output])?;
            pretended.writes(dtype, [d_weight].into_iter().chain(d_bias))?;
        }
    }
    Ok(())
}

/// Gradient of the input: `dx = dy w`, (m, k). f32, f64, or mixed with bf16; overwrites.
pub fn backward_input(
    compute: &Compute,
    weight: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let _time = compute.time_old("linear_backward_input", [weight, d_output]);
    let (m, n, k) = sizes("d_output", d_output, weight)?;
    expect_shape(OP, "d_input", d_input.shape(), [m, k])?;
    if is_mixed([d_output, d_input]) {
        return mixed::backward_input(compute, (m, n, k), weight, d_output, d_input);
    }
    macro_rules! product {
        ($real:ty) => {{
            let (w, dy) = (weight.read::<$real>()?, d_output.read::<$real>()?);
            let (dy, w) = (Matrix::new(&dy, m, n), Matrix::new(&w, n, k));
            matmul(compute, dy, w, &mut d_input.write::<$real>()?, false)
        }};
    }
    match compute.device_of(OP, [weight, d_output, d_input])? {
        Device::Cpu => match d_output.dtype() {
            DType::F32 => product!(f32),
            DType::F64 => product!(f64),
            dtype => return Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            compute.count_backward([m, n, k]);
            let dtype = meta::float(OP, d_output)?;
            let pretended = MetaScratch::new(compute, OP).reads(dtype, [weight, d_output])?;
            pretended.writes(dtype, [d_input])?;
        }
    }
    Ok(())
}
