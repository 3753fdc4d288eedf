//! The floating-point types that kernels compute in.

use paceline_cuda::Argument;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use crate::stored::Stored;

/// The arithmetic of f32 and f64, which are stored without a change.
///
/// ```
/// use paceline_kernels::Real;
///
/// /// x / (1 + exp(-x)), in the type of `x`.
/// fn silu<T: Real>(x: T) -> T {
///     x / (T::from_f64(1.0) + (-x).fast_exp())
/// }
/// assert_eq!((silu(0f32), silu(0f64)), (0.0, 0.0));
/// ```
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
    /// Sine of an angle in radians.
    fn sin(self) -> Self;
    /// Cosine of an angle in radians.
    fn cos(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// `self` to this power.
    fn powf(self, power: Self) -> Self;
    /// The larger of both; the other one, if one is NaN.
    fn max(self, other: Self) -> Self;
    /// Whether this is NaN.
    fn is_nan(self) -> bool;
}

macro_rules! real {
    ($float:ident, $fast_exp:path, $($method:ident($($other:ident)?) -> $output:ty),+) => {
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
            fn fast_exp(self) -> Self {
                $fast_exp(self)
            }
            $(#[inline(always)]
            fn $method(self $(, $other: Self)?) -> $output {
                $float::$method(self $(, $other)?)
            })+
        }
    };
    ($float:ident, $fast_exp:path) => {
        real!(
            $float, $fast_exp, exp() -> Self, ln() -> Self, sqrt() -> Self, sin() -> Self, cos() -> Self,
            tanh() -> Self, powf(power) -> Self, max(other) -> Self, is_nan() -> bool
        );
    };
}
real!(f32, crate::exp::exp);
real!(f64, f64::exp);
