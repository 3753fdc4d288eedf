//! The order in which a rank adds up the gradients of its micro-batches.
//!
//! Input: the micro-batch whose gradients come next, in any order. Output: the sum over all
//! micro-batches, in the place of the last one. This file does not know which micro-batch comes when.

use std::ops::Range;

use paceline_kernels::{Compute, elementwise};
use paceline_memory::{Category, Tensor};
use paceline_model::{GradReadiness, Layout, ParamId, Storage, UnitId};
use paceline_numeric::tree;

use crate::Result;

/// The order in which a rank adds up the gradients of its micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccumulationOrder {
    /// One after the other, in place. Needs no further memory.
    #[default]
    Sequential,
    /// As the balanced binary tree of [`paceline_numeric::tree`], by the number of the micro-batch. Ranks are added up in the
    /// same order. So if the numbers of ranks and of micro-batches are powers of two, the bits of the sum depend only on their
    /// product. The stages of a pipeline give the same bits too.
    ///
    /// The gradients in place are those of one micro-batch. When another begins, they are added to the complete sum beside
    /// them in the tree, or copied if there is none yet. So a step of `m` micro-batches takes `m - 1` additions and
    /// `m / 2` copies of each gradient. Memory: see [`AccumulationOrder::num_partial_sums`].
    Tree,
    /// As one tree over the micro-batches of all ranks. The caller promises that these follow from the data alone, and
    /// that each rank's share is a node of the tree ([`paceline_numeric::tree::shares`]). Then nothing else depends on the
    /// ranks: gradients are added up over them instead of averaged, losses are added up by micro-batch, and running statistics
    /// follow the first micro-batch of each step. Micro-batches without samples before the first that has some are left out.
    OneTree,
}

impl AccumulationOrder {
    /// The number of copies of the gradients that this order keeps during a step of `num_micro_batches`, which follow each
    /// other. For the tree, this is the logarithm of `num_micro_batches`, rounded down.
    ///
    /// It is the same in a pipeline, with two exceptions. Micro-batches in the opposite order (`looped_bfs`) can need one copy
    /// more, unless their number is a power of two. If two stages of a rank share parameters, their gradients
    /// wait for the second stage: one copy for each micro-batch between the two backward passes. The first step allocates them.
    pub fn num_partial_sums(self, num_micro_batches: usize) -> usize {
        match self {
            AccumulationOrder::Sequential => 0,
            AccumulationOrder::Tree | AccumulationOrder::OneTree => {
                num_micro_batches.max(1).ilog2() as usize
            }
        }
    }
}

/// The gradients of a step as trees: what is not in place.
#[derive(Debug, Default)]
pub(crate) struct PartialSums {
    sets: Vec<GradSet>,
    /// The micro-batches of the step that count. Those before them are left out.
    leaves: Range<usize>,
}

/// Gradients that go from one micro-batch to another together.
#[derive(Debug)]
struct GradSet {
    /// The unit to which they belong. `None` if they are all gradients, because the rank has a single stage.
    unit: Option<UnitId>,
    ids: Vec<ParamId>,
    /// Where they lie in flat storage.
    range: Range<usize>,
    /// How many times a micro-batch comes back to them.
    num_visits: usize,
    /// The micro-batch whose gradients are in place, and how many times it has come.
    in_place: Option<(usize, usize)>,
    /// Micro-batches that will come back, how many times they have come, and their gradients.
    unfinished: Vec<(usize, usize, Tensor)>,
    /// The sums over nodes of the tree whose siblings are not there yet, smallest first: level, number, and sum.
    nodes: Vec<(usize, usize, Tensor)>,
    /// Memory that holds no gradients now.
    free: Vec<Tensor>,
}

impl PartialSums {
    /// The gradients of a rank. A micro-batch comes to those of a unit `num_visits` times, or once by default.
    pub(crate) fn new(layout: &Layout, num_visits: Option<impl Fn(UnitId) -> usize>) -> Self {
        let set = |unit: Option<UnitId>, range: Range<usize>, num_visits| GradSet {
            unit,
            ids: layout
                .trained()
                .filter(|(_, param)| unit.is_none_or(|unit| param.unit == unit))
                .map(|(id, _)| id)
                .collect(),
            range,
            num_visits,
            in_place: None,
            unfinished: Vec::new(),
            nodes: Vec::new(),
            free: Vec::new(),
        };
        let sets = match num_visits {
            None => vec![set(None, 0..layout.trained_len(), 1)],
            Some(num_visits) => {
                let all = (0..).map(UnitId).zip(layout.units());
                let trained = all.filter(|(_, unit)| !unit.is_frozen && !unit.is_elsewhere);
                trained
                    .map(|(id, unit)| set(Some(id), unit.range.clone(), num_visits(id)))
                    .collect()
            }
        };
        Self { sets, leaves: 0..0 }
    }

