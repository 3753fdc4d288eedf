//! Element types and reductions, with the numbers of nccl.h.

use crate::boundary::Status;
use crate::ptx::HalfType;

use super::communicator::INVALID_ARGUMENT;

/// The types of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Element {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

impl Element {
    /// The type with this number of `ncclDataType_t`.
    pub fn new(number: u32) -> Result<Self, Status> {
        use Element::*;
        let all = [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16];
        all.get(number as usize).copied().ok_or(INVALID_ARGUMENT)
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

/// The reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum NcclReduction {
    Sum,
    Product,
    Max,
    Min,
    /// The sum, divided by the number of ranks.
    Average,
}

impl NcclReduction {
    /// The reduction with this number of `ncclRedOp_t`.
    pub fn new(number: u32) -> Result<Self, Status> {
        use NcclReduction::*;
        [Sum, Product, Max, Min, Average].get(number as usize).copied().ok_or(INVALID_ARGUMENT)
    }
}

macro_rules! combine {
    ($type:ty, $reduction:expr, $a:expr, $b:expr, $add:expr, $multiply:expr) => {{
        let a = <$type>::from_le_bytes($a.try_into().unwrap_or_default());
        let b = <$type>::from_le_bytes($b.try_into().unwrap_or_default());
        let result: $type = match $reduction {
            NcclReduction::Sum | NcclReduction::Average => $add(a, b),
            NcclReduction::Product => $multiply(a, b),
            NcclReduction::Max => a.max(b),
            NcclReduction::Min => a.min(b),
        };
        $a.copy_from_slice(&result.to_le_bytes());
    }};
}

macro_rules! integers {
    ($type:ty, $reduction:expr, $a:expr, $b:expr) => {
        combine!($type, $reduction, $a, $b, <$type>::wrapping_add, <$type>::wrapping_mul)
    };
}

macro_rules! divide {
    ($type:ty, $a:expr, $count:expr) => {{
        let a = <$type>::from_le_bytes($a.try_into().unwrap_or_default());
        $a.copy_from_slice(&(a / $count as $type).to_le_bytes());
    }};
}

fn with_half(half: HalfType, a: &mut [u8], value: impl FnOnce(f32) -> f32) {
    let bits = u64::from(u16::from_le_bytes([a[0], a[1]]));
    a.copy_from_slice(&(half.bits(value(half.value(bits))) as u16).to_le_bytes());
}

fn combine_one(element: Element, reduction: NcclReduction, a: &mut [u8], b: &[u8]) {
    use std::ops::{Add, Mul};
    let halves = |half: HalfType, a: &mut [u8]| {
        let b = half.value(u64::from(u16::from_le_bytes([b[0], b[1]])));
        with_half(half, a, |a| match reduction {
            NcclReduction::Sum | NcclReduction::Average => a + b,
            NcclReduction::Product => a * b,
            NcclReduction::Max => a.max(b),
            NcclReduction::Min => a.min(b),
        });
    };
    match element {
        Element::I8 => integers!(i8, reduction, a, b),
        Element::U8 => integers!(u8, reduction, a, b),
        Element::I32 => integers!(i32, reduction, a, b),
        Element::U32 => integers!(u32, reduction, a, b),
        Element::I64 => integers!(i64, reduction, a, b),
        Element::U64 => integers!(u64, reduction, a, b),
        Element::F32 => combine!(f32, reduction, a, b, f32::add, f32::mul),
        Element::F64 => combine!(f64, reduction, a, b, f64::add, f64::mul),
        Element::F16 => halves(HalfType::F16, a),
        Element::Bf16 => halves(HalfType::Bf16, a),
    }
}

fn divide_one(element: Element, a: &mut [u8], count: usize) {
    match element {
        Element::I8 => divide!(i8, a, count),
        Element::U8 => divide!(u8, a, count),
        Element::I32 => divide!(i32, a, count),
        Element::U32 => divide!(u32, a, count),
        Element::I64 => divide!(i64, a, count),
        Element::U64 => divide!(u64, a, count),
        Element::F32 => divide!(f32, a, count),
        Element::F64 => divide!(f64, a, count),
        Element::F16 => with_half(HalfType::F16, a, |a| a / count as f32),
        Element::Bf16 => with_half(HalfType::Bf16, a, |a| a / count as f32),
    }
}

/// Reduces the ranks' contributions, which are equally long. As in a ring, part `k` of the elements begins with rank
/// `k + 1`, so the order of the sum differs from that of the ranks.
pub fn reduce(element: Element, reduction: NcclReduction, ranks: &[Vec<u8>]) -> Vec<u8> {
    let (size, bytes) = (ranks.len(), element.bytes());
    let count = ranks[0].len() / bytes;
    let mut result = ranks[0].clone();
    for (i, target) in result.chunks_exact_mut(bytes).enumerate() {
        let part = i * size / count.max(1);
        let of = |rank: usize| &ranks[rank % size][i * bytes..(i + 1) * bytes];
        target.copy_from_slice(of(part + 1));
        for step in 2..=size {
            combine_one(element, reduction, target, of(part + step));
        }
        if reduction == NcclReduction::Average {
            divide_one(element, target, size);
        }
    }
    result
}
