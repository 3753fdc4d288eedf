//! What the loops need to know of each element type: its arithmetic, and the type it is combined in.

use half::{bf16, f16};
use paceline_memory::Element;

use super::half::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use super::level::Level;

/// A type that results are combined in.
pub(super) trait Number: Element {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn divide(self, ranks: usize) -> Self;
    /// As `divide`, by `1 << log2`, at most 128: the usual numbers of ranks, and much faster.
    fn divide_by_power(self, log2: u32) -> Self;
}

/// What a loop reads and writes, one value at a time.
pub(super) trait Lane: Copy {
    type Running: Number;
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
/// Unless `IS_CONVERTED`, `Lane` is the type itself.
pub(super) unsafe trait Reduce: Element {
    type Lane: Lane;

    /// Whether the loops see another type than lies in memory, so that loading and storing are
    /// passes of their own.
    const IS_CONVERTED: bool;

    /// The block as lanes: itself, or converted into `scratch`, which is as long.
    fn load<'a>(level: Level, block: &'a [Self], scratch: &'a mut [Self::Lane])
    -> &'a [Self::Lane];

    /// Writes lanes to a block as long.
    fn store(level: Level, lanes: &[Self::Lane], block: &mut [Self]);
}

macro_rules! float_number {
    ($float:ty) => {
        impl Number for $float {
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
            // The reciprocal is exact, so product and quotient round the same value.
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
        impl Number for $integer {
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
            // A shift rounds down. Adding the divisor less one to negative values first makes it
            // round toward zero.
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
// Processors divide vectors of floats, but not of integers. The quotient of two integers that a
// float holds exactly is never rounded up to the next integer where it lies below: it is at least
// `1 / ranks` away from it, far more than the float's spacing there. So truncating it is exact.
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
// No float holds every i64.
integer_number!(i64, |x: i64, ranks: usize| x.wrapping_div(ranks.max(1) as i64));

macro_rules! own_lane {
    ($($number:ty),*) => {$(
        impl Lane for $number {
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

// The conversions are a few integer instructions, so they vectorise within the loops.
impl Lane for bf16 {
    type Running = f32;
    const ZERO: Self = bf16::ZERO;
    const RUNNING_ZERO: f32 = 0.0;
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_bf16(self)
    }
    #[inline(always)]
    fn narrow(running: f32) -> Self {
        narrow_bf16(running)
    }
}

macro_rules! lanes_in_memory {
    ($($element:ty),*) => {$(
        // SAFETY: the lane is the type itself.
        unsafe impl Reduce for $element {
            type Lane = $element;
            const IS_CONVERTED: bool = false;
            #[inline(always)]
            fn load<'a>(_: Level, block: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
                block
            }
            #[inline(always)]
            fn store(_: Level, lanes: &[Self], block: &mut [Self]) {
                block.copy_from_slice(lanes);
            }
        }
    )*};
}
lanes_in_memory!(f32, f64, bf16, i32, i64, u8);

// The compiler does not vectorise these conversions, so whole blocks are converted by intrinsics.
// SAFETY: `IS_CONVERTED` says that the lane is another type.
unsafe impl Reduce for f16 {
    type Lane = f32;
    const IS_CONVERTED: bool = true;
    #[inline(always)]
    fn load<'a>(level: Level, block: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
        widen_f16(level, block, scratch);
        scratch
    }
    #[inline(always)]
    fn store(level: Level, lanes: &[f32], block: &mut [Self]) {
        narrow_f16(level, lanes, block);
    }
}
