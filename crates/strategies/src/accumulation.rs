//! The order in which a rank adds up the gradients of its micro-batches.

use paceline_kernels::{Compute, elementwise};
use paceline_memory::{Category, Tensor};
use paceline_numeric::tree;

use crate::Result;

/// The order in which a rank adds up the gradients of its micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccumulationOrder {
    /// One after the other, in place. Needs no further memory.
    #[default]
    Sequential,
    /// As the balanced binary tree of [`paceline_numeric::tree`]. Ranks are added up in the same order. So if the numbers
    /// of ranks and of micro-batches are powers of two, the bits of the sum depend only on their product. Needs [`AccumulationOrder::num_partial_sums`] copies of the gradients.
    Tree,
}

impl AccumulationOrder {
    /// The number of copies of the gradients that this order keeps during a step of `num_micro_batches`. For the tree, this
    /// is its height, the number of binary digits of `num_micro_batches - 1`.
    pub fn num_partial_sums(self, num_micro_batches: usize) -> usize {
        match self {
            AccumulationOrder::Sequential => 0,
            AccumulationOrder::Tree => tree::height(num_micro_batches),
        }
    }
}

/// The sums over complete nodes of the tree, which have not been added to each other yet.
#[derive(Debug, Default)]
pub(crate) struct PartialSums {
    /// The sum over `1 << level` micro-batches, by level.
    levels: Vec<Tensor>,
    /// The levels that hold a sum, as binary digits: the number of micro-batches so far.
    count: usize,
}

impl PartialSums {
    /// Begins a step with this many partial sums at most.
    pub(crate) fn begin_step(
        &mut self,
        compute: &Compute,
        grads: &Tensor,
        num_levels: usize,
    ) -> Result<()> {
        self.count = 0;
        while self.levels.len() < num_levels {
            let (dtype, shape) = (grads.dtype(), grads.shape());
            self.levels.push(compute.allocator.tensor(dtype, shape, Category::Gradients)?);
        }
        Ok(())
    }

    /// Takes in the gradients of a micro-batch that is not the last one. Overwrites `grads`.
    pub(crate) fn push(&mut self, compute: &Compute, grads: &Tensor) -> Result<()> {
        // Each merge doubles the number of micro-batches of the sum.
        let level = tree::merges_before_last(self.count);
        for left in &self.levels[..level] {
            elementwise::add(compute, left, grads)?;
        }
        compute.copy(grads, &self.levels[level])?;
        self.count += 1;
        Ok(())
    }

    /// Whether there are no sums of earlier micro-batches.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds the sums of all earlier micro-batches to a part of the last micro-batch's gradients. The part begins at `start`.
    pub(crate) fn add_to(&self, compute: &Compute, grad: &Tensor, start: usize) -> Result<()> {
        // The smallest sums are over the latest micro-batches, which are next to the last micro-batch in the tree.
        for (level, sum) in self.levels.iter().enumerate() {
            if self.count >> level & 1 == 1 {
                let left = sum.slice(start..start + grad.num_elems())?.view(grad.shape())?;
                elementwise::add(compute, &left, grad)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use paceline_memory::{Allocator, DType};

    use super::*;

    /// Numbers whose sum depends on the order of additions.
    fn number(at: usize) -> f32 {
        (at as f32 * 0.37 + 0.1) * 10f32.powi((at * 5 % 7) as i32 - 3)
    }

    /// The sum by the definition of the tree.
    fn tree(leaves: &[f32]) -> f32 {
        match leaves {
            [one] => *one,
            _ => {
                let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
                tree(left) + tree(right)
            }
        }
    }

    #[test]
    fn partial_sums_make_the_balanced_tree_in_the_stated_memory() {
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let grads = compute.allocator.tensor(DType::F32, [2], Category::Gradients).unwrap();
        for num_micro_batches in 1..20 {
            let mut sums = PartialSums::default();
            let num_levels = AccumulationOrder::Tree.num_partial_sums(num_micro_batches);
            let digits = format!("{:b}", num_micro_batches - 1).trim_start_matches('0').len();
            assert_eq!(num_levels, digits);
            sums.begin_step(&compute, &grads, num_levels).unwrap();
            let leaves: Vec<f32> = (0..num_micro_batches).map(number).collect();
            for (at, leaf) in leaves.iter().enumerate() {
                grads.write::<f32>().unwrap().copy_from_slice(&[0.0, *leaf]);
                if at + 1 < num_micro_batches {
                    sums.push(&compute, &grads).unwrap();
                }
            }
            sums.add_to(&compute, &grads.slice(1..2).unwrap(), 1).unwrap();
            assert_eq!(sums.levels.len(), num_levels);
            assert_eq!(grads.read::<f32>().unwrap()[1], tree(&leaves), "{num_micro_batches}");
        }
        // With these numbers, another order would give another result.
        let running = (0..16).map(number).sum::<f32>();
        assert_ne!(running, tree(&(0..16).map(number).collect::<Vec<_>>()));
    }
}
