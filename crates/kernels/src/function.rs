//! Element-wise functions that a caller states by value and derivatives.
//!
//! Input: a function, its argument and its parameters. Output: values, and gradients by the chain rule. Parameters belong to the columns:
//! each element takes those of its place in the last dimension.

use std::array::from_fn;

use paceline_cuda::kernel::{In, Out, Scalar};
use paceline_cuda::{Grid, KernelSource};
use paceline_memory::Tensor;

use crate::card::{EXP, NUMBERS};
use crate::simd::vectorized;
use crate::stored::{Stored, dispatch};
use crate::threads::shares;
use crate::{Compute, Op, Real, Result, read, update, write};

#[cfg(test)]
mod by_hand_tests;

/// A function of an element and of `P` parameters. It is computed in the type of the parameters: f32 for 16-bit elements.
///
/// Loops use vector instructions where the compiler can inline both methods and all that they call: [`Real::fast_exp`] is inlined, and
/// `exp`, `sin`, `tanh` and the like are calls of a function. Errors of the operations name the function and the operand.
///
/// ```
/// use paceline_kernels::function::{self, Function};
/// use paceline_kernels::{Compute, Real};
/// use paceline_memory::{Allocator, Category, DType};
///
/// /// x / (1 + exp(-x))
/// #[derive(Clone)]
/// struct Silu;
///
/// impl Function<0> for Silu {
///     const NAME: &'static str = "silu";
///
///     fn value<T: Real>(&self, x: T, _: [T; 0]) -> T {
///         x / (T::from_f64(1.0) + (-x).fast_exp())
///     }
///
///     fn derivatives<T: Real>(&self, x: T, _: [T; 0]) -> (T, [T; 0]) {
///         let one = T::from_f64(1.0);
///         let s = one / (one + (-x).fast_exp());
///         (s * (one + x * (one - s)), [])
///     }
/// }
///
/// let memory = Allocator::new();
/// let compute = Compute::new(1, memory.clone())?;
/// let tensor = || memory.tensor(DType::F32, [2, 3], Category::Activations);
/// let (x, y) = (tensor()?, tensor()?);
/// x.write::<f32>()?.fill(0.0);
/// function::value(&compute, &Silu, &x, [], &y)?;
/// assert_eq!(y.read::<f32>()?[..], [0.0; 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Function<const P: usize>: Clone + Send + Sync + 'static {
    /// The name in errors and in profiles.
    const NAME: &'static str;

    /// The same in CUDA C++, for cards: two functions of a floating-point type `R`, which get the parameters, of which there are at most
    /// 8, and [`Function::settings`]. Without a text, cards refuse the function. `fast_exp` is there, with the processor's bits.
    ///
    /// ```text
    /// template <typename R> __device__ R value(R x, const R* params, const double* settings) { ... }
    /// template <typename R> __device__ R derivatives(R x, const R* params, const double* settings, R* by_params) { ... }
    /// ```
    const CARD: &'static str = "";

    /// The numbers of `self` that the text for cards gets.
    fn settings(&self) -> [f64; 4] {
        [0.0; 4]
    }

    /// The value.
    fn value<T: Real>(&self, x: T, params: [T; P]) -> T;

    /// The derivatives by `x` and by each parameter.
    fn derivatives<T: Real>(&self, x: T, params: [T; P]) -> (T, [T; P]);
}

/// `y = f(x, params)`. `x` and `y` have the same shape, and each parameter has that of the last dimension. Overwrites.
pub fn value<F: Function<P>, const P: usize>(
    compute: &Compute,
    f: &F,
    x: &Tensor,
    params: [&Tensor; P],
    y: &Tensor,
) -> Result<()> {
    apply(compute, f, (x, params), None, y)
}

/// `dx = dy * df/dx`. Shapes as in [`value`]. Overwrites.
pub fn input_gradient<F: Function<P>, const P: usize>(
    compute: &Compute,
    f: &F,
    x: &Tensor,
    params: [&Tensor; P],
    dy: &Tensor,
    dx: &Tensor,
) -> Result<()> {
    apply(compute, f, (x, params), Some(dy), dx)
}

