//! The activation function that follows a linear or normalizing layer and is computed together with it.

/// The activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// No activation.
    None,
    /// `max(0, .)`.
    Relu,
}
