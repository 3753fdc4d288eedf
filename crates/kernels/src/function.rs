//! Element-wise functions that a caller states by value and derivatives.
//!
//! Input: a function, its argument and its parameters. Output: values, and gradients by the chain rule. Parameters belong to the columns:
//! each element takes those of its place in the last dimension.

use std::array::from_fn;

use paceline_memory::Tensor;

use crate::simd::vectorized;
use crate::stored::{Stored, dispatch};
use crate::threads::shares;
use crate::{Compute, Op, Real, Result, read, update, write};

/// A function of an element and of `P` parameters. It is computed in the type of the parameters: f32 for 16-bit elements.
///
/// `#[inline(always)]` on both methods lets a compiler use vector instructions.
pub trait Function<const P: usize>: Clone + Send + Sync + 'static {
    /// The name in errors and in profiles.
    const NAME: &'static str;

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
    let op = Op::new(F::NAME).elementwise([1, x.num_elems()]);
    dispatch!(op.name, x.dtype(), S => {
        let shape = x.shape();
        let params = params.map(|of| read::<<S as Stored>::Real>("parameter", of, [columns(x)]));
        let dy = dy.map(|dy| read::<S>("dy", dy, shape));
        let inputs = (read::<S>("x", x, shape), Vec::from(params), dy);
        // Threads divide rows, if columns have parameters.
        let num_rows = if P == 0 { x.num_elems() } else { x.num_elems() / columns(x).max(1) };
        let f = f.clone();
        let operands = (inputs, write::<S>("output", output, shape));
        compute.launch(op, operands, move |cpu, ((x, params, dy), y)| {
            let row = y.len() / num_rows.max(1);
            cpu.threads.for_each(shares(cpu, y, row, num_rows, x.len()), |(first, y)| {
                let part = first * row..first * row + y.len();
                let (x, dy) = (&x[part.clone()], dy.map(|dy| &dy[part]));
                vectorized!(cpu.simd, apply_of::<S, F, P>, &f, x, &params[..], dy, y);
            });
            Ok(())
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
    let op = Op::new(F::NAME).elementwise([1, x.num_elems()]);
    dispatch!(op.name, x.dtype(), S => {
        let shape = x.shape();
        let params = params.map(|param| read::<<S as Stored>::Real>("parameter", param, [columns(x)]));
        let inputs = (read::<S>("x", x, shape), Vec::from(params), read::<S>("dy", dy, shape));
        let adds = d_params.map(|(_, adds)| adds);
        let outputs = d_params
            .map(|(param, _)| update::<<S as Stored>::Real>("d_parameter", param, [columns(x)]));
        let (f, columns) = (f.clone(), columns(x));
        compute.launch(op, (inputs, Vec::from(outputs)), move |cpu, ((x, params, dy), sums)| {
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
        })
    })
}

fn columns(x: &Tensor) -> usize {
    x.dims().last().copied().unwrap_or(1)
}

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
        let params: [&[S::Real]; P] = from_fn(|k| &params[k][..y.len()]);
        let params = |column: usize| params.map(|param| param[column]);
        match dy.map(|dy| &dy[at * row..][..y.len()]) {
            None => {
                for (column, (y, x)) in y.iter_mut().zip(x).enumerate() {
                    *y = S::store(f.value(x.load(), params(column)));
                }
            }
            Some(dy) => {
                for (column, ((dx, dy), x)) in y.iter_mut().zip(dy).zip(x).enumerate() {
                    *dx = S::store(f.derivatives(x.load(), params(column)).0 * dy.load());
                }
            }
        }
    }
}

/// Adds to the sums of the columns from `first` on.
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
    for (x, dy) in x.chunks_exact(columns.max(1)).zip(dy.chunks_exact(columns.max(1))) {
        for (at, (x, dy)) in x[first..][..count].iter().zip(&dy[first..][..count]).enumerate() {
            let (_, slopes) = f.derivatives(x.load(), params.map(|param| param[at]));
            for (sums, slope) in sums.iter_mut().zip(slopes) {
                sums[at] += slope * dy.load();
            }
        }
    }
}
