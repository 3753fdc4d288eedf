//! The task of one call: the operation, the element types, and the addresses.
//! This module does not know how the result is computed.

use paceline_memory::DType;

/// How the inputs of the ranks are combined.
///
/// Gradients are combined by their mean: see [`Group::all_reduce`](crate::Group::all_reduce).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. Integers wrap on overflow.
    Sum,
    /// The sum, divided once by the number of ranks. For integers the quotient is truncated toward zero,
    /// and the sum wraps before the division: a mean of bytes is of little use unless their sum fits in a byte.
    Mean,
    /// The minimum; NaN if any input is NaN.
    Min,
    /// The maximum; NaN if any input is NaN.
    Max,
    /// The product. Integers wrap on overflow.
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

    /// The name in the options and tables of nccl-tests.
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

/// Element type, operation, and the number of ranks (for a mean) of a reduction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) ranks: usize,
}

impl Reduction {
    /// Element type of a running result: f32 for f16 and bf16, and the type itself for all others.
    pub(crate) fn running_dtype(&self) -> DType {
        match self.dtype {
            DType::F16 | DType::BF16 => DType::F32,
            dtype => dtype,
        }
    }
}

/// One call of a [`Reduction`] as a value, so that each vector level needs only one entry point.
#[derive(Clone, Copy)]
pub(super) enum ReduceTask<'a> {
    Run { inputs: &'a [*const u8], outputs: &'a [*mut u8] },
    Partial { inputs: &'a [*const u8], running: *mut u8 },
    Complete { nodes: &'a [*const u8], merges: &'a [u8], outputs: &'a [*mut u8] },
}

impl ReduceTask<'_> {
    /// Checks the number and the alignment of the addresses, in builds with assertions.
    pub(super) fn check(&self, dtype: DType, running_dtype: DType) {
        let aligned = |at: *const u8, dtype: DType| {
            debug_assert!(at.addr().is_multiple_of(dtype.size_bytes()), "{at:?} for {dtype}");
        };
        match *self {
            ReduceTask::Run { inputs, outputs } => {
                debug_assert!(!inputs.is_empty(), "nothing to reduce");
                inputs.iter().for_each(|&input| aligned(input, dtype));
                outputs.iter().for_each(|&output| aligned(output, dtype));
            }
            ReduceTask::Partial { inputs, running } => {
                debug_assert!(!inputs.is_empty(), "nothing to reduce");
                inputs.iter().for_each(|&input| aligned(input, dtype));
                aligned(running, running_dtype);
            }
            ReduceTask::Complete { nodes, merges, outputs } => {
                let total: usize = merges.iter().map(|&times| usize::from(times)).sum();
                debug_assert!(nodes.len() == merges.len() && total + 1 == nodes.len(), "one tree");
                nodes.iter().for_each(|&node| aligned(node, running_dtype));
                outputs.iter().for_each(|&output| aligned(output, dtype));
            }
        }
    }
}
