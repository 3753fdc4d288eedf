//! Normalization of rows by their root mean square.
//!
//! Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019), as in PyTorch's `RMSNorm`.

use paceline_cuda::kernel::In;
use paceline_cuda::{Grid, KernelSource};
use paceline_memory::Tensor;

use crate::card::NUMBERS;
use crate::elementwise::add_of;
use crate::error::matrix_sizes;
use crate::operands::{card_scratch, write_or_update};
use crate::simd::vectorized;
use crate::stored::{Stored, dispatch, wide};
use crate::threads::{batches, shares};
use crate::{Compute, Op, Real, Result, lanes, read, write};

pub(crate) static CARD: KernelSource =
    KernelSource::new("rms_norm.cu", include_str!("rms_norm.cu"), &[NUMBERS]);

/// On a card: a warp for each row, or a thread if rows are short.
fn of_rows(rows: usize, columns: usize) -> Grid {
    Grid::elements(if columns > 32 { 32 * rows } else { rows })
}

/// `y = x * r * w` with `r = 1 / sqrt(mean(x^2) + eps)` of the row. Shapes: x and y (n, columns), w (columns), r (n),
/// which the backward passes need. f32 and f64; a y of bf16 is computed in f32. Overwrites y and r.
pub fn forward(
    compute: &Compute,
    x: &Tensor,
    w: &Tensor,
    eps: f64,
    y: &Tensor,
    r: &Tensor,
) -> Result<()> {
    let op = Op::new("rms_norm_forward").elementwise([4, x.num_elems()]);
    let [rows, columns] = matrix_sizes(op.name, "input", x)?;
    dispatch!(op.name, y.dtype(), Y => {
        let operands = (
            read::<<Y as Stored>::Real>("input", x, x.shape()),
            read::<<Y as Stored>::Real>("weight", w, [columns]),
            write::<Y>("output", y, x.shape()),
            write::<<Y as Stored>::Real>("r", r, [rows]),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, w, y, r)| {
            let parts = batches(cpu, y, columns, rows).into_iter().zip(batches(cpu, r, 1, rows));
            cpu.threads.for_each(parts.collect(), |((first, y), (_, r))| {
                let x = &x[columns * first..][..y.len()];
                vectorized!(cpu.simd, forward_of::<Y>, x, w, eps, y, r);
            });
            Ok(())
        }, move |card, (x, w, y, r)| {
            let (width, height) = (columns as u32, rows as u64);
            let arguments = (x, w, wide::<Y>(eps), y, r, width, height);
            // SAFETY: the matrices have `rows` times `columns` elements, the weight `columns`, `r` has `rows`.
            unsafe { card.launch(CARD.of::<Y>("rms_norm"), arguments, of_rows(rows, columns)) }
        })
    })
}

#[inline(always)]
fn forward_of<Y: Stored>(x: &[Y::Real], w: &[Y::Real], eps: f64, y: &mut [Y], r: &mut [Y::Real]) {
    let columns = w.len();
    let [one, eps, count] = [1.0, eps, columns as f64].map(Y::Real::from_f64);
    let rows = x.chunks_exact(columns.max(1)).zip(y.chunks_exact_mut(columns.max(1)));
    for ((x, y), r) in rows.zip(r) {
        *r = one / (lanes::sum(columns, |j| x[j] * x[j]) / count + eps).sqrt();
        for j in 0..columns {
            y[j] = Y::store(x[j] * *r * w[j]);
        }
    }
}

/// `dx = r * w * dy - x * r^3 * mean(w * dy * x)`, plus `onto` if it is given: the gradient of a residual connection around the norm.
/// Shapes as in [`forward`]; onto has that of x. f32 and f64; dy may be bf16 if the others are f32. Overwrites.
#[allow(clippy::too_many_arguments, reason = "the operands of the formula")]
pub fn backward_input(
    compute: &Compute,
    x: &Tensor,
    w: &Tensor,
    r: &Tensor,
    dy: &Tensor,
    onto: Option<&Tensor>,
    dx: &Tensor,
) -> Result<()> {
    let op = Op::new("rms_norm_backward_input").elementwise([8, x.num_elems()]);
    let [rows, columns] = matrix_sizes(op.name, "input", x)?;
    dispatch!(op.name, dy.dtype(), D => {
        let operands = (
            read::<<D as Stored>::Real>("input", x, x.shape()),
            read::<<D as Stored>::Real>("weight", w, [columns]),
            read::<<D as Stored>::Real>("r", r, [rows]),
            read::<D>("d_output", dy, x.shape()),
            onto.map(|onto| read::<<D as Stored>::Real>("onto", onto, x.shape())),
            write::<<D as Stored>::Real>("d_input", dx, x.shape()),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, w, r, dy, onto, dx)| {
            cpu.threads.for_each(batches(cpu, dx, columns, rows), |(first, dx)| {
                let part = columns * first..columns * first + dx.len();
                let dy = &dy[part.clone()];
                vectorized!(cpu.simd, input_of::<D>, &x[part.clone()], w, &r[first..], dy, &mut *dx);
                if let Some(onto) = onto {
                    vectorized!(cpu.simd, add_of::<<D as Stored>::Real>, &onto[part], dx);
                }
            });
            Ok(())
        }, move |card, (x, w, r, dy, onto, dx)| {
            let (width, height) = (columns as u32, rows as u64);
            let arguments = (x, w, r, dy, onto.unwrap_or(In::NONE), dx, width, height);
            // SAFETY: as for the forward pass.
            unsafe { card.launch(CARD.of::<D>("rms_norm_backward_input"), arguments, of_rows(rows, columns)) }
        })
    })
}

