//! Which elements of flat storage a rank owns.

use std::ops::Range;

use crate::{Layout, Param};

/// The ranges of flat storage that belong to one rank, in order and without overlap. They begin and end where a
/// parameter or its padding does, or at a multiple of 16 elements of a parameter.
///
/// The owner of a value holds it between two steps. The owner of a gradient holds it, final and equal on all its owners,
/// after a step's backward passes. The owner of state updates the values in that range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    /// Values.
    pub values: Vec<Range<usize>>,
    /// Gradients.
    pub grads: Vec<Range<usize>>,
    /// Optimizer state.
    pub state: Vec<Range<usize>>,
}

impl Owned {
    /// Everything, as in a replica.
    pub fn everything(layout: &Layout) -> Self {
        let (all, trained) = (0..layout.len(), 0..layout.trained_len());
        Self { values: vec![all], grads: vec![trained.clone()], state: vec![trained] }
    }

    /// Whether this rank holds the gradient of a parameter, or a part of it.
    pub fn has_grad_of(&self, param: &Param) -> bool {
        let range = param.range();
        !param.is_frozen
            && self.grads.iter().any(|own| own.start < range.end && range.start < own.end)
    }
}