/// The values, or with `dy` the gradients of the input.
fn apply<F: Function<P>, const P: usize>(
    compute: &Compute,
    f: &F,
    (x, params): (&Tensor, [&Tensor; P]),
    dy: Option<&Tensor>,
    output: &Tensor,
) -> Result<()> {
    let op = op_of::<F, P>(x);
    dispatch!(op.name, x.dtype(), S => {
        let shape = x.shape();
        let params = params.map(|of| read::<<S as Stored>::Real>("parameter", of, [columns(x)]));
        let dy = dy.map(|dy| read::<S>("dy", dy, shape));
        let inputs = (read::<S>("x", x, shape), Vec::from(params), dy);
        // Threads divide rows, if columns have parameters.
        let num_rows = if P == 0 { x.num_elems() } else { x.num_elems() / columns(x).max(1) };
        let f = f.clone();
        let (columns, n, settings) = (columns(x), x.num_elems(), f.settings());
        let operands = (inputs, write::<S>("output", output, shape));
        compute.launch_with_card(op, operands, move |cpu, ((x, params, dy), y)| {
            let row = y.len() / num_rows.max(1);
            cpu.threads.for_each(shares(cpu, y, row, num_rows, x.len()), |(first, y)| {
                let part = first * row..first * row + y.len();
                let (x, dy) = (&x[part.clone()], dy.map(|dy| &dy[part]));
                vectorized!(cpu.simd, apply_of::<S, F, P>, &f, x, &params[..], dy, y);
            });
            Ok(())
        }, move |card, ((x, params, dy), y)| {
            let (kernel, at) = (source::<F, P>().of::<S>("function_apply"), addresses(&params, &[]));
            let dy = dy.unwrap_or(In::NONE);
            let arguments = (x, dy, y, at, P as u32, settings, columns as u64, n as u64);
            // SAFETY: all have `n` elements but the parameters, which have `columns`. The text of `F` gets no other address.
            unsafe { card.launch(kernel, arguments, Grid::fours(n)) }
        })
    })
}

/// `d_params[k][j] (+)= sum over rows of dy[i, j] * df/dparam k`, row by row. Each thread has some of the columns, so the bits do not
/// depend on the number of threads.
pub fn parameter_gradients<F: Function<P>, const P: usize>(
    compute: &Compute,
    f: &F,
    x: &Tensor,
    params: [&Tensor; P],
    dy: &Tensor,
    d_params: [(&Tensor, bool); P],
) -> Result<()> {
    let op = op_of::<F, P>(x);
    dispatch!(op.name, x.dtype(), S => {
        let shape = x.shape();
        let params = params.map(|param| read::<<S as Stored>::Real>("parameter", param, [columns(x)]));
        let inputs = (read::<S>("x", x, shape), Vec::from(params), read::<S>("dy", dy, shape));
        let adds = d_params.map(|(_, adds)| adds);
        let outputs = d_params
            .map(|(param, _)| update::<<S as Stored>::Real>("d_parameter", param, [columns(x)]));
        let (f, columns, n, settings) = (f.clone(), columns(x), x.num_elems(), f.settings());
        compute.launch_with_card(op, (inputs, Vec::from(outputs)), move |cpu, ((x, params, dy), sums)| {
            let mut parts: Vec<(usize, Vec<&mut [_]>)> = Vec::new();
            for (sums, adds) in sums.into_iter().zip(adds) {
                if !adds {
                    sums.fill(<S as Stored>::Real::default());
                }
                for (at, (first, part)) in shares(cpu, sums, 1, columns, x.len()).into_iter().enumerate() {
                    if parts.len() <= at {
                        parts.push((first, Vec::new()));
                    }
                    parts[at].1.push(part);
                }
            }
            cpu.threads.for_each(parts, |(first, mut sums)| {
                let (params, sums) = (&params[..], &mut sums[..]);
                vectorized!(cpu.simd, parameter_gradients_of::<S, F, P>, &f, x, params, dy, (columns, first), sums);
            });
            Ok(())
        }, move |card, ((x, params, dy), sums)| {
            let (kernel, at) = (source::<F, P>().of::<S>("function_gradients"), addresses(&params, &sums));
            let adds = (0..P).map(|k| u32::from(adds[k]) << k).sum::<u32>();
            let arguments = (x, dy, at, P as u32, adds, settings, columns as u64, n as u64);
            // SAFETY: as for `function_apply`; the gradients have the shape of the parameters.
            unsafe { card.launch(kernel, arguments, Grid::elements(columns)) }
        })
    })
}

