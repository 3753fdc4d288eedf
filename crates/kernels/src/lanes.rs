//! Sums and maxima over a row, in an order that does not depend on the processor.

use crate::{Real, Stored};

/// The number of partial results. Additions to different ones overlap, and a compiler keeps all of them in registers.
const LANES: usize = 32;

/// `f(0) + f(1) + ... + f(len - 1)`. Term `i` is added to partial sum `i mod 32`, in order, and then the partial sums are
/// added in order.
#[inline(always)]
pub(crate) fn sum<T: Real>(len: usize, f: impl Fn(usize) -> T) -> T {
    let mut lanes = [T::default(); LANES];
    let whole = len - len % LANES;
    for begin in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(begin + lane);
        }
    }
    for (sum, at) in lanes.iter_mut().zip(whole..len) {
        *sum += f(at);
    }
    let mut total = T::default();
    for lane in lanes {
        total += lane;
    }
    total
}

/// `x[0] * w[0] + ... `, where the second half of the partial sums is added to the first one until one is left: it is read as
/// fast as memory gives it. `w` has the elements of `x`.
#[inline(always)]
pub(crate) fn dot<S: Stored>(x: &[S::Real], w: &[S]) -> S::Real {
    let mut lanes = [S::Real::default(); LANES];
    let ((xs, x_rest), (ws, w_rest)) = (x.as_chunks::<LANES>(), w.as_chunks::<LANES>());
    for (x, w) in xs.iter().zip(ws) {
        for (sum, (x, w)) in lanes.iter_mut().zip(x.iter().zip(w)) {
            *sum += *x * w.load();
        }
    }
    for (sum, (x, w)) in lanes.iter_mut().zip(x_rest.iter().zip(w_rest)) {
        *sum += *x * w.load();
    }
    let mut half = LANES / 2;
    while half > 0 {
        let (first, second) = lanes.split_at_mut(half);
        first.iter_mut().zip(second).for_each(|(sum, lane)| *sum += *lane);
        half /= 2;
    }
    lanes[0]
}

/// The largest element. NaNs are passed over. Minus infinity, or NaN, if there is nothing else.
#[inline(always)]
pub(crate) fn max<T: Real>(row: &[T]) -> T {
    let lowest = T::from_f64(f64::NEG_INFINITY);
    let mut lanes = [lowest; LANES];
    let mut chunks = row.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (best, x) in lanes.iter_mut().zip(chunk) {
            *best = if *x > *best { *x } else { *best };
        }
    }
    let rest = chunks.remainder().iter();
    lanes.iter().chain(rest).fold(lowest, |best, x| if *x > best { *x } else { best })
}