#[inline(always)]
fn input_of<D: Stored>(x: &[D::Real], w: &[D::Real], r: &[D::Real], dy: &[D], dx: &mut [D::Real]) {
    let columns = w.len();
    let count = D::Real::from_f64(columns as f64);
    let rows = x.chunks_exact(columns.max(1)).zip(dy.chunks_exact(columns.max(1)));
    for (((x, dy), dx), r) in rows.zip(dx.chunks_exact_mut(columns.max(1))).zip(r) {
        let mean = lanes::sum(columns, |j| w[j] * dy[j].load() * x[j]) / count;
        let factor = mean * *r * *r * *r;
        for j in 0..columns {
            dx[j] = *r * w[j] * dy[j].load() - x[j] * factor;
        }
    }
}

/// On a card: how many rows a thread adds at least, and the most runs of rows.
const ROWS_OF_RUN: usize = 64;
const MOST_RUNS: usize = 64;

/// `dw[j] = sum over rows of dy[i, j] * x[i, j] * r[i]`, row by row. Shapes as in [`forward`]. f32 and f64; dy may be
/// bf16 if the others are f32. Overwrites, or adds to what is there if `accumulate`. A card adds runs of rows first, and is within
/// 1e-5 of the largest element.
pub fn backward_weight(
    compute: &Compute,
    x: &Tensor,
    r: &Tensor,
    dy: &Tensor,
    dw: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let op = Op::new("rms_norm_backward_weight").elementwise([3, x.num_elems()]);
    let [rows, columns] = matrix_sizes(op.name, "input", x)?;
    let runs = rows.div_ceil(ROWS_OF_RUN).clamp(1, MOST_RUNS);
    dispatch!(op.name, dy.dtype(), D => {
        let operands = (
            read::<<D as Stored>::Real>("input", x, x.shape()),
            read::<<D as Stored>::Real>("r", r, [rows]),
            read::<D>("d_output", dy, x.shape()),
            write_or_update::<<D as Stored>::Real>(accumulate, "d_weight", dw, [columns]),
            card_scratch::<<D as Stored>::Real>(compute, runs * columns),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, r, dy, dw, _)| {
            if !accumulate {
                dw.fill(Default::default());
            }
            let touched = 2 * x.len();
            cpu.threads.for_each(shares(cpu, dw, 1, columns, touched), |(first, dw)| {
                vectorized!(cpu.simd, weight_of::<D>, x, r, dy, (columns, first), dw);
            });
            Ok(())
        }, move |card, (x, r, dy, dw, of_runs)| {
            let (width, height) = (columns as u32, rows as u64);
            let per_run = rows.div_ceil(runs) as u32;
            let (all, adds) = (of_runs.as_in(), u32::from(accumulate));
            let mut grid = Grid::elements(columns);
            grid.blocks[1] = runs as u32;
            // SAFETY: as for the forward pass, and there are `columns` sums for each run.
            unsafe {
                let arguments = (x, r, dy, of_runs, width, height, per_run);
                card.launch(CARD.of::<D>("rms_norm_backward_weight"), arguments, grid)?;
                let arguments = (all, dw, width, runs as u32, adds);
                card.launch(CARD.of::<<D as Stored>::Real>("add_runs"), arguments, Grid::elements(columns))
            }
        })
    })
}

/// For some of the columns: `part` is the number of all, and the first one.
#[inline(always)]
fn weight_of<D: Stored>(
    x: &[D::Real],
    r: &[D::Real],
    dy: &[D],
    (columns, first): (usize, usize),
    dw: &mut [D::Real],
) {
    let rows = x.chunks_exact(columns.max(1)).zip(dy.chunks_exact(columns.max(1)));
    for ((x, dy), r) in rows.zip(r) {
        for ((sum, x), dy) in dw.iter_mut().zip(&x[first..]).zip(&dy[first..]) {
            *sum += dy.load() * *x * *r;
        }
    }
}
