//! The element types of a model's numbers.
//!
//! With bf16 and fp16, like `autocast` of PyTorch, products have operands of 16 bits, and everything that is added up over a whole
//! network or a whole run stays f32: parameters, gradients of parameters, optimizer state, the residual stream, statistics
//! and losses.

use paceline_memory::DType;

/// The three element types of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The type of activations between the products of a block, and of their gradients.
    pub compute: DType,
    /// The type of gradients of parameters.
    pub grads: DType,
    /// The type of the parameters that layers read and the optimizer updates, of its state, and of the activations that need
    /// the range and the digits of the parameters: see [`Context::wide_dtype`](crate::Context::wide_dtype).
    pub master: DType,
}

impl Precision {
    /// Single precision for everything.
    pub const F32: Self = Self { compute: DType::F32, grads: DType::F32, master: DType::F32 };

    /// Products in bf16, everything else in single precision.
    pub const BF16: Self = Self { compute: DType::BF16, ..Self::F32 };

    /// Products in fp16, everything else in single precision. Gradients of activations have the range of fp16, so the loss
    /// has to be scaled.
    pub const FP16: Self = Self { compute: DType::F16, ..Self::F32 };
}

impl From<DType> for Precision {
    /// One type for everything.
    fn from(dtype: DType) -> Self {
        Self { compute: dtype, grads: dtype, master: dtype }
    }
}
