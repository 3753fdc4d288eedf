//! The function that follows a linear or normalizing layer and is computed with it.

/// What follows the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    None,
    /// `max(0, .)`.
    Relu,
}
