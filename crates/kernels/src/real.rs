//! The floating-point types that kernels compute in.

use paceline_cuda::Argument;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use crate::stored::Stored;

/// The arithmetic of f32 and f64, which are stored without a change.
pub trait Real:
    Stored<Real = Self>
    + Argument
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    /// The nearest value.
    fn from_f64(value: f64) -> Self;
    /// The same value in double precision.
    fn to_f64(self) -> f64;
    /// e to the power of `self`.
    fn exp(self) -> Self;
    /// e to the power of `self`, in a form that a compiler can vectorize.
    fn fast_exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Whether this is NaN.
    fn is_nan(self) -> bool;
}

macro_rules! real {
    ($float:ident, $fast_exp:path) => {
        impl Real for $float {
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $float
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $float::exp(self)
            }
            #[inline(always)]
            fn fast_exp(self) -> Self {
                $fast_exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                $float::ln(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                $float::sqrt(self)
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                $float::is_nan(self)
            }
        }
    };
}
real!(f32, crate::exp::exp);
real!(f64, f64::exp);
