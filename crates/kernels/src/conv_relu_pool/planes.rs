//! The loops over the windows of one image whose pooled channels are planes: those of `windows`, with transposes of squares of
//! 16 windows and 16 channels before or after them.
//!
//! In: sums of a convolution in f32 with the channels of a position next to each other, or planes of gradients and of winners.
//! Out: planes of pooled values and of winners, or gradients in f32. The order of sums is that of `windows`, and so are the
//! bits.

use super::windows::{NOTHING, choose};
use crate::SimdLevel;
use crate::layout::square::{SIDE, Square, put, transpose};
use crate::simd::multiversion;
use crate::stored::SinglePrecision;

/// A winner as the bits of an f32, which a square holds.
#[inline(always)]
fn to_lane(winner: u8) -> f32 {
    f32::from_bits(u32::from(winner))
}

#[inline(always)]
fn from_lane(lane: f32) -> u8 {
    lane.to_bits() as u8
}

multiversion! {
    /// Pools `raw` (2 rows, 2 columns, stride), adds the bias and applies ReLU.
    pub(super) fn pool<S: SinglePrecision>(
        simd: SimdLevel,
        raw: &[f32],
        stride: usize,
        columns: usize,
        bias: &[f32],
        y: &mut [S],
        winners: &mut [u8],
    ) = pool_body
}

#[inline(always)]
fn pool_body<S: SinglePrecision>(
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
        for (group, bias) in bias.chunks(SIDE).enumerate() {
            let channel = group * SIDE;
            for k in 0..count {
                let (i, j) = ((first + k) / columns, (first + k) % columns);
                let top = &raw[(2 * i * 2 * columns + 2 * j) * stride + channel..];
                let bottom = &top[2 * columns * stride..];
                let window = [top, &top[stride..], bottom, &bottom[stride..]];
                let window = window.map(|from| &from[..bias.len()]);
                for (o, bias) in bias.iter().enumerate() {
                    let (value, winner) = choose(window.map(|from| from[o]), *bias);
                    values.0[k][o] = value;
                    places.0[k][o] = to_lane(winner);
                }
            }
            let start = |o: usize| (channel + o) * windows + first;
            transpose(simd, &values, &mut turned);
            for (o, line) in turned.0.iter().enumerate().take(bias.len()) {
                put(line, &mut y[start(o)..][..count], S::store);
            }
            transpose(simd, &places, &mut turned);
            for (o, line) in turned.0.iter().enumerate().take(bias.len()) {
                put(line, &mut winners[start(o)..][..count], from_lane);
            }
        }
    }
}

/// Calls `visit(first, channel, dy, winners)` for the windows from `first` on and the channels from `channel` on, for each
/// square of the planes of an image. Each line of the squares is a window.
#[inline(always)]
fn for_each_square<S: SinglePrecision>(
    simd: SimdLevel,
    (dy, winners): (&[S], &[u8]),
    channels: usize,
    mut visit: impl FnMut(usize, usize, &Square, &Square),
) {
    let windows = dy.len() / channels;
    let [mut square, mut gradients, mut places] = [Square::ZERO; 3];
    for first in (0..windows).step_by(SIDE) {
        for channel in (0..channels).step_by(SIDE) {
            let (at, rows) = (channel * windows + first, SIDE.min(channels - channel));
            square.gather(&dy[at..], windows, rows, S::load);
            transpose(simd, &square, &mut gradients);
            square.gather(&winners[at..], windows, rows, to_lane);
            transpose(simd, &square, &mut places);
            visit(first, channel, &gradients, &places);
        }
    }
}

multiversion! {
    /// Writes all four positions of every window: the gradient for the winner, zero for the others.
    pub(super) fn unpool<S: SinglePrecision>(
        simd: SimdLevel,
        dy: &[S],
        winners: &[u8],
        columns: usize,
        channels: usize,
        elems: &mut [f32],
        row_stride: usize,
        position_stride: usize,
    ) = unpool_body
}

#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "those of `windows::unpool`")]
fn unpool_body<S: SinglePrecision>(
    simd: SimdLevel,
    dy: &[S],
    winners: &[u8],
    columns: usize,
    channels: usize,
    elems: &mut [f32],
    row_stride: usize,
    position_stride: usize,
) {
    let windows = dy.len() / channels;
    for_each_square(simd, (dy, winners), channels, |first, channel, dy, winners| {
        let width = SIDE.min(channels - channel);
        let lines = dy.0.iter().zip(&winners.0).take(windows - first);
        for (k, (dy, winners)) in lines.enumerate() {
            let (i, j) = ((first + k) / columns, (first + k) % columns);
            for at in 0..4u8 {
                let (row, column) = (2 * i + usize::from(at / 2), 2 * j + usize::from(at % 2));
                let start = row * row_stride + column * position_stride + channel;
                let mut line = [0.0; SIDE];
                for ((to, dy), winner) in line.iter_mut().zip(dy).zip(winners) {
                    *to = if winner.to_bits() == u32::from(at) { *dy } else { 0.0 };
                }
                put(&line, &mut elems[start..][..width], |x| x);
            }
        }
    });
}

multiversion! {
    /// Adds to `db` the gradients of positive outputs of an image, window by window.
    pub(super) fn add_won<S: SinglePrecision>(
        simd: SimdLevel,
        dy: &[S],
        winners: &[u8],
        db: &mut [f32],
    ) = add_won_body
}

#[inline(always)]
fn add_won_body<S: SinglePrecision>(simd: SimdLevel, dy: &[S], winners: &[u8], db: &mut [f32]) {
    let windows = dy.len() / db.len();
    for_each_square(simd, (dy, winners), db.len(), |first, channel, dy, winners| {
        let db = &mut db[channel..];
        for (dy, winners) in dy.0.iter().zip(&winners.0).take(windows - first) {
            for ((db, dy), winner) in db.iter_mut().zip(dy).zip(winners) {
                *db += if winner.to_bits() == u32::from(NOTHING) { 0.0 } else { *dy };
            }
        }
    });
}