    /// The micro-batches that count in this step.
    pub(crate) fn leaves(&self) -> Range<usize> {
        self.leaves.clone()
    }

    /// Begins a step, also after a step that has failed. Micro-batches before `leaves` are left out of the sum.
    pub(crate) fn begin_step(&mut self, leaves: Range<usize>) {
        self.leaves = leaves;
        for set in &mut self.sets {
            set.in_place = None;
            let held = set.unfinished.drain(..).chain(set.nodes.drain(..));
            set.free.extend(held.map(|(_, _, memory)| memory));
        }
    }

    /// Makes room for the gradients of a micro-batch in some units: puts those aside that are in place. The next use
    /// overwrites each gradient, unless those of the micro-batch are brought back.
    pub(crate) fn visit(
        &mut self,
        compute: &Compute,
        storage: &Storage,
        readiness: &mut GradReadiness,
        micro_batch: usize,
        units: &[UnitId],
    ) -> Result<()> {
        for set in &mut self.sets {
            if set.unit.is_some_and(|unit| !units.contains(&unit)) {
                continue;
            }
            if let Some((current, visits)) = &mut set.in_place {
                if *current == micro_batch {
                    *visits += 1;
                    continue;
                }
                for id in set.ids.iter().filter(|id| !readiness.is_written(**id)) {
                    storage.grad(*id)?.fill_zero()?;
                }
            }
            // A step of one micro-batch needs no gradients in storage.
            let range = set.range.clone();
            let grads = || storage.grads().slice(range.clone());
            if let Some(current) = set.in_place.filter(|(of, _)| self.leaves.contains(of)) {
                set.put_aside(compute, &grads()?, current, self.leaves.clone())?;
            }
            let was_here = set.unfinished.iter().position(|(of, ..)| *of == micro_batch);
            let mut visits = 0;
            if let Some(at) = was_here {
                let (_, before, memory) = set.unfinished.swap_remove(at);
                compute.copy(&memory, &grads()?)?;
                set.free.push(memory);
                visits = before;
            }
            set.ids.iter().for_each(|id| readiness.set_written(*id, was_here.is_some()));
            set.in_place = Some((micro_batch, visits + 1));
        }
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sets.iter().all(|set| set.nodes.is_empty())
    }

    /// Adds the sums of all other micro-batches to a part of the gradients of the last one. The part begins at `start`.
    pub(crate) fn add_to(&self, compute: &Compute, grad: &Tensor, start: usize) -> Result<()> {
        // Of all that is left, the smallest sum is next to the last micro-batch in the tree.
        for set in self.sets.iter().filter(|set| set.range.contains(&start)) {
            for (_, _, sum) in &set.nodes {
                let begin = start - set.range.start;
                let other = sum.slice(begin..begin + grad.num_elems())?.view(grad.shape())?;
                elementwise::add(compute, &other, grad)?;
            }
        }
        Ok(())
    }
}

/// Adds up some rows of a tensor, of `len` elements each, as the tree over these rows. The sum goes to the first row of the tensor.
pub fn add_rows(compute: &Compute, tensor: &Tensor, rows: Range<usize>, len: usize) -> Result<()> {
    let row = |at: usize| tensor.slice(at * len..(at + 1) * len);
    let mut stack: Vec<usize> = Vec::new();
    for index in 0..rows.len() {
        stack.push(rows.start + index);
        for _ in 0..tree::merges_after(index, rows.len()) {
            if let (Some(right), Some(left)) = (stack.pop(), stack.last()) {
                elementwise::add(compute, &row(right)?, &row(*left)?)?;
            }
        }
    }
    if rows.start > 0 {
        row(0)?.copy_from(&row(rows.start)?)?;
    }
    Ok(())
}

