//! Element-wise reduction over the ranks, in rank order.
//!
//! Every element is combined as `((x0 + x1) + x2) + ...`, whatever the transport, the unit or the
//! vector width, so all transports give the same bits. Maximum and minimum pass on NaN.

use paceline_memory::{DType, Element};

/// How the inputs of the ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their sum, divided once by the number of ranks.
    Mean,
    /// The largest; NaN if any is NaN.
    Max,
    /// The smallest; NaN if any is NaN.
    Min,
}

impl ReduceOp {
    /// The name used in errors and reports.
    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        }
    }
}

/// An element type that can be reduced.
pub trait ReduceElement: Element {
    #[doc(hidden)]
    fn add(self, other: Self) -> Self;
    #[doc(hidden)]
    fn divide(self, ranks: usize) -> Self;
    #[doc(hidden)]
    fn larger(self, other: Self) -> Self;
    #[doc(hidden)]
    fn smaller(self, other: Self) -> Self;
}

macro_rules! float_element {
    ($float:ty) => {
        impl ReduceElement for $float {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self {
                self / ranks as $float
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                if other < self || other.is_nan() { other } else { self }
            }
        }
    };
}
float_element!(f32);
float_element!(f64);

/// Whether elements of this type can be reduced.
pub(crate) fn is_reducible(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64)
}

/// Reduces `len_bytes` bytes of each region in rank order and writes the result to every region.
///
/// # Safety
///
/// The regions are valid for `len_bytes` bytes, aligned for `dtype`, do not overlap, and nobody
/// else touches them during the call.
pub(crate) unsafe fn reduce_everywhere(
    regions: &[*mut u8],
    len_bytes: usize,
    dtype: DType,
    op: ReduceOp,
) {
    // SAFETY: as required of the caller; the lengths are whole elements of `dtype`.
    unsafe {
        match dtype {
            DType::F32 => dispatch::<f32>(regions, len_bytes / 4, op),
            DType::F64 => dispatch::<f64>(regions, len_bytes / 8, op),
            DType::I64 | DType::U8 => unreachable!("refused by the group before it starts"),
        }
    }
}

/// # Safety
///
/// As for [`reduce_everywhere`], with `len` elements of `T`.
unsafe fn dispatch<T: ReduceElement>(regions: &[*mut u8], len: usize, op: ReduceOp) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512; the rest as required of the caller.
            return unsafe { avx512::<T>(regions, len, op) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2; the rest as required of the caller.
            return unsafe { avx2::<T>(regions, len, op) };
        }
    }
    // SAFETY: as required of the caller.
    unsafe { reduce::<T>(regions, len, op) }
}

/// # Safety
///
/// As for [`dispatch`], on a processor with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512<T: ReduceElement>(regions: &[*mut u8], len: usize, op: ReduceOp) {
    // SAFETY: as required of the caller.
    unsafe { reduce::<T>(regions, len, op) }
}

/// # Safety
///
/// As for [`dispatch`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<T: ReduceElement>(regions: &[*mut u8], len: usize, op: ReduceOp) {
    // SAFETY: as required of the caller.
    unsafe { reduce::<T>(regions, len, op) }
}

/// # Safety
///
/// As for [`dispatch`].
#[inline(always)]
unsafe fn reduce<T: ReduceElement>(regions: &[*mut u8], len: usize, op: ReduceOp) {
    let ranks = regions.len();
    // SAFETY: as required of the caller; each arm passes the regions on unchanged.
    unsafe {
        match op {
            ReduceOp::Sum => combine::<T>(regions, len, T::add, |x| x),
            ReduceOp::Mean => combine::<T>(regions, len, T::add, |x| x.divide(ranks)),
            ReduceOp::Max => combine::<T>(regions, len, T::larger, |x| x),
            ReduceOp::Min => combine::<T>(regions, len, T::smaller, |x| x),
        }
    }
}

/// Elements combined at a time where there are more than two ranks: the running result stays in the
/// first-level cache while each rank's part streams past it.
const BLOCK: usize = 1024;

/// # Safety
///
/// As for [`dispatch`].
#[inline(always)]
unsafe fn combine<T: ReduceElement>(
    regions: &[*mut u8],
    len: usize,
    add: impl Fn(T, T) -> T,
    finish: impl Fn(T) -> T,
) {
    if let &[first, second] = regions {
        // SAFETY: two distinct regions that nobody else touches, as required of the caller.
        let (a, b) = unsafe {
            let a = std::slice::from_raw_parts_mut(first.cast::<T>(), len);
            (a, std::slice::from_raw_parts_mut(second.cast::<T>(), len))
        };
        for (x, y) in a.iter_mut().zip(b) {
            let result = finish(add(*x, *y));
            *x = result;
            *y = result;
        }
        return;
    }
    for start in (0..len).step_by(BLOCK) {
        let size = BLOCK.min(len - start);
        // SAFETY: this block of one region, which nobody else touches; one such slice at a time.
        let block = |region: *mut u8| unsafe {
            std::slice::from_raw_parts_mut(region.cast::<T>().add(start), size)
        };
        let (running, others) = regions.split_first().expect("a group has at least one rank");
        let mut sum = [*block(*running).first().expect("blocks are not empty"); BLOCK];
        let sum = &mut sum[..size];
        sum.copy_from_slice(block(*running));
        for &region in others {
            for (x, y) in sum.iter_mut().zip(block(region)) {
                *x = add(*x, *y);
            }
        }
        for x in sum.iter_mut() {
            *x = finish(*x);
        }
        for &region in regions {
            block(region).copy_from_slice(sum);
        }
    }
}
