//! Element-wise reduction over the ranks, in rank order.
//!
//! Every element is combined as `((x0 + x1) + x2) + ...`, whatever the transport, the unit or the
//! vector width, so all transports give the same bits; which NaN comes out where several went in is
//! the one exception. f16 and bf16 are combined in f32 and rounded once, at the end. Integers wrap.
//!
//! In go addresses of elements, since the memory is shared between ranks; this module decides which
//! vector instructions the loops in `blocks` are compiled to. It knows nothing of rounds or peers.

mod blocks;
mod element;
mod half;
mod level;
mod task;
#[cfg(test)]
mod tests;

use ::half::{bf16, f16};
use paceline_memory::{DType, Element};

use element::Reduce;
use level::Level;
pub use task::ReduceOp;
pub(crate) use task::Reduction;
use task::Task;

/// An element type that can be reduced: all of [`DType`]'s.
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
    /// Reduces `elems` elements of each input in order and writes the finished result to every
    /// output.
    ///
    /// # Safety
    ///
    /// There is at least one input. All inputs and outputs are valid for `elems` elements, aligned
    /// for the type, and nobody else touches them during the call. An output may be the very same
    /// address as an input, but overlaps no other memory named here.
    pub(crate) unsafe fn run(&self, inputs: &[*const u8], outputs: &[*mut u8], elems: usize) {
        // SAFETY: as required of the caller.
        unsafe { self.perform(Level::best(), Task::Run { inputs, outputs }, elems) }
    }

    /// Continues a running result (of [`Reduction::running_dtype`]) by the inputs, in order; with
    /// `fresh` the first input starts it.
    ///
    /// # Safety
    ///
    /// As for [`Reduction::run`], but only a fresh result needs an input; `running` is valid for
    /// `elems` elements of its own type, aligned for it, holds a running result unless `fresh`, and
    /// overlaps no input.
    pub(crate) unsafe fn accumulate(
        &self,
        fresh: bool,
        inputs: &[*const u8],
        running: *mut u8,
        elems: usize,
    ) {
        // SAFETY: as required of the caller.
        unsafe { self.perform(Level::best(), Task::Accumulate { fresh, inputs, running }, elems) }
    }

    /// Turns a running result into the finished one (a mean's division, rounding to f16 or bf16)
    /// and writes it to every output.
    ///
    /// # Safety
    ///
    /// As for [`Reduction::run`]; `running` holds `elems` elements of its own type, and may be the
    /// same address as an output if both types are of one size.
    pub(crate) unsafe fn finish(&self, running: *const u8, outputs: &[*mut u8], elems: usize) {
        // SAFETY: as required of the caller.
        unsafe { self.perform(Level::best(), Task::Finish { running, outputs }, elems) }
    }

    /// # Safety
    ///
    /// As for the function that makes the task; the processor has `level`.
    unsafe fn perform(&self, level: Level, task: Task, elems: usize) {
        if elems == 0 {
            // Addresses of nothing may be null, which no slice is.
            return;
        }
        task.check(self.dtype, self.running_dtype());
        // SAFETY: as required of the caller.
        unsafe {
            match self.dtype {
                DType::F32 => at_level::<f32>(level, self, task, elems),
                DType::F64 => at_level::<f64>(level, self, task, elems),
                DType::F16 => at_level::<f16>(level, self, task, elems),
                DType::BF16 => at_level::<bf16>(level, self, task, elems),
                DType::I32 => at_level::<i32>(level, self, task, elems),
                DType::I64 => at_level::<i64>(level, self, task, elems),
                DType::U8 => at_level::<u8>(level, self, task, elems),
            }
        }
    }
}

/// # Safety
///
/// As for [`Reduction::perform`], with `T` of its element type.
unsafe fn at_level<T: Reduce>(level: Level, reduction: &Reduction, task: Task, elems: usize) {
    // SAFETY: as required of the caller, which has made sure of the level.
    unsafe {
        match level {
            Level::Portable => blocks::perform::<T>(level, reduction, task, elems),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::<T>(level, reduction, task, elems),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::<T>(level, reduction, task, elems),
        }
    }
}

/// # Safety
///
/// As for [`at_level`], on a processor with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn avx512<T: Reduce>(level: Level, reduction: &Reduction, task: Task, elems: usize) {
    // SAFETY: as required of the caller.
    unsafe { blocks::perform::<T>(level, reduction, task, elems) }
}

/// # Safety
///
/// As for [`at_level`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<T: Reduce>(level: Level, reduction: &Reduction, task: Task, elems: usize) {
    // SAFETY: as required of the caller.
    unsafe { blocks::perform::<T>(level, reduction, task, elems) }
}
