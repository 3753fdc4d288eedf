//! The errors of kernels. They are found before anything is computed.

use std::fmt;

use paceline_memory::{DType, Device, MemoryError, Shape, Tensor};

/// An error of this crate.
#[derive(thiserror::Error)]
pub enum KernelError {
    /// The operation has no kernel for cards.
    #[error("{0} has no kernel for cards of NVIDIA's; pass --device cpu")]
    NoCardBody(&'static str),
    /// A tensor does not have the shape that the operation needs.
    #[error("{op}: {operand} must have shape {expected}, got {got}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The operand.
        operand: &'static str,
        /// The shape that is needed.
        expected: Shape,
        /// The shape of the tensor.
        got: Shape,
    },
    /// An operand does not lie on the device that computes.
    #[error(
        "{op}: an operand lies on {operand}, but {compute} computes; copy it to {compute} first"
    )]
    Device {
        /// The operation.
        op: &'static str,
        /// The device of the operand.
        operand: Device,
        /// The device of the compute handle.
        compute: Device,
    },
    /// A tensor does not have the element type that the operation needs.
    #[error("{op}: {operand}: expected elements of type {expected}, got {got}")]
    Type {
        /// The operation.
        op: &'static str,
        /// The operand.
        operand: &'static str,
        /// The type that is needed.
        expected: DType,
        /// The type of the tensor.
        got: DType,
    },
    /// The operation does not exist for this element type.
    #[error("{op} is not defined for elements of type {dtype}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The type of the tensor.
        dtype: DType,
    },
    /// The sizes are invalid, whatever the tensors.
    #[error("{op}: {reason}")]
    Geometry {
        /// The operation.
        op: &'static str,
        /// The fault of the sizes.
        reason: String,
    },
    /// A class label outside the classes.
    #[error("cross_entropy: label {label} of row {row} is not among {num_classes} classes")]
    Label {
        /// The row.
        row: usize,
        /// The label of the row.
        label: i64,
        /// The number of classes.
        num_classes: usize,
    },
    /// An index beyond the elements.
    #[error("{op}: index {index} is not among {len} elements")]
    Index {
        /// The operation.
        op: &'static str,
        /// The index.
        index: i64,
        /// The number of elements.
        len: usize,
    },
    /// The system refused threads to compute with.
    #[error(
        "the system refuses {num_threads} threads to compute with ({reason}); allow more processes (ulimit -u, or \
         pids.max of the control group), or use fewer threads"
    )]
    NoThreads {
        /// The number of threads that were asked for.
        num_threads: usize,
        /// The system's message.
        reason: String,
    },
    /// A tensor or buffer could not be allocated or claimed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl fmt::Debug for KernelError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

pub(crate) fn expect_shape(
    op: &'static str,
    operand: &'static str,
    got: Shape,
    expected: impl Into<Shape>,
) -> crate::Result<()> {
    let expected = expected.into();
    if got == expected {
        return Ok(());
    }
    Err(KernelError::Shape { op, operand, expected, got })
}

pub(crate) fn matrix_sizes(
    op: &'static str,
    operand: &'static str,
    tensor: &Tensor,
) -> crate::Result<[usize; 2]> {
    let (expected, got) = ([0, 0].into(), tensor.shape());
    tensor.dims().try_into().map_err(|_| KernelError::Shape { op, operand, expected, got })
}