impl GradSet {
    /// Moves the gradients of a micro-batch, which has come so many times, to memory of their own, added to all sums beside
    /// them in the tree.
    fn put_aside(
        &mut self,
        compute: &Compute,
        grads: &Tensor,
        (micro_batch, visits): (usize, usize),
        leaves: Range<usize>,
    ) -> Result<()> {
        let (mut level, mut number) = (0, micro_batch - leaves.start);
        let num_leaves = leaves.len();
        let is_finished = visits >= self.num_visits;
        let mut sum: Option<Tensor> = None;
        while is_finished && level < tree::height(num_leaves) {
            let sibling = number ^ 1;
            // The tree is a complete one that is cut off after its last leaf.
            if sibling << level < num_leaves {
                let is_sibling =
                    |node: &(usize, usize, Tensor)| (node.0, node.1) == (level, sibling);
                let Some(at) = self.nodes.iter().position(is_sibling) else { break };
                let (_, _, other) = self.nodes.remove(at);
                elementwise::add(compute, sum.as_ref().unwrap_or(grads), &other)?;
                self.free.extend(sum.replace(other));
            }
            (level, number) = (level + 1, number / 2);
        }
        let memory = match sum {
            Some(sum) => sum,
            None => {
                let (dtype, shape) = (grads.dtype(), grads.shape());
                let new = || compute.allocator.tensor(dtype, shape, Category::Gradients);
                let memory = self.free.pop().map_or_else(new, Ok)?;
                compute.copy(grads, &memory)?;
                memory
            }
        };
        if is_finished {
            let at = self.nodes.partition_point(|node| node.0 < level);
            self.nodes.insert(at, (level, number, memory));
        } else {
            self.unfinished.push((micro_batch, visits, memory))
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use paceline_memory::Allocator;
    use paceline_model::{Init, LayoutBuilder, Precision};

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

    /// Adds up the gradients of micro-batches in the order of `visits`. Each comes `num_visits` times, and brings its
    /// number and then zeros. Returns the sum, and the number of copies.
    fn sum(visits: &[usize], num_visits: usize) -> (f32, usize) {
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let mut builder = LayoutBuilder::new();
        builder.unit("other").param("weight", [5], Init::Constant(0.0));
        let mut unit = builder.unit("unit");
        let (unit, id) = (unit.id, unit.param("weight", [2], Init::Constant(0.0)));
        let layout = Arc::new(builder.finish(1));
        let storage = Storage::private(layout.clone(), Precision::F32, &compute.allocator).unwrap();
        let mut readiness = GradReadiness::new(&layout);
        let mut sums = PartialSums::new(&layout, Some(|_| num_visits));
        let grad = storage.grad(id).unwrap();
        // A step that fails leaves nothing behind.
        for part in [&visits[..visits.len() / 2], visits] {
            sums.begin_step(0..visits.len() / num_visits);
            readiness.set_written(id, false);
            for &at in part {
                sums.visit(&compute, &storage, &mut readiness, at, &[unit]).unwrap();
                let is_first = !readiness.is_written(id);
                let mut grad = grad.write::<f32>().unwrap();
                grad[1] = if is_first { number(at) } else { grad[1] + 0.0 };
                readiness.set_written(id, true);
            }
        }
        sums.add_to(&compute, &grad, layout.param(id).start).unwrap();
        let of_unit = &sums.sets[unit.0];
        let copies = of_unit.free.len() + of_unit.nodes.len() + of_unit.unfinished.len();
        (grad.read::<f32>().unwrap()[1], copies)
    }

    #[test]
    fn micro_batches_make_the_balanced_tree_in_any_order() {
        for count in 1..20 {
            let expected = tree(&(0..count).map(number).collect::<Vec<_>>());
            let in_order: Vec<usize> = (0..count).collect();
            let stated = AccumulationOrder::Tree.num_partial_sums(count);
            assert_eq!(sum(&in_order, 1), (expected, stated), "{count}");
            let (found, copies) = sum(&in_order.iter().rev().copied().collect::<Vec<_>>(), 1);
            let one_more = usize::from(!count.is_power_of_two());
            assert_eq!(found, expected, "{count} backward");
            assert!(copies <= stated + one_more, "{copies} copies for {count} backward");
            for step in (1..count).filter(|step| count % step != 0 || *step == 1) {
                let mut order: Vec<usize> = (0..count).map(|at| at * step % count).collect();
                if (0..count).all(|at| order.contains(&at)) {
                    assert_eq!(sum(&order, 1).0, expected, "{order:?}");
                    // Each comes again after all have come once.
                    order.extend(0..count);
                    assert_eq!(sum(&order, 2).0, expected, "{order:?} twice");
                }
            }
        }
        // With these numbers, another order would give another result.
        let running = (0..16).map(number).sum::<f32>();
        assert_ne!(running, tree(&(0..16).map(number).collect::<Vec<_>>()));
    }
}
