//! The loops over the windows of one image whose pooled channels are planes: those of `windows`, with transposes of squares of
//! 16 windows and 16 channels before or after them.
//!
//! In: sums of a convolution in f32 with the channels of a position next to each other, or planes of gradients and of winners.
//! Out: planes of pooled values and of winners, or gradients in f32. The order of sums is that of `windows`, and so are the
//! bits.

use super::windows::choose;
use crate::SimdLevel;
use crate::conv2d::prepare::PositionGrid;
use crate::layout::square::{SIDE, Square, byte_to_lane, put, transpose};
use crate::stored::SinglePrecision;

/// Pools `raw` (2 rows, 2 columns, stride), adds the bias and applies ReLU.
#[inline(always)]
pub(super) fn pool<S: SinglePrecision>(
    simd: SimdLevel,
    raw: &[f32],
    stride: usize,
    columns: usize,
    bias: &[f32],
    y: &mut [S],
    winners: &mut [u8],
) {
    let windows = y.len() / bias.len();
    let [mut values, mut places, mut turned] = [Square::ZERO; 3];
    for first in (0..windows).step_by(SIDE) {
        let count = SIDE.min(windows - first);
        let starts = starts(first, columns, 2 * columns * stride, stride);
        for channel in (0..bias.len()).step_by(SIDE) {
            let width = SIDE.min(bias.len() - channel);
            let bias = line(&bias[channel..]);
            for (k, start) in starts.iter().enumerate().take(count) {
                let top = &raw[start + channel..];
                let bottom = &top[2 * columns * stride..];
                let (a, b) = (line(top), line(&top[stride..]));
                let (c, d) = (line(bottom), line(&bottom[stride..]));
                let (values, places) = (&mut values.0[k], &mut places.0[k]);
                for o in 0..SIDE {
                    let (value, winner) = choose([a[o], b[o], c[o], d[o]], bias[o]);
                    values[o] = value;
                    places[o] = f32::from_bits(winner);
                }
            }
            let start = |o: usize| (channel + o) * windows + first;
            transpose(simd, &values, &mut turned);
            for (o, line) in turned.0.iter().enumerate().take(width) {
                put(line, &mut y[start(o)..][..count], S::store);
            }
            transpose(simd, &places, &mut turned);
            for (o, line) in turned.0.iter().enumerate().take(width) {
                put(line, &mut winners[start(o)..][..count], |winner| winner.to_bits() as u8);
            }
        }
    }
}

/// The first 16 elements. Those after the end are zero.
#[inline(always)]
fn line(from: &[f32]) -> [f32; SIDE] {
    match from.first_chunk::<SIDE>() {
        Some(chunk) => *chunk,
        None => {
            let mut line = [0.0; SIDE];
            line[..from.len()].copy_from_slice(from);
            line
        }
    }
}

/// The first elements of 16 windows, from window `first` on. A row has `columns` windows.
#[inline(always)]
fn starts(
    first: usize,
    columns: usize,
    row_stride: usize,
    position_stride: usize,
) -> [usize; SIDE] {
    let mut starts = [0; SIDE];
    for (window, start) in (first..).zip(&mut starts) {
        let (i, j) = (window / columns, window % columns);
        *start = 2 * i * row_stride + 2 * j * position_stride;
    }
    starts
}

/// Writes all four positions of every window: the gradient for the winner, zero for the others.
#[inline(always)]
pub(super) fn unpool<S: SinglePrecision>(
    simd: SimdLevel,
    dy: &[S],
    winners: &[u8],
    [columns, channels]: [usize; 2],
    PositionGrid { elems, row_stride, position_stride }: PositionGrid<'_>,
) {
    let windows = dy.len() / channels;
    let [mut square, mut gradients, mut places] = [Square::ZERO; 3];
    for first in (0..windows).step_by(SIDE) {
        let starts = starts(first, columns, row_stride, position_stride);
        for channel in (0..channels).step_by(SIDE) {
            let (at, width) = (channel * windows + first, SIDE.min(channels - channel));
            square.gather(&dy[at..], windows, width, S::load);
            transpose(simd, &square, &mut gradients);
            square.gather(&winners[at..], windows, width, byte_to_lane);
            transpose(simd, &square, &mut places);
            for k in 0..SIDE.min(windows - first) {
                let (dy, winners) = (&gradients.0[k], &places.0[k]);
                for (at, offset) in [0, position_stride, row_stride, row_stride + position_stride]
                    .iter()
                    .enumerate()
                {
                    let mut line = [0.0; SIDE];
                    for ((to, dy), winner) in line.iter_mut().zip(dy).zip(winners) {
                        // All bits or none, since a choice would be compiled to a branch.
                        let mask = u32::from(winner.to_bits() == at as u32).wrapping_neg();
                        *to = f32::from_bits(dy.to_bits() & mask);
                    }
                    put(&line, &mut elems[starts[k] + offset + channel..][..width], |x| x);
                }
            }
        }
    }
}
