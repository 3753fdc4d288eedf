//! Element-wise operations: ReLU, bias, sums over rows.

use paceline_cuda::Grid;
use paceline_memory::Tensor;

use crate::card::elementwise as kernels;
use crate::compute::shares;
use crate::real::for_real;
use crate::simd::multiversion;
use crate::stored::{Stored, for_stored};
use crate::{Compute, Op, Processor, Real, Result, read, update, write};

/// `y = max(0, x)`; NaN stays NaN. f32, f64 and bf16; overwrites.
pub fn relu(compute: &Compute, input: &Tensor, output: &Tensor) -> Result<()> {
    let op = Op::new("relu_forward");
    for_stored!(op.name, input.dtype(), S => {
        let shape = input.shape();
        let operands = (read::<S>("input", input, shape), write::<S>("output", output, shape));
        let n = input.num_elems();
        let body = |cpu: &Processor, (x, y): (&[S], &mut [S])| {
            cpu.threads.for_each(shares(cpu, y, 1, x.len(), x.len()), |(first, y)| {
                relu_of::<S>(cpu.simd, &x[first..][..y.len()], y);
            });
            Ok(())
        };
        compute.launch_with_card(op, operands, body, move |card, (x, y)| {
            // SAFETY: both have `n` elements.
            unsafe { card.launch(kernels::relu(x, y, n as u64)?, Grid::fours(n)) }
        })
    })
}

/// `dx = dy` where the output was not zero, and 0 elsewhere. f32, f64 and bf16; overwrites.
pub fn relu_backward(
    compute: &Compute,
    output: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let op = Op::new("relu_backward");
    for_stored!(op.name, output.dtype(), S => {
        let shape = output.shape();
        let operands = (
            read::<S>("output", output, shape),
            read::<S>("d_output", d_output, shape),
            write::<S>("d_input", d_input, shape),
        );
        let n = output.num_elems();
        let body = |cpu: &Processor, (y, dy, dx): (&[S], &[S], &mut [S])| {
            cpu.threads.for_each(shares(cpu, dx, 1, y.len(), y.len()), |(first, dx)| {
                let part = first..first + dx.len();
                relu_backward_of::<S>(cpu.simd, &y[part.clone()], &dy[part], dx);
            });
            Ok(())
        };
        compute.launch_with_card(op, operands, body, move |card, (y, dy, dx)| {
            // SAFETY: all have `n` elements.
            unsafe { card.launch(kernels::relu_backward(y, dy, dx, n as u64)?, Grid::fours(n)) }
        })
    })
}

multiversion! {
    fn relu_of<S: Stored>(x: &[S], y: &mut [S]) = relu_body
}

#[inline(always)]
fn relu_body<S: Stored>(x: &[S], y: &mut [S]) {
    for (y, x) in y.iter_mut().zip(x) {
        let value = x.load();
        let passes = value > S::Real::default() || value.is_nan();
        *y = if passes { *x } else { S::default() };
    }
}

multiversion! {
    fn relu_backward_of<S: Stored>(y: &[S], dy: &[S], dx: &mut [S]) = relu_backward_body
}

#[inline(always)]
fn relu_backward_body<S: Stored>(y: &[S], dy: &[S], dx: &mut [S]) {
    for ((dx, dy), y) in dx.iter_mut().zip(dy).zip(y) {
        *dx = if y.load() == S::Real::default() { S::default() } else { *dy };
    }
}

/// `sums[j] (+)= sum over rows of rows[i, j]`, row by row, in the type that kernels compute in. Each thread has some of the
/// columns.
pub(crate) fn add_rows<S: Stored>(
    cpu: &Processor,
    rows: &[S],
    sums: &mut [S::Real],
    accumulate: bool,
) {
    if !accumulate {
        sums.fill(S::Real::default());
    }
    let columns = sums.len();
    cpu.threads.for_each(shares(cpu, sums, 1, columns, rows.len()), |(first, sums)| {
        add_rows_of::<S>(cpu.simd, rows, columns, first, sums);
    });
}

multiversion! {
    fn add_rows_of<S: Stored>(
        rows: &[S],
        columns: usize,
        first: usize,
        sums: &mut [S::Real],
    ) = add_rows_body
}

#[inline(always)]
fn add_rows_body<S: Stored>(rows: &[S], columns: usize, first: usize, sums: &mut [S::Real]) {
    for row in rows.chunks_exact(columns.max(1)) {
        for (sum, x) in sums.iter_mut().zip(&row[first..]) {
            *sum += x.load();
        }
    }
}

/// `y = x + y`, in place. Shapes: the same. f32, f64 and bf16, whose sum is rounded once.
pub fn add(compute: &Compute, x: &Tensor, y: &Tensor) -> Result<()> {
    let op = Op::new("add");
    for_stored!(op.name, y.dtype(), S => {
        let operands = (read::<S>("x", x, y.shape()), update::<S>("y", y, y.shape()));
        let n = y.num_elems();
        let body = |cpu: &Processor, (x, y): (&[S], &mut [S])| {
            cpu.threads.for_each(shares(cpu, y, 1, x.len(), x.len()), |(first, y)| {
                add_of::<S>(cpu.simd, &x[first..][..y.len()], y);
            });
            Ok(())
        };
        compute.launch_with_card(op, operands, body, move |card, (x, y)| {
            // SAFETY: both have `n` elements.
            unsafe { card.launch(kernels::add(x, y, n as u64)?, Grid::fours(n)) }
        })
    })
}

multiversion! {
    pub(crate) fn add_of<S: Stored>(x: &[S], y: &mut [S]) = add_body
}

#[inline(always)]
fn add_body<S: Stored>(x: &[S], y: &mut [S]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = S::store(x.load() + y.load());
    }
}

/// `x = x / divisor`, in place. f32 and f64.
pub fn divide(compute: &Compute, tensor: &Tensor, divisor: f64) -> Result<()> {
    let op = Op::new("divide");
    for_real!(op.name, tensor.dtype(), T => {
        let x = update::<T>("x", tensor, tensor.shape());
        let n = tensor.num_elems();
        let body = move |cpu: &Processor, x: &mut [T]| {
            let len = x.len();
            cpu.threads.for_each(shares(cpu, x, 1, len, len), |(_, x)| {
                divide_of::<T>(cpu.simd, x, divisor);
            });
            Ok(())
        };
        compute.launch_with_card(op, x, body, move |card, x| {
            // SAFETY: it has `n` elements.
            unsafe { card.launch(kernels::divide(x, divisor, n as u64)?, Grid::fours(n)) }
        })
    })
}

multiversion! {
    fn divide_of<T: Real>(x: &mut [T], divisor: f64) = divide_body
}

#[inline(always)]
fn divide_body<T: Real>(x: &mut [T], divisor: f64) {
    let divisor = T::from_f64(divisor);
    for x in x {
        *x = *x / divisor;
    }
}
