//! Numbers as they lie in memory, and the types in which kernels compute with them.
//!
//! f32 and f64 are computed with as they are. bf16 and f16 are widened to f32 when they are loaded, and results are rounded
//! once, when they are stored. So one loop serves all of them.

use half::{bf16, f16};
use paceline_cuda::kernel::Scalar;
use paceline_memory::Element;

use crate::Real;

/// A number in memory.
///
/// ```
/// use half::bf16;
/// use paceline_kernels::Stored;
///
/// /// The sum, rounded once.
/// fn sum<S: Stored>(a: S, b: S) -> S {
///     S::store(a.load() + b.load())
/// }
/// assert_eq!(sum(bf16::ONE, bf16::ONE), bf16::from_f32(2.0));
/// ```
pub trait Stored: Element + Default + Scalar<Wide = <Self as Stored>::Real> {
    /// The type in which kernels compute with this number.
    type Real: Real;
    /// The same value, exactly.
    fn load(self) -> Self::Real;
    /// The nearest value of this type.
    fn store(x: Self::Real) -> Self;
    /// The elements themselves as the type that kernels compute in. `None` if that is another type.
    fn as_reals(elems: &mut [Self]) -> Option<&mut [Self::Real]>;
}

macro_rules! stored_as_it_is {
    ($real:ty) => {
        impl Stored for $real {
            type Real = Self;
            #[inline(always)]
            fn load(self) -> Self {
                self
            }
            #[inline(always)]
            fn store(x: Self) -> Self {
                x
            }
            fn as_reals(elems: &mut [Self]) -> Option<&mut [Self]> {
                Some(elems)
            }
        }
    };
}
stored_as_it_is!(f32);
stored_as_it_is!(f64);

macro_rules! stored_in_16_bits {
    ($half:ident) => {
        impl Stored for $half {
            type Real = f32;
            #[inline(always)]
            fn load(self) -> f32 {
                paceline_numeric::$half::widen(self)
            }
            #[inline(always)]
            fn store(x: f32) -> Self {
                paceline_numeric::$half::round(x)
            }
            fn as_reals(_: &mut [Self]) -> Option<&mut [f32]> {
                None
            }
        }
    };
}
stored_in_16_bits!(bf16);
stored_in_16_bits!(f16);

/// The nearest value of the type in which kernels compute with numbers of a type.
pub(crate) fn wide<S: Stored>(x: f64) -> S::Real {
    S::Real::from_f64(x)
}

/// A number with which kernels compute in f32: f32, bf16 or f16.
pub(crate) trait SinglePrecision: Stored<Real = f32> {}
impl SinglePrecision for f32 {}
impl SinglePrecision for bf16 {}
impl SinglePrecision for f16 {}

/// A number as the operand of a product whose operands are rounded to `S`.
#[inline(always)]
pub(crate) fn operand<X: SinglePrecision, S: SinglePrecision>(x: X) -> f32 {
    S::store(x.load()).load()
}

/// Runs a body with the element type of a tensor under a name: f32, f64, bf16 or f16, or one of those that are named. For any
/// other type the result is [`KernelError::DType`](crate::KernelError::DType), or an error that is made from it.
///
/// ```
/// use paceline_kernels::{Result, Stored, dispatch};
/// use paceline_memory::Tensor;
///
/// /// `y = -x`, element by element.
/// fn negate(x: &Tensor, y: &Tensor) -> Result<()> {
///     dispatch!("negate", x.dtype(), S => {
///         for (y, x) in y.write::<S>()?.iter_mut().zip(x.read::<S>()?.iter()) {
///             *y = S::store(-x.load());
///         }
///         Ok(())
///     })
/// }
/// ```
#[macro_export]
macro_rules! dispatch {
    ($op:expr, $dtype:expr, $S:ident => $body:expr) => {
        $crate::dispatch!($op, $dtype, $S: f32 | f64 | bf16 | f16 => $body)
    };
    ($op:expr, $dtype:expr, $S:ident: $($of:ident)|+ => $body:expr) => {
        match $dtype {
            $(dtype if dtype == <$crate::in_macro::$of as $crate::in_macro::Element>::DTYPE => {
                type $S = $crate::in_macro::$of;
                $body
            })+
            dtype => Err($crate::KernelError::DType { op: $op, dtype }.into()),
        }
    };
}
pub(crate) use dispatch;
