//! The loops over the windows of one image whose channels lie next to each other: pooling, and its gradients.
//!
//! In: sums of a convolution in f32, or gradients and winners. Out: pooled values and winners, or gradients in f32. Pooled
//! values and their gradients are f32 or bf16.

use super::{planes, pooled_image};
use crate::conv2d::Conv2d;
use crate::conv2d::prepare::PositionGrid;
use crate::simd::vectorized;
use crate::stored::SinglePrecision;
use crate::{ImageLayout, SimdLevel};

/// The value of a winner if ReLU has set the result to zero.
pub(super) const NOTHING: u8 = 4;

/// The value of a window of sums and its winner, after bias and ReLU.
#[inline(always)]
pub(super) fn choose([first, rest @ ..]: [f32; 4], bias: f32) -> (f32, u32) {
    let (mut most, mut winner) = (first, 0);
    for (candidate, at) in rest.into_iter().zip(1u32..) {
        let wins = candidate > most || candidate.is_nan();
        most = if wins { candidate } else { most };
        winner = if wins { at } else { winner };
    }
    let sum = most + bias;
    let passes = sum > 0.0 || sum.is_nan();
    (if passes { sum } else { 0.0 }, if passes { winner } else { NOTHING.into() })
}

/// Writes gradients before the pool into grids, image by image: see [`unpool`]. `dy` and `winners` are those of a batch.
pub(super) fn unpool_images<S: SinglePrecision>(
    level: SimdLevel,
    conv: &Conv2d,
    dy: &[S],
    winners: &[u8],
) -> impl Fn(usize, PositionGrid<'_>) + Send + Sync {
    let [rows, columns, channels] = pooled_image(conv);
    let (layout, image_elems) = (conv.layout, rows * columns * channels);
    move |n, to| {
        let image = n * image_elems..(n + 1) * image_elems;
        let (dy, winners, shape) = (&dy[image.clone()], &winners[image], [columns, channels]);
        match layout {
            ImageLayout::Nhwc => vectorized!(level, unpool::<S>, dy, winners, shape, to),
            ImageLayout::Nchw => {
                vectorized!(level, planes::unpool::<S>, level, dy, winners, shape, to)
            }
        }
    }
}

/// Pools `raw` (2 rows, 2 columns, stride), adds the bias and applies ReLU.
#[inline(always)]
pub(super) fn pool<S: SinglePrecision>(
    raw: &[f32],
    stride: usize,
    columns: usize,
    bias: &[f32],
    y: &mut [S],
    winners: &mut [u8],
) {
    let channels = bias.len();
    let positions = y.chunks_exact_mut(channels).zip(winners.chunks_exact_mut(channels));
    for (position, (y, winners)) in positions.enumerate() {
        let (i, j) = (position / columns, position % columns);
        let top = &raw[(2 * i * 2 * columns + 2 * j) * stride..];
        let bottom = &raw[((2 * i + 1) * 2 * columns + 2 * j) * stride..];
        let (a, b) = (&top[..channels], &top[stride..stride + channels]);
        let (c, d) = (&bottom[..channels], &bottom[stride..stride + channels]);
        for o in 0..channels {
            let (value, winner) = choose([a[o], b[o], c[o], d[o]], bias[o]);
            y[o] = S::store(value);
            winners[o] = winner as u8;
        }
    }
}

/// Writes all four positions of every window: the gradient for the winner, zero for the others.
#[inline(always)]
fn unpool<S: SinglePrecision>(
    dy: &[S],
    winners: &[u8],
    [columns, channels]: [usize; 2],
    PositionGrid { elems, row_stride, position_stride }: PositionGrid<'_>,
) {
    let positions = dy.chunks_exact(channels).zip(winners.chunks_exact(channels));
    for (position, (dy, winners)) in positions.enumerate() {
        let (i, j) = (position / columns, position % columns);
        for at in 0..4u8 {
            let (row, column) = (2 * i + usize::from(at / 2), 2 * j + usize::from(at % 2));
            let to = &mut elems[row * row_stride + column * position_stride..][..channels];
            for ((to, dy), winner) in to.iter_mut().zip(dy).zip(winners) {
                *to = if *winner == at { dy.load() } else { 0.0 };
            }
        }
    }
}

/// Adds to `db` the gradients of positive outputs, position by position.
#[inline(always)]
pub(super) fn add_won<S: SinglePrecision>(dy: &[S], winners: &[u8], db: &mut [f32]) {
    let channels = db.len();
    for (dy, winners) in dy.chunks_exact(channels).zip(winners.chunks_exact(channels)) {
        for ((db, dy), winner) in db.iter_mut().zip(dy).zip(winners) {
            *db += if *winner == NOTHING { 0.0 } else { dy.load() };
        }
    }
}
