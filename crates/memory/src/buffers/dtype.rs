//! Element types: their sizes, their names, and the Rust types that they stand for.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

/// The type of the elements of a [`Tensor`](crate::Tensor).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision.
    F64,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of an IEEE 754 single: the same range with 8 bits of precision.
    BF16,
    /// Signed 32-bit integers.
    I32,
    /// Signed 64-bit integers, such as class labels.
    I64,
    /// Bytes.
    U8,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 7] =
        [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64, DType::U8];

    /// Size of one element in bytes, the name in Rust, and the name in nccl-tests.
    const fn facts(self) -> (usize, &'static str, &'static str) {
        match self {
            DType::F32 => (4, "f32", "float"),
            DType::F64 => (8, "f64", "double"),
            DType::F16 => (2, "f16", "half"),
            DType::BF16 => (2, "bf16", "bfloat16"),
            DType::I32 => (4, "i32", "int32"),
            DType::I64 => (8, "i64", "int64"),
            DType::U8 => (1, "u8", "uint8"),
        }
    }

    /// Size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        self.facts().0
    }

    /// The name in this project, as in Rust.
    pub const fn name(self) -> &'static str {
        self.facts().1
    }

    /// The name in the options and tables of nccl-tests.
    pub const fn nccl_name(self) -> &'static str {
        self.facts().2
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No element type has this name.
#[derive(Debug, thiserror::Error)]
#[error("unknown element type \"{0}\"; use f32, f64, f16, bf16, i32, i64 or u8")]
pub struct UnknownDType(String);

impl FromStr for DType {
    type Err = UnknownDType;

    /// Accepts either name: `f32` or `float`, `bf16` or `bfloat16`.
    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        let named = |dtype: &DType| dtype.name() == name || dtype.nccl_name() == name;
        let found = DType::ALL.into_iter().find(named);
        found.ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

/// A Rust type that can be the element type of a tensor.
///
/// # Safety
///
/// `DTYPE` must have the size of the type, every bit pattern of that size must be a valid value,
/// and the alignment must be at most 64 bytes.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The run-time name of this type.
    const DTYPE: DType;
}

// SAFETY: this is a plain number: every bit pattern is a valid value, and the size is `DType::size_bytes`.
unsafe impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
// SAFETY: as for f32.
unsafe impl Element for f64 {
    const DTYPE: DType = DType::F64;
}
// SAFETY: as for f32; the type is a transparent wrapper of its 16 bits.
unsafe impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
// SAFETY: as for f16.
unsafe impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
// SAFETY: as for f32.
unsafe impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
// SAFETY: as for f32.
unsafe impl Element for i64 {
    const DTYPE: DType = DType::I64;
}
// SAFETY: as for f32.
unsafe impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_names_of_every_type_are_understood() {
        for dtype in DType::ALL {
            assert_eq!(dtype.to_string().parse::<DType>().unwrap(), dtype);
            assert_eq!(dtype.nccl_name().parse::<DType>().unwrap(), dtype);
        }
        let error = "float8".parse::<DType>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown element type \"float8\"; use f32, f64, f16, bf16, i32, i64 or u8"
        );
    }

    #[test]
    fn sizes_agree_with_the_types() {
        fn check<T: Element>() {
            assert_eq!(T::DTYPE.size_bytes(), size_of::<T>());
        }
        check::<f32>();
        check::<f64>();
        check::<f16>();
        check::<bf16>();
        check::<i32>();
        check::<i64>();
        check::<u8>();
    }
}
