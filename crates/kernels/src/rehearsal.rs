//! Counts of operations: their arithmetic, the bytes that they move, and their needs of a card.
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
    pub(crate) other_flops: u64,
    pub(crate) touched_bytes: Option<u64>,
    pub(crate) card_needs: CardNeeds,
}

impl Op {
    /// The operations for which an exponential function counts: it is a polynomial of about as many.
    pub(crate) const EXP: usize = 20;

    /// The operation of this name, without floating-point operations.
    pub const fn new(name: &'static str) -> Self {
        let card_needs = CardNeeds { capability: (0, 0), shared_bytes: 0, missing: None };
        let (forward_flops, backward_flops, other_flops, touched_bytes) = (0, 0, 0, None);
        Self { name, forward_flops, backward_flops, other_flops, touched_bytes, card_needs }
    }

    /// A product of a forward pass with as many multiply-adds as the product of `factors`, see
    /// [`Compute::forward_flops`](crate::Compute::forward_flops).
    pub fn forward_product(self, factors: impl IntoIterator<Item = usize>) -> Self {
        Self { forward_flops: product(2, factors), ..self }
    }

    /// A product of a backward pass, see [`Compute::backward_flops`](crate::Compute::backward_flops).
    pub fn backward_product(self, factors: impl IntoIterator<Item = usize>) -> Self {
        Self { backward_flops: product(2, factors), ..self }
    }

    /// Arithmetic outside of products: the product of `factors`. Additions, multiplications, comparisons, divisions and roots
    /// count as one each, exponential functions as [`Op::EXP`].
    pub(crate) fn elementwise(self, factors: impl IntoIterator<Item = usize>) -> Self {
        Self { other_flops: product(1, factors), ..self }
    }

    /// The bytes that it reads and writes, if it leaves out a part of its operands.
    pub(crate) fn touching(self, bytes: usize) -> Self {
        Self { touched_bytes: Some(bytes as u64), ..self }
    }

    /// Its arithmetic, in the direct form: what is computed twice counts once.
    pub(crate) fn flops(&self) -> u64 {
        self.forward_flops.saturating_add(self.backward_flops).saturating_add(self.other_flops)
    }

    /// An operation that no card can run.
    pub(crate) fn without_card(self) -> Self {
        self.needs(CardNeeds { missing: Some(self.name), ..self.card_needs })
    }

    /// Kernels that need this of a card, see [`Compute::card_needs`](crate::Compute::card_needs).
    pub(crate) fn needs(self, card_needs: CardNeeds) -> Self {
        Self { card_needs, ..self }
    }
}

/// The product of these numbers. A multiply-add is two operations.
fn product(first: u64, factors: impl IntoIterator<Item = usize>) -> u64 {
    factors.into_iter().fold(first, |all, factor| all.saturating_mul(factor as u64))
}

/// The sums over all operations that were rehearsed with a handle.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpCounts {
    pub(crate) forward_flops: u64,
    pub(crate) backward_flops: u64,
    pub(crate) moved_bytes: u64,
    pub(crate) card_needs: CardNeeds,
}

impl OpCounts {
    /// Counts the products of an operation and the bytes that it moves, and notes its needs of a card.
    pub(crate) fn count(&mut self, op: Op, moved_bytes: u64) {
        self.moved_bytes = self.moved_bytes.saturating_add(moved_bytes);
        self.card_needs = self.card_needs.and(op.card_needs);
        self.forward_flops = self.forward_flops.saturating_add(op.forward_flops);
        self.backward_flops = self.backward_flops.saturating_add(op.backward_flops);
    }
}
