//! The kernel that reduces the parts of all ranks on a card.

use std::marker::PhantomData;

use half::{bf16, f16};
use paceline_cuda::kernel::{In, NUMBERS, Out};
use paceline_cuda::{Grid, KernelCall, Result, Stream, nccl};
use paceline_memory::DType;

use crate::ReduceOp;

paceline_cuda::kernels! {
    REDUCE = "reduce.cu", include_str!("reduce.cu"), [NUMBERS];
    /// `elems` elements of each of the ranks' parts.
    fn reduce_tree<T: f32 | f64 | f16 | bf16 | i32 | i64 | u8>(
        parts: In<T>, result: Out<T>, elems: u64, ranks: u32, op: u32,
    );
}

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
    let op = match op {
        ReduceOp::Sum => 0,
        ReduceOp::Mean => 1,
        ReduceOp::Min => 2,
        ReduceOp::Max => 3,
        ReduceOp::Product => 4,
    };
    fn call<T: paceline_cuda::kernel::Scalar>(
        (parts, result): (u64, u64),
        (count, ranks, op): (u64, u32, u32),
    ) -> Result<KernelCall<'static>> {
        reduce_tree::<T>(In(parts, PhantomData), Out(result, PhantomData), count, ranks, op)
    }
    let (at, numbers) = ((parts, result), (count, ranks, op));
    let call = match dtype {
        DType::F32 => call::<f32>(at, numbers),
        DType::F64 => call::<f64>(at, numbers),
        DType::F16 => call::<f16>(at, numbers),
        DType::BF16 => call::<bf16>(at, numbers),
        DType::I32 => call::<i32>(at, numbers),
        DType::I64 => call::<i64>(at, numbers),
        DType::U8 => call::<u8>(at, numbers),
    };
    // SAFETY: a thread has an element of each part and of the result.
    unsafe { stream.launch(call?, Grid::elements(elems)) }
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

#[cfg(test)]
mod tests {
    use paceline_cuda::compiler;

    use super::*;

    #[test]
    fn the_stated_kernels_are_those_of_the_source() {
        match compiler::version() {
            Ok(_) => REDUCE.check().unwrap(),
            Err(error) => println!("skipped: {error}"),
        }
    }
}
