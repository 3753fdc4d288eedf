//! Element-wise reduction over the ranks, as a balanced tree over their order.
//!
//! Every element is combined as `((x0 + x1) + (x2 + x3)) + ...`, by the tree of [`paceline_numeric::tree`],
//! whatever the transport, the chunk of work or the vector width, so all transports give the same bits.
//! Combining the two halves of a node beforehand, in the running type, does not change
//! the result. One exception: if several inputs are NaN, it is not defined which NaN comes out. f16 and
//! bf16 are combined in f32 and rounded once, at the end. Integers wrap.
//!
//! Input: addresses of elements (not slices, since the memory is shared between ranks). Output: the reduced
//! elements in memory. This module chooses the vector instructions for the loops in `blocks`.
//! It knows nothing of rounds or peers.

mod blocks;
mod element;
mod half;
mod leaves;
mod task;
#[cfg(test)]
mod tests;

use ::half::{bf16, f16};
use paceline_memory::{DType, Element};
use paceline_numeric::SimdLevel;

pub use task::ReduceOp;
use task::ReduceTask;
pub(crate) use task::Reduction;

/// An element type that can be reduced: every type of [`DType`].
pub trait ReduceElement: Element + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! reducible {
    ($($element:ty),*) => {$(
        impl sealed::Sealed for $element {}
        impl ReduceElement for $element {}
    )*};
}
reducible!(f32, f64, f16, bf16, i32, i64, u8);

impl Reduction {
    /// Reduces `elems` elements of each input, those of ranks 0, 1, 2, ..., and writes the finished result to every output.
    ///
    /// # Safety
    ///
    /// There is at least one input, and at most [`crate::MAX_RANKS`]. All inputs and outputs are valid for `elems`
    /// elements and aligned for the type, and nobody else touches them during the call. An output may begin at exactly
    /// the address of an input, but overlaps no other memory named here.
    pub(crate) unsafe fn run(&self, inputs: &[*const u8], outputs: &[*mut u8], elems: usize) {
        // SAFETY: as required of the caller.
        unsafe { self.perform(SimdLevel::of_process(), ReduceTask::Run { inputs, outputs }, elems) }
    }

    /// Combines the inputs, the leaves of a node of the tree, to a running result (of
    /// [`Reduction::running_dtype`]).
    ///
    /// # Safety
    ///
    /// As for [`Reduction::run`]. `running` is valid for `elems` elements of its own type, aligned for that
    /// type, and overlaps no input.
    pub(crate) unsafe fn partial(&self, inputs: &[*const u8], running: *mut u8, elems: usize) {
        // SAFETY: as required of the caller.
        unsafe {
            self.perform(SimdLevel::of_process(), ReduceTask::Partial { inputs, running }, elems)
        }
    }

    /// Combines the running results of nodes that together are the tree, finishes the result (divides for a
    /// mean, rounds to f16 or bf16) and writes it to every output. `merges` is what
    /// [`paceline_numeric::tree::merges`] gives for these nodes.
    ///
    /// # Safety
    ///
    /// As for [`Reduction::run`], with nodes as inputs, whose elements have the running type. A node may
    /// begin at the address of an output only if both types have the same size.
    pub(crate) unsafe fn complete(
        &self,
        nodes: &[*const u8],
        merges: &[u8],
        outputs: &[*mut u8],
        elems: usize,
    ) {
        // SAFETY: as required of the caller.
        unsafe {
            self.perform(
                SimdLevel::of_process(),
                ReduceTask::Complete { nodes, merges, outputs },
                elems,
            )
        }
    }

    /// # Safety
    ///
    /// As for the function that makes the task; the processor has `level`.
    unsafe fn perform(&self, level: SimdLevel, task: ReduceTask, elems: usize) {
        if elems == 0 {
            // Addresses of empty regions may be null, but slices must not be.
            return;
        }
        task.check(self.dtype, self.running_dtype());
        // SAFETY: as required of the caller.
        unsafe {
            match self.dtype {
                DType::F32 => blocks::perform::<f32>(level, self, task, elems),
                DType::F64 => blocks::perform::<f64>(level, self, task, elems),
                DType::F16 => blocks::perform::<f16>(level, self, task, elems),
                DType::BF16 => blocks::perform::<bf16>(level, self, task, elems),
                DType::I32 => blocks::perform::<i32>(level, self, task, elems),
                DType::I64 => blocks::perform::<i64>(level, self, task, elems),
                DType::U8 => blocks::perform::<u8>(level, self, task, elems),
            }
        }
    }
}
