//! Memory for open units: units that are never open together share it.

use std::ops::Range;

use paceline_memory::{Category, DType, Tensor};
use paceline_model::{Layout, UnitId};

use crate::{Replica, Result};

/// Memory for the units that are open, at their places in an arena.
#[derive(Debug)]
pub(crate) struct UnitMemory {
    pub(crate) arena: UnitArena,
    memory: Tensor,
}

impl UnitMemory {
    /// Allocates the memory on every rank.
    pub(crate) fn new(replica: &Replica, arena: UnitArena, dtype: DType) -> Result<Self> {
        let memory = unsharded(replica, dtype, arena.len())?;
        Ok(Self { arena, memory })
    }

    pub(crate) fn of(&self, unit: UnitId) -> Result<Tensor> {
        Ok(self.memory.slice(self.arena.place(unit))?)
    }

    /// Fills the memory of a unit with not-a-number, in builds with debug assertions: its contents are no longer needed.
    pub(crate) fn free(&self, unit: UnitId) -> Result<()> {
        if cfg!(debug_assertions) {
            self.of(unit)?.fill_bytes(0xFF)?;
        }
        Ok(())
    }
}

/// Allocates a flat tensor for parts of open units, in which peers can read and write. Every rank calls this.
pub(crate) fn unsharded(replica: &Replica, dtype: DType, len: usize) -> Result<Tensor> {
    let bytes = len * dtype.size_bytes();
    let memory = replica.mesh.allocate(&replica.compute.allocator, bytes, Category::Unsharded)?;
    Ok(Tensor::new(memory, 0, dtype, [len])?)
}

/// Where each unit lies in an arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitArena {
    /// By the number of the unit, in elements. Empty for units that have no place.
    places: Vec<Range<usize>>,
    /// Elements of the arena.
    len: usize,
}

impl UnitArena {
    /// Places units that are used in the order of `sequence`. Units that are at most `distance` uses apart can be open
    /// at the same time, and so can any two of the last `kept` units. `apart` are always open.
    ///
    /// The largest unit is placed first, and each of the others at the first gap beside the units with which it can be open
    /// ("greedy by size": Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference, 2020).
    pub(crate) fn plan(
        layout: &Layout,
        sequence: &[UnitId],
        apart: &[UnitId],
        distance: usize,
        kept: usize,
    ) -> Self {
        let len = |unit: UnitId| layout.unit(unit).range.len();
        let is_kept = |at: usize| at + kept >= sequence.len();
        let together = |a: usize, b: usize| a.abs_diff(b) <= distance || is_kept(a) && is_kept(b);
        let mut places = vec![0..0; layout.units().len()];
        let mut by_size: Vec<usize> = (0..sequence.len()).collect();
        by_size.sort_by_key(|at| std::cmp::Reverse(len(sequence[*at])));
        let mut placed: Vec<usize> = Vec::new();
        for at in by_size {
            let mut taken: Vec<Range<usize>> = placed
                .iter()
                .filter(|other| together(at, **other))
                .map(|other| places[sequence[*other].0].clone())
                .collect();
            taken.sort_unstable_by_key(|range| range.start);
            let mut start = 0;
            for range in taken {
                if start + len(sequence[at]) <= range.start {
                    break;
                }
                start = start.max(range.end);
            }
            places[sequence[at].0] = start..start + len(sequence[at]);
            placed.push(at);
        }
        let mut end = places.iter().map(|place| place.end).max().unwrap_or(0);
        for unit in apart {
            places[unit.0] = end..end + len(*unit);
            end += len(*unit);
        }
        Self { places, len: end }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn place(&self, unit: UnitId) -> Range<usize> {
        self.places[unit.0].clone()
    }

    /// The other units whose places overlap that of `unit`.
    pub(crate) fn neighbors(&self, unit: UnitId) -> impl Iterator<Item = UnitId> {
        let own = self.place(unit);
        let all = (0..self.places.len()).map(UnitId).filter(move |other| *other != unit);
        all.filter(move |other| {
            let other = &self.places[other.0];
            other.start < own.end && own.start < other.end
        })
    }
}

#[cfg(test)]
mod tests {
    use paceline_model::{Init, LayoutBuilder};

    use super::*;

    fn layout(sizes: &[usize]) -> Layout {
        let mut builder = LayoutBuilder::new();
        for size in sizes {
            builder.unit("u").param("p", [*size], Init::Constant(1.0));
        }
        builder.finish(1)
    }

    fn units(count: usize) -> Vec<UnitId> {
        (0..count).map(UnitId).collect()
    }

    #[test]
    fn units_that_are_open_together_lie_apart_and_the_others_share() {
        let sizes = [64, 16, 160, 16, 48, 32, 16];
        let layout = layout(&sizes);
        let all = units(sizes.len());
        for distance in 0..4 {
            for kept in 0..4 {
                let arena = UnitArena::plan(&layout, &all, &[], distance, kept);
                for (at, unit) in all.iter().enumerate() {
                    for other in arena.neighbors(*unit) {
                        let is_apart = at.abs_diff(other.0) > distance;
                        let both_kept = at.min(other.0) + kept >= sizes.len();
                        assert!(is_apart && !both_kept, "{unit:?} and {other:?}");
                    }
                }
            }
        }
        // Two neighbors at a time: the largest pair is 160 and 16 elements.
        assert_eq!(UnitArena::plan(&layout, &all, &[], 1, 1).len(), 176);
        assert_eq!(UnitArena::plan(&layout, &all, &[], 0, 1).len(), 160);
        assert_eq!(UnitArena::plan(&layout, &all, &[], 6, 1).len(), sizes.iter().sum::<usize>());
    }

    #[test]
    fn units_that_stay_open_lie_apart_from_all() {
        let layout = layout(&[64, 16, 32]);
        let arena = UnitArena::plan(&layout, &[UnitId(0), UnitId(2)], &[UnitId(1)], 0, 0);
        assert_eq!((arena.len(), arena.place(UnitId(1))), (80, 64..80));
        assert!(arena.neighbors(UnitId(1)).next().is_none());
    }
}
