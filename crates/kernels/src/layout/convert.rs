//! The conversion of images from one layout to the other.

use half::bf16;
use paceline_cuda::kernel::Scalar;
use paceline_cuda::{Grid, KernelSource};
use paceline_memory::{Element, Shape, Tensor};

use super::ImageLayout;
use super::square::columns_to_rows;
use crate::card::NUMBERS;
use crate::simd::vectorized;
use crate::stored::dispatch;
use crate::threads::batches;
use crate::{Compute, KernelError, Op, Result, SimdLevel, read, write};

pub(crate) static CARD: KernelSource =
    KernelSource::new("layout/convert.cu", include_str!("convert.cu"), &[NUMBERS]);

/// Writes the images of `input` into `output`, whose layout is `to`: (n, h, w, c) to (n, c, h, w) for [`ImageLayout::Nchw`],
/// and back for [`ImageLayout::Nhwc`]. f32, f64, bf16 and u8, without a change of a bit; overwrites. Errors if `input` has
/// not four extents.
pub fn convert(compute: &Compute, to: ImageLayout, input: &Tensor, output: &Tensor) -> Result<()> {
    let op = Op::new("convert_layout");
    let &[batch, a, b, c] = input.dims() else {
        let reason = format!("images have four extents, not those of {}", input.shape());
        return Err(KernelError::Geometry { op: op.name, reason });
    };
    // Each image is a matrix that is transposed.
    let (shape, [rows, columns]) = match to {
        ImageLayout::Nchw => ([batch, c, a, b], [a * b, c]),
        ImageLayout::Nhwc => ([batch, b, c, a], [a, b * c]),
    };
    dispatch!(op.name, input.dtype(), A: f32 | f64 | bf16 | u8 => {
        let operands = (
            read::<A>("input", input, input.shape()),
            write::<A>("output", output, Shape::from(shape)),
        );
        compute.launch_with_card(op, operands, move |cpu, (x, y)| {
            let elems = rows * columns;
            if elems == 0 {
                return Ok(());
            }
            let parts = batches(cpu, y, elems, shape[0]);
            cpu.threads.for_each(parts, |(first, y)| {
                let x = &x[first * elems..][..y.len()];
                for (x, y) in x.chunks_exact(elems).zip(y.chunks_exact_mut(elems)) {
                    A::transpose(cpu.simd, x, [rows, columns], y);
                }
            });
            Ok(())
        }, move |card, (x, y)| {
            let (tiles, images) = (rows.div_ceil(TILE), shape[0]);
            let (height, width, tiles_word) = (rows as u32, columns as u32, tiles as u32);
            let blocks = [columns.div_ceil(TILE) as u32, (images * tiles) as u32, 1];
            let grid = Grid { blocks, threads: [TILE as u32, 8, 1], shared_bytes: 0 };
            // SAFETY: both have `images` matrices of this size.
            unsafe { card.launch(CARD.of::<A>("transpose"), (x, y, height, width, tiles_word), grid) }
        })
    })
}

/// Rows and columns that a block of a card's threads transposes.
const TILE: usize = 32;

/// An element that a transpose moves.
trait Movable: Element + Scalar {
    /// Writes the transpose of `x` (rows, columns) to `y`.
    fn transpose(level: SimdLevel, x: &[Self], sizes: [usize; 2], y: &mut [Self]);
}

impl Movable for f64 {
    fn transpose(_: SimdLevel, x: &[f64], [rows, columns]: [usize; 2], y: &mut [f64]) {
        for (column, y) in y.chunks_exact_mut(rows).enumerate() {
            y.iter_mut().zip(x[column..].iter().step_by(columns)).for_each(|(y, x)| *y = *x);
        }
    }
}

/// An element of at most 32 bits, which is moved as the bits of an f32.
trait Small: Element + Scalar {
    fn to_bits(self) -> u32;
    fn from_bits(bits: u32) -> Self;
}

macro_rules! small {
    ($($t:ty: $to:expr, $from:expr;)+) => {$(
        impl Small for $t {
            #[inline(always)]
            fn to_bits(self) -> u32 {
                $to(self)
            }
            #[inline(always)]
            fn from_bits(bits: u32) -> Self {
                $from(bits)
            }
        }
        impl Movable for $t {
            fn transpose(level: SimdLevel, x: &[Self], sizes: [usize; 2], y: &mut [Self]) {
                vectorized!(level, transpose_small, level, x, sizes, y);
            }
        }
    )+};
}
small! {
    f32: f32::to_bits, f32::from_bits;
    bf16: |x: bf16| u32::from(x.to_bits()), |bits| bf16::from_bits(bits as u16);
    u8: u32::from, |bits| bits as u8;
}

#[inline(always)]
fn transpose_small<A: Small>(simd: SimdLevel, x: &[A], [rows, columns]: [usize; 2], y: &mut [A]) {
    // A single row or column is its own transpose.
    if rows == 1 || columns == 1 {
        return y.copy_from_slice(x);
    }
    let load = |x: A| f32::from_bits(x.to_bits());
    let store = |x: f32, _| A::from_bits(x.to_bits());
    columns_to_rows(simd, (x, columns), [rows, columns], y, |column| column * rows, load, store);
}
