//! What can go wrong in a kernel, before it computes anything.

use paceline_memory::{DType, MemoryError, Shape};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// A tensor has another shape than the operation needs.
    #[error("{op}: {operand} must have shape {expected}, got {got}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// Which of its operands.
        operand: &'static str,
        /// The shape it needs.
        expected: Shape,
        /// The shape it got.
        got: Shape,
    },
    /// The operation does not exist for this element type.
    #[error("{op} is not defined for elements of type {dtype}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The type it got.
        dtype: DType,
    },
    /// The sizes themselves make no sense, whatever the tensors.
    #[error("{op}: {reason}")]
    Geometry {
        /// The operation.
        op: &'static str,
        /// What does not fit.
        reason: String,
    },
    /// A class label outside the classes.
    #[error("cross_entropy: label {label} of row {row} is not among {num_classes} classes")]
    Label {
        /// The row.
        row: usize,
        /// Its label.
        label: i64,
        /// How many classes there are.
        num_classes: usize,
    },
    /// An index beyond the elements.
    #[error("{op}: index {index} is not among {len} elements")]
    Index {
        /// The operation.
        op: &'static str,
        /// The index.
        index: i64,
        /// How many elements there are.
        len: usize,
    },
    /// Memory was refused.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Checks one operand's shape.
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