/// The most parameters of a function on a card.
const MOST_ON_CARD: usize = 8;

fn op_of<F: Function<P>, const P: usize>(x: &Tensor) -> Op {
    let op = Op::new(F::NAME).elementwise([1, x.num_elems()]);
    if F::CARD.is_empty() || P > MOST_ON_CARD { op.without_card() } else { op }
}

/// The kernels of a function for cards.
fn source<F: Function<P>, const P: usize>() -> &'static KernelSource {
    const { &KernelSource::new(F::NAME, include_str!("function.cu"), &[NUMBERS, EXP, F::CARD]) }
}

/// The addresses of parameters and of their gradients, as kernels get them.
fn addresses<R: Scalar>(params: &[In<R>], grads: &[Out<R>]) -> [u64; 2 * MOST_ON_CARD] {
    let mut at = [0; 2 * MOST_ON_CARD];
    at.iter_mut().zip(params).for_each(|(at, param)| *at = param.0);
    at[MOST_ON_CARD..].iter_mut().zip(grads).for_each(|(at, grad)| *at = grad.0);
    at
}

fn columns(x: &Tensor) -> usize {
    x.dims().last().copied().unwrap_or(1)
}

// Loops over places, because with the checks of a debug build the compiler vectorizes no loop that counts with `enumerate`.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn apply_of<S: Stored, F: Function<P>, const P: usize>(
    f: &F,
    x: &[S],
    params: &[&[S::Real]],
    dy: Option<&[S]>,
    y: &mut [S],
) {
    let row = params.first().map_or(y.len(), |param| param.len()).max(1);
    for (at, (x, y)) in x.chunks(row).zip(y.chunks_mut(row)).enumerate() {
        let (x, params): (_, [&[S::Real]; P]) = (&x[..y.len()], from_fn(|k| &params[k][..y.len()]));
        let params = |column: usize| params.map(|param| param[column]);
        match dy.map(|dy| &dy[at * row..][..y.len()]) {
            None => {
                for column in 0..y.len() {
                    y[column] = S::store(f.value(x[column].load(), params(column)));
                }
            }
            Some(dy) => {
                for column in 0..y.len() {
                    let slope = f.derivatives(x[column].load(), params(column)).0;
                    y[column] = S::store(slope * dy[column].load());
                }
            }
        }
    }
}

/// The columns whose sums are on the stack at once.
const BLOCK: usize = 256;

/// Adds to the sums of the columns from `first` on.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn parameter_gradients_of<S: Stored, F: Function<P>, const P: usize>(
    f: &F,
    x: &[S],
    params: &[&[S::Real]],
    dy: &[S],
    (columns, first): (usize, usize),
    sums: &mut [&mut [S::Real]],
) {
    let count = sums.first().map_or(0, |sums| sums.len());
    let params: [&[S::Real]; P] = from_fn(|k| &params[k][first..][..count]);
    for start in (0..count).step_by(BLOCK) {
        let part = start..(start + BLOCK).min(count);
        let params: [&[S::Real]; P] = from_fn(|k| &params[k][part.clone()]);
        // Local, so that the compiler knows that it overlaps with no operand.
        let mut local = [[S::Real::default(); BLOCK]; P];
        local.iter_mut().zip(&*sums).for_each(|(to, sums)| {
            to[..part.len()].copy_from_slice(&sums[part.clone()]);
        });
        for (x, dy) in x.chunks_exact(columns.max(1)).zip(dy.chunks_exact(columns.max(1))) {
            let (x, dy) = (&x[first..][part.clone()], &dy[first..][part.clone()]);
            let local = local.each_mut().map(|sums| &mut sums[..x.len()]);
            for at in 0..x.len() {
                let (_, slopes) = f.derivatives(x[at].load(), params.map(|param| param[at]));
                for k in 0..P {
                    local[k][at] += slopes[k] * dy[at].load();
                }
            }
        }
        local.iter().zip(&mut *sums).for_each(|(from, sums)| {
            sums[part.clone()].copy_from_slice(&from[..part.len()]);
        });
    }
}
