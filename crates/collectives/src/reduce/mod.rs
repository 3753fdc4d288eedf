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
#[cfg(test)]
mod tests;

use ::half::{bf16, f16};
use paceline_memory::{DType, Element};

use element::Reduce;

/// How the inputs of the ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Their sum. Integers wrap on overflow.
    Sum,
    /// Their sum, divided once by the number of ranks. For integers the quotient is truncated
    /// toward zero, and the sum wraps before it is divided: the mean of bytes is of little use
    /// unless their sum fits a byte.
    Mean,
    /// The smallest; NaN if any is NaN.
    Min,
    /// The largest; NaN if any is NaN.
    Max,
    /// Their product. Integers wrap on overflow.
    Product,
}

impl ReduceOp {
    /// Every operation.
    pub const ALL: [ReduceOp; 5] =
        [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

    /// The name used in errors and reports.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
        }
    }

    /// Its name in the options and tables of nccl-tests.
    pub const fn nccl_name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "avg",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "prod",
        }
    }
}

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

/// What is to be computed: element type, operation, and the number of ranks for a mean.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) ranks: usize,
}

impl Reduction {
    /// Element type of a running result: f32 for f16 and bf16, else the type itself.
    pub(crate) fn running_dtype(&self) -> DType {
        match self.dtype {
            DType::F16 | DType::BF16 => DType::F32,
            dtype => dtype,
        }
    }

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

/// One call of a [`Reduction`], so that each vector level needs one way in.
#[derive(Clone, Copy)]
enum Task<'a> {
    Run { inputs: &'a [*const u8], outputs: &'a [*mut u8] },
    Accumulate { fresh: bool, inputs: &'a [*const u8], running: *mut u8 },
    Finish { running: *const u8, outputs: &'a [*mut u8] },
}

impl Task<'_> {
    /// Checks what can be checked of the addresses, in builds with assertions.
    fn check(&self, dtype: DType, running_dtype: DType) {
        let aligned = |at: *const u8, dtype: DType| {
            debug_assert!(at.addr().is_multiple_of(dtype.size_bytes()), "{at:?} for {dtype}");
        };
        match *self {
            Task::Run { inputs, outputs } => {
                debug_assert!(!inputs.is_empty(), "nothing to reduce");
                inputs.iter().for_each(|&input| aligned(input, dtype));
                outputs.iter().for_each(|&output| aligned(output, dtype));
            }
            Task::Accumulate { fresh, inputs, running } => {
                debug_assert!(!fresh || !inputs.is_empty(), "nothing to start with");
                inputs.iter().for_each(|&input| aligned(input, dtype));
                aligned(running, running_dtype);
            }
            Task::Finish { running, outputs } => {
                outputs.iter().for_each(|&output| aligned(output, dtype));
                aligned(running, running_dtype);
            }
        }
    }
}

/// The vector instructions that the loops are compiled to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// What every processor of this architecture has.
    Portable,
    /// AVX2 and the conversions of F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with the instructions for bytes, 16-bit and 64-bit integers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Every level of this architecture, the best last.
    #[cfg(target_arch = "x86_64")]
    const ALL: &[Level] = &[Level::Portable, Level::Avx2, Level::Avx512];
    /// Every level of this architecture, the best last.
    #[cfg(not(target_arch = "x86_64"))]
    const ALL: &[Level] = &[Level::Portable];

    fn is_available(self) -> bool {
        match self {
            Level::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    /// The best level of this processor.
    fn best() -> Level {
        let available = Level::ALL.iter().rev().find(|level| level.is_available());
        available.copied().unwrap_or(Level::Portable)
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
