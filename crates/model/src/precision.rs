//! The element types of a model's numbers.

use paceline_memory::DType;

/// The three element types of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The type of activations, and of the values that layers use.
    pub compute: DType,
    /// The type of gradients of parameters.
    pub grads: DType,
    /// The type of the parameters that the optimizer updates, and of its state.
    pub master: DType,
}

impl Precision {
    /// Single precision for everything.
    pub const F32: Self = Self { compute: DType::F32, grads: DType::F32, master: DType::F32 };
}

impl From<DType> for Precision {
    /// One type for everything.
    fn from(dtype: DType) -> Self {
        Self { compute: dtype, grads: dtype, master: dtype }
    }
}
