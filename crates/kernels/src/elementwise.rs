//! Element-wise operations: ReLU, bias, sums over rows.

use paceline_cuda::{Grid, KernelSource};
use paceline_memory::Tensor;

use crate::card::NUMBERS;
use crate::simd::vectorized;
use crate::stored::{Stored, dispatch};
use crate::threads::shares;
use crate::{Compute, Op, Processor, Real, Result, read, update, write};

pub(crate) static CARD: KernelSource =
    KernelSource::new("elementwise.cu", include_str!("elementwise.cu"), &[NUMBERS]);

/// `y = max(0, x)`; NaN stays NaN. f32, f64 and bf16; overwrites.
pub fn relu(compute: &Compute, input: &Tensor, output: &Tensor) -> Result<()> {
    let op = Op::new("relu_forward").elementwise([1, input.num_elems()]);
    dispatch!(op.name, input.dtype(), S => {
        let shape = input.shape();
        let operands = (read::<S>("input", input, shape), write::<S>("output", output, shape));
        let n = input.num_elems();
        compute.launch_with_card(op, operands, |cpu, (x, y)| {
            cpu.threads.for_each(shares(cpu, y, 1, x.len(), x.len()), |(first, y)| {
                vectorized!(cpu.simd, relu_of::<S>, &x[first..][..y.len()], y);
            });
            Ok(())
        }, move |card, (x, y)| {
            // SAFETY: both have `n` elements.
            unsafe { card.launch(CARD.of::<S>("relu"), (x, y, n as u64), Grid::fours(n)) }
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
    let op = Op::new("relu_backward").elementwise([1, output.num_elems()]);
    dispatch!(op.name, output.dtype(), S => {
        let shape = output.shape();
        let operands = (
            read::<S>("output", output, shape),
            read::<S>("d_output", d_output, shape),
            write::<S>("d_input", d_input, shape),
        );
        let n = output.num_elems();
        compute.launch_with_card(op, operands, |cpu, (y, dy, dx)| {
            cpu.threads.for_each(shares(cpu, dx, 1, y.len(), y.len()), |(first, dx)| {
                let part = first..first + dx.len();
                vectorized!(cpu.simd, relu_backward_of::<S>, &y[part.clone()], &dy[part], dx);
            });
            Ok(())
        }, move |card, (y, dy, dx)| {
            // SAFETY: all have `n` elements.
            unsafe { card.launch(CARD.of::<S>("relu_backward"), (y, dy, dx, n as u64), Grid::fours(n)) }
        })
    })
}

#[inline(always)]
fn relu_of<S: Stored>(x: &[S], y: &mut [S]) {
    for (y, x) in y.iter_mut().zip(x) {
        let value = x.load();
        let passes = value > S::Real::default() || value.is_nan();
        *y = if passes { *x } else { S::default() };
    }
}

#[inline(always)]
fn relu_backward_of<S: Stored>(y: &[S], dy: &[S], dx: &mut [S]) {
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
        vectorized!(cpu.simd, add_rows_of::<S>, rows, columns, first, sums);
    });
}

#[inline(always)]
fn add_rows_of<S: Stored>(rows: &[S], columns: usize, first: usize, sums: &mut [S::Real]) {
    for row in rows.chunks_exact(columns.max(1)) {
        for (sum, x) in sums.iter_mut().zip(&row[first..]) {
            *sum += x.load();
        }
    }
}

/// `y = x + y`, in place. Shapes: the same. f32, f64 and bf16, whose sum is rounded once.
pub fn add(compute: &Compute, x: &Tensor, y: &Tensor) -> Result<()> {
    let op = Op::new("add").elementwise([1, y.num_elems()]);
    dispatch!(op.name, y.dtype(), S => {
        let operands = (read::<S>("x", x, y.shape()), update::<S>("y", y, y.shape()));
        let n = y.num_elems();
        compute.launch_with_card(op, operands, |cpu, (x, y)| {
            add_to(cpu, x, y);
            Ok(())
        }, move |card, (x, y)| {
            // SAFETY: both have `n` elements.
            unsafe { card.launch(CARD.of::<S>("add"), (x, y, n as u64), Grid::fours(n)) }
        })
    })
}

/// `y = x + y`, on all threads.
pub(crate) fn add_to<S: Stored>(cpu: &Processor, x: &[S], y: &mut [S]) {
    cpu.threads.for_each(shares(cpu, y, 1, x.len(), x.len()), |(first, y)| {
        vectorized!(cpu.simd, add_of::<S>, &x[first..][..y.len()], y);
    });
}

#[inline(always)]
pub(crate) fn add_of<S: Stored>(x: &[S], y: &mut [S]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = S::store(x.load() + y.load());
    }
}

/// `x = x / divisor`, in place. f32 and f64.
pub fn divide(compute: &Compute, tensor: &Tensor, divisor: f64) -> Result<()> {
    let op = Op::new("divide").elementwise([1, tensor.num_elems()]);
    dispatch!(op.name, tensor.dtype(), T: f32 | f64 => {
        let x = update::<T>("x", tensor, tensor.shape());
        let n = tensor.num_elems();
        compute.launch_with_card(op, x, move |cpu, x| {
            let len = x.len();
            cpu.threads.for_each(shares(cpu, x, 1, len, len), |(_, x)| {
                vectorized!(cpu.simd, divide_of::<T>, x, divisor);
            });
            Ok(())
        }, move |card, x| {
            // SAFETY: it has `n` elements.
            unsafe { card.launch(CARD.of::<T>("divide"), (x, divisor, n as u64), Grid::fours(n)) }
        })
    })
}

#[inline(always)]
fn divide_of<T: Real>(x: &mut [T], divisor: f64) {
    let divisor = T::from_f64(divisor);
    for x in x {
        *x = *x / divisor;
    }
}
