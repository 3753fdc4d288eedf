//! Sums and maxima over a row, in an order that does not depend on the processor.

use crate::Real;

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
