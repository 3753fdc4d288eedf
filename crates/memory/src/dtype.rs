//! Element types.

use std::fmt;

/// The type of the elements of a [`Tensor`](crate::Tensor).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision.
    F64,
    /// Signed 64-bit integers; class labels.
    I64,
    /// Bytes.
    U8,
}

impl DType {
    /// Size of one element in bytes.
    pub fn size_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F64 | DType::I64 => 8,
            DType::U8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::I64 => "i64",
            DType::U8 => "u8",
        })
    }
}

/// A Rust type that can be an element.
///
/// # Safety
///
/// `DTYPE` must name the type's own size, every bit pattern of that size must be a valid value,
/// and the alignment must be at most 64 bytes.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The run-time name of this type.
    const DTYPE: DType;
}

// SAFETY: plain numbers: every bit pattern is a value, and sizes agree with `DType::size_bytes`.
unsafe impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
// SAFETY: as for f32.
unsafe impl Element for f64 {
    const DTYPE: DType = DType::F64;
}
// SAFETY: as for f32.
unsafe impl Element for i64 {
    const DTYPE: DType = DType::I64;
}
// SAFETY: as for f32.
unsafe impl Element for u8 {
    const DTYPE: DType = DType::U8;
}
