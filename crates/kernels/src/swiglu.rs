//! The gated activation of a Llama's feed-forward layer.
//!
//! Source: Shazeer, GLU Variants Improve Transformer (2020).

use paceline_cuda::{Grid, KernelSource};
use paceline_memory::Tensor;

use crate::card::{EXP, NUMBERS};
use crate::error::matrix_sizes;
use crate::simd::vectorized;
use crate::stored::{Stored, dispatch};
use crate::threads::batches;
use crate::{Compute, Op, Real, Result, read, write};

pub(crate) static CARD: KernelSource =
    KernelSource::new("swiglu.cu", include_str!("swiglu.cu"), &[NUMBERS, EXP]);

/// Rows that share a thread of a card, which has some columns of each.
const ROWS_OF_THREAD: usize = 4;

/// On a card: the constant of the kernel, runs of rows, and the grid. A thread has 16 bytes of columns, if all lie at multiples of that.
fn divided<S: Stored>(
    [rows, columns]: [usize; 2],
    addresses: [u64; 3],
) -> (&'static str, u64, Grid) {
    let width = 16 / size_of::<S>();
    let is_wide = columns.is_multiple_of(width) && addresses.iter().all(|at| at.is_multiple_of(16));
    let runs = rows.div_ceil(ROWS_OF_THREAD);
    let threads = runs * columns / if is_wide { width } else { 1 };
    (if is_wide { "true" } else { "false" }, runs as u64, Grid::elements(threads))
}

/// `y = silu(gate) * up`, with `silu(x) = x / (1 + exp(-x))`. Shapes: gate_up (n, 2 * columns), the gate's columns first;
/// output (n, columns). f32, f64 and bf16, which is computed in f32; overwrites.
pub fn forward(compute: &Compute, gate_up: &Tensor, output: &Tensor) -> Result<()> {
    let op = Op::new("swiglu_forward").elementwise([Op::EXP + 4, output.num_elems()]);
    let [rows, columns] = matrix_sizes(op.name, "output", output)?;
    dispatch!(op.name, output.dtype(), S => {
        let operands = (
            read::<S>("gate_up", gate_up, [rows, 2 * columns]),
            write::<S>("output", output, [rows, columns]),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, y)| {
            cpu.threads.for_each(batches(cpu, y, columns, rows), |(first, y)| {
                let x = &x[2 * columns * first..][..2 * y.len()];
                vectorized!(cpu.simd, forward_of::<S>, columns, x, y);
            });
            Ok(())
        }, move |card, (x, y)| {
            let (is_wide, runs, grid) = divided::<S>([rows, columns], [x.0, y.0, 0]);
            let arguments = (x, y, columns as u32, rows as u64, runs);
            // SAFETY: the output has `rows` times `columns` elements, and the input twice as many.
            unsafe { card.launch(CARD.with::<S>("swiglu", is_wide), arguments, grid) }
        })
    })
}

#[inline(always)]
fn forward_of<S: Stored>(columns: usize, gate_up: &[S], y: &mut [S]) {
    let one = S::Real::from_f64(1.0);
    for (row, y) in gate_up.chunks_exact(2 * columns.max(1)).zip(y.chunks_exact_mut(columns.max(1)))
    {
        let (gate, up) = row.split_at(columns);
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            let (g, u) = (g.load(), u.load());
            *y = S::store(g / (one + (-g).fast_exp()) * u);
        }
    }
}

/// `d_gate = d_output * up * s * (1 + gate * (1 - s))` and `d_up = d_output * gate * s`, with `s = 1 / (1 + exp(-gate))`.
/// Shapes: gate_up and d_gate_up (n, 2 * columns), d_output (n, columns). Types as in [`forward`]; overwrites.
pub fn backward(
    compute: &Compute,
    gate_up: &Tensor,
    d_output: &Tensor,
    d_gate_up: &Tensor,
) -> Result<()> {
    let op = Op::new("swiglu_backward").elementwise([Op::EXP + 10, d_output.num_elems()]);
    let [rows, columns] = matrix_sizes(op.name, "d_output", d_output)?;
    dispatch!(op.name, d_output.dtype(), S => {
        let operands = (
            read::<S>("gate_up", gate_up, [rows, 2 * columns]),
            read::<S>("d_output", d_output, [rows, columns]),
            write::<S>("d_gate_up", d_gate_up, [rows, 2 * columns]),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, dy, dx)| {
            cpu.threads.for_each(batches(cpu, dx, 2 * columns, rows), |(first, dx)| {
                let x = &x[2 * columns * first..][..dx.len()];
                let dy = &dy[columns * first..][..dx.len() / 2];
                vectorized!(cpu.simd, backward_of::<S>, columns, x, dy, dx);
            });
            Ok(())
        }, move |card, (x, dy, dx)| {
            let (is_wide, runs, grid) = divided::<S>([rows, columns], [x.0, dy.0, dx.0]);
            let arguments = (x, dy, dx, columns as u32, rows as u64, runs);
            // SAFETY: the gradient of the output has `rows` times `columns` elements, and the others twice as many.
            unsafe { card.launch(CARD.with::<S>("swiglu_backward", is_wide), arguments, grid) }
        })
    })
}

#[inline(always)]
fn backward_of<S: Stored>(columns: usize, gate_up: &[S], dy: &[S], dx: &mut [S]) {
    let one = S::Real::from_f64(1.0);
    let (whole, half) = (2 * columns.max(1), columns.max(1));
    let rows = gate_up.chunks_exact(whole).zip(dy.chunks_exact(half));
    for ((row, dy), dx) in rows.zip(dx.chunks_exact_mut(whole)) {
        let ((gate, up), (d_gate, d_up)) = (row.split_at(columns), dx.split_at_mut(columns));
        for j in 0..columns {
            let (g, u, d) = (gate[j].load(), up[j].load(), dy[j].load());
            let s = one / (one + (-g).fast_exp());
            d_gate[j] = S::store(d * u * s * (one + g * (one - s)));
            d_up[j] = S::store(d * g * s);
        }
    }
}
