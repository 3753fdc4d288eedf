//! Counts of operations: their products, the bytes that they move, and their needs of a card.
//!
//! Input: operations, as a device without contents is given them. Output: sums of all of them. This file does not know what
//! an operation computes.

use crate::CardNeeds;

/// The name of an operation, and what it counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an operation is launched by `Compute::launch`"]
pub struct Op {
    pub(crate) name: &'static str,
    pub(crate) forward_flops: u64,
    pub(crate) backward_flops: u64,
    pub(crate) card_needs: CardNeeds,
}

impl Op {
    /// The operation of this name, without floating-point operations.
    pub const fn new(name: &'static str) -> Self {
        let card_needs = CardNeeds { capability: (0, 0), shared_bytes: 0 };
        Self { name, forward_flops: 0, backward_flops: 0, card_needs }
    }

    /// A product of a forward pass with as many multiply-adds as the product of `factors`, see
    /// [`Compute::forward_flops`](crate::Compute::forward_flops).
    pub fn forward_product(self, factors: impl IntoIterator<Item = usize>) -> Self {
        Self { forward_flops: flops(factors), ..self }
    }

    /// A product of a backward pass, see [`Compute::backward_flops`](crate::Compute::backward_flops).
    pub fn backward_product(self, factors: impl IntoIterator<Item = usize>) -> Self {
        Self { backward_flops: flops(factors), ..self }
    }

    /// Kernels that need this of a card, see [`Compute::card_needs`](crate::Compute::card_needs).
    pub(crate) fn needs(self, card_needs: CardNeeds) -> Self {
        Self { card_needs, ..self }
    }
}

/// The floating-point operations of a product with this number of multiply-adds.
fn flops(factors: impl IntoIterator<Item = usize>) -> u64 {
    factors.into_iter().fold(2, |all, factor| all.saturating_mul(factor as u64))
}

/// The sums over all operations that were rehearsed with a handle.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpCounts {
    pub(crate) forward_flops: u64,
    pub(crate) backward_flops: u64,
    /// Bytes of the operands.
    pub(crate) moved_bytes: u64,
    pub(crate) card_needs: CardNeeds,
}

impl OpCounts {
    /// Counts the products of an operation, and notes its needs of a card.
    pub(crate) fn count(&mut self, op: Op) {
        self.card_needs = self.card_needs.and(op.card_needs);
        self.forward_flops = self.forward_flops.saturating_add(op.forward_flops);
        self.backward_flops = self.backward_flops.saturating_add(op.backward_flops);
    }

    /// Counts an operand that an operation reads or writes so many times.
    pub(crate) fn count_moved(&mut self, times: usize, bytes: usize) {
        self.moved_bytes = self.moved_bytes.saturating_add(times.saturating_mul(bytes) as u64);
    }
}
