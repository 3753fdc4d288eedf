//! The properties of each element type that the loops use: its arithmetic, and the type of running results.

use half::{bf16, f16};
use paceline_memory::Element;
use paceline_numeric::SimdLevel;
use paceline_numeric::bf16::{round, widen};

use super::blocks::Running;
use super::half::{narrow_f16, widen_f16};

/// A type in which values are combined.
pub(super) trait Term: Element {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn divide(self, ranks: usize) -> Self;
    /// Divides by `1 << log2`, which is at most 128: much faster than `divide`, and most numbers of
    /// ranks are powers of two.
    fn divide_by_power(self, log2: u32) -> Self;
}

/// A value as a loop reads and writes it.
pub(super) trait SimdLane: Copy {
    type Running: Term;
    const ZERO: Self;
    /// Zero of the running type.
    const RUNNING_ZERO: Self::Running;
    fn widen(self) -> Self::Running;
    fn narrow(running: Self::Running) -> Self;
}

/// An element type, and how blocks of it become lanes and back.
///
/// # Safety
///
/// Unless `IS_CONVERTED`, `SimdLane` is the type itself.
pub(super) unsafe trait Reduce: Element {
    type SimdLane: SimdLane;

    /// Whether the loops use another type than the memory, so that loading and storing are separate passes.
    const IS_CONVERTED: bool;

    /// The block as lanes: the block itself, or its values converted into `scratch`, which is as long.
    fn load<'a>(
        level: SimdLevel,
        block: &'a [Self],
        scratch: &'a mut [Self::SimdLane],
    ) -> &'a [Self::SimdLane];

    /// Finishes results, and writes them to a block of the same length.
    fn store(
        level: SimdLevel,
        results: &mut [Running<Self>],
        block: &mut [Self],
        finish: impl Fn(Running<Self>) -> Running<Self>,
    );
}

macro_rules! float_number {
    ($float:ty) => {
        impl Term for $float {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                if other < self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self {
                self / ranks as $float
            }
            // The reciprocal of a power of two is exact.
            #[inline(always)]
            fn divide_by_power(self, log2: u32) -> Self {
                self * (1.0 / (1u64 << log2) as $float)
            }
        }
    };
}
float_number!(f32);
float_number!(f64);

macro_rules! integer_number {
    ($integer:ty, $divide:expr) => {
        impl Term for $integer {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self {
                $divide(self, ranks)
            }
            // A shift rounds down. Adding the divisor minus one to negative values makes it round toward zero.
            #[inline(always)]
            #[allow(unused_comparisons, reason = "bytes are never negative")]
            fn divide_by_power(self, log2: u32) -> Self {
                let largest_remainder = ((1u64 << log2) - 1) as $integer;
                let bias = if self < 0 { largest_remainder } else { 0 };
                self.wrapping_add(bias) >> log2
            }
        }
    };
}
// Processors can divide vectors of floats, but not of integers. A float type holds both integers
// exactly, so dividing as floats and truncating gives the exact quotient: a quotient below an integer is at
// least `1 / ranks` below it, far more than the spacing of the floats there, so it is never rounded up to
// that integer.
integer_number!(u8, |x: u8, ranks: usize| {
    let quotient = f32::from(x) / ranks.max(1) as f32;
    // SAFETY: a value of the type divided by 1 or more stays within its range.
    (unsafe { quotient.to_int_unchecked::<i32>() }) as u8
});
integer_number!(i32, |x: i32, ranks: usize| {
    let quotient = f64::from(x) / ranks.max(1) as f64;
    // SAFETY: as for u8.
    unsafe { quotient.to_int_unchecked::<i32>() }
});
// No float type holds every i64 exactly.
integer_number!(i64, |x: i64, ranks: usize| x.wrapping_div(ranks.max(1) as i64));

macro_rules! own_lane {
    ($($number:ty),*) => {$(
        impl SimdLane for $number {
            type Running = $number;
            const ZERO: Self = 0 as $number;
            const RUNNING_ZERO: Self = 0 as $number;
            #[inline(always)]
            fn widen(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(running: Self) -> Self {
                running
            }
        }
    )*};
}
own_lane!(f32, f64, i32, i64, u8);

// The conversions are a few integer instructions, so they vectorize within the loops.
impl SimdLane for bf16 {
    type Running = f32;
    const ZERO: Self = bf16::ZERO;
    const RUNNING_ZERO: f32 = 0.0;
    #[inline(always)]
    fn widen(self) -> f32 {
        widen(self)
    }
    #[inline(always)]
    fn narrow(running: f32) -> Self {
        round(running)
    }
}

macro_rules! lanes_in_memory {
    ($($element:ty),*) => {$(
        // SAFETY: the lane is the type itself.
        unsafe impl Reduce for $element {
            type SimdLane = $element;
            const IS_CONVERTED: bool = false;
            #[inline(always)]
            fn load<'a>(_: SimdLevel, block: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
                block
            }
            #[inline(always)]
            fn store(
                _: SimdLevel,
                results: &mut [Running<Self>],
                block: &mut [Self],
                finish: impl Fn(Running<Self>) -> Running<Self>,
            ) {
                for (to, &mut x) in block.iter_mut().zip(results) {
                    *to = SimdLane::narrow(finish(x));
                }
            }
        }
    )*};
}
lanes_in_memory!(f32, f64, bf16, i32, i64, u8);

// The compiler does not vectorize these conversions, so whole blocks are converted by intrinsics.
// SAFETY: `IS_CONVERTED` says that the lane has a different type.
unsafe impl Reduce for f16 {
    type SimdLane = f32;
    const IS_CONVERTED: bool = true;
    #[inline(always)]
    fn load<'a>(level: SimdLevel, block: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
        widen_f16(level, block, scratch);
        scratch
    }
    #[inline(always)]
    fn store(
        level: SimdLevel,
        results: &mut [f32],
        block: &mut [Self],
        finish: impl Fn(f32) -> f32,
    ) {
        results.iter_mut().for_each(|x| *x = finish(*x));
        narrow_f16(level, results, block);
    }
}
