//! The parts of a model that a rank owns: ranges of flat storage.

use std::ops::Range;

use crate::Model;

/// The ranges that one rank owns. They are in order and do not overlap. They begin and end where a parameter or its
/// padding does, or at a multiple of 16 elements of a parameter.
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
    pub fn everything(model: &Model) -> Self {
        let layout = &model.layout;
        let (all, trained) = (0..layout.len(), 0..layout.trained_len());
        let (grads, state) = (vec![trained.clone()], vec![trained]);
        Self { values: vec![all], grads, state }
    }
}
