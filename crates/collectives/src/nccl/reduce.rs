//! The kernel that reduces the parts of all ranks on a card.

use std::marker::PhantomData;

use half::{bf16, f16};
use paceline_cuda::kernel::{In, NUMBERS, Out};
use paceline_cuda::{Grid, KernelSource, Result, Stream, nccl};
use paceline_memory::DType;

use crate::ReduceOp;

static REDUCE: KernelSource = KernelSource::new("reduce.cu", include_str!("reduce.cu"), &[NUMBERS]);

/// Reduces `elems` elements of each rank, which follow each other at `parts`, in the order of the tree over the ranks.
///
/// # Safety
///
/// Both addresses are those of memory of the stream's card with room for the elements, which nobody uses otherwise until the
/// work is done. They may begin at the same element only if there is one rank.
pub(super) unsafe fn tree(
    stream: &Stream,
    (parts, result): (u64, u64),
    elems: usize,
    ranks: usize,
    (dtype, op): (DType, ReduceOp),
) -> Result<()> {
    if elems == 0 {
        return Ok(());
    }
    let (count, ranks) = (elems as u64, ranks as u32);
    let op: u32 = match op {
        ReduceOp::Sum => 0,
        ReduceOp::Mean => 1,
        ReduceOp::Min => 2,
        ReduceOp::Max => 3,
        ReduceOp::Product => 4,
    };
    macro_rules! launch {
        ($of:ty) => {{
            let (parts, result) = (In::<$of>(parts, PhantomData), Out::<$of>(result, PhantomData));
            let arguments = (parts, result, count, ranks, op);
            // SAFETY: a thread has an element of each part and of the result.
            unsafe {
                stream.launch(REDUCE.of::<$of>("reduce_tree"), arguments, Grid::elements(elems))
            }
        }};
    }
    match dtype {
        DType::F32 => launch!(f32),
        DType::F64 => launch!(f64),
        DType::F16 => launch!(f16),
        DType::BF16 => launch!(bf16),
        DType::I32 => launch!(i32),
        DType::I64 => launch!(i64),
        DType::U8 => launch!(u8),
    }
}

/// The same reduction in NCCL's own order.
pub(super) fn of_library(dtype: DType, op: ReduceOp) -> nccl::ReductionCodes {
    let number = match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    };
    let op = match op {
        ReduceOp::Sum => 0,
        ReduceOp::Product => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Mean => 4,
    };
    nccl::ReductionCodes { number, op }
}
