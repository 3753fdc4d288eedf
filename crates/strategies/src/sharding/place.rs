//! Who owns which elements: even shards of each unit, or whole parameters.

use std::ops::Range;

use paceline_collectives::{Axis, MeshShape};
use paceline_model::{Layout, Param, ParamId, UnitId};

use crate::Replica;

/// A rank's place among the ranks that divide the units of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardPlace {
    pub(crate) index: usize,
    pub(crate) count: usize,
}

impl ShardPlace {
    /// The place of a rank of a mesh: along the axis `shard`, or among all ranks if there is no such axis.
    pub(crate) fn new(mesh: &MeshShape, rank: usize) -> Self {
        if mesh.axes().iter().any(|(axis, _)| *axis == Axis::Shard) {
            Self { index: mesh.coordinate(Axis::Shard, rank), count: mesh.size(Axis::Shard) }
        } else {
            Self { index: rank, count: mesh.num_ranks().unwrap_or(1) }
        }
    }

    pub(crate) fn of(replica: &Replica) -> Self {
        Self::new(replica.mesh.shape(), replica.group.rank())
    }

    /// This rank's part of a unit. All parts have the same length, since the layout pads units.
    pub(crate) fn shard(&self, unit: &Range<usize>) -> Range<usize> {
        let len = unit.len() / self.count;
        let start = unit.start + self.index * len;
        start..start + len
    }

    /// This rank's part of every unit, or only of every trained unit, in the order of storage.
    pub(crate) fn shards(&self, layout: &Layout, only_trained: bool) -> Vec<Range<usize>> {
        let units = layout.units().iter().filter(|unit| !(only_trained && unit.is_frozen));
        let shards = units.map(|unit| self.shard(&unit.range)).filter(|shard| !shard.is_empty());
        in_order(shards.collect())
    }

    /// The owner of a parameter, where ranks own whole parameters: each rank owns as many as the others, in order of
    /// registration, and the last rank the rest. So ranks may own very different numbers of elements.
    pub(crate) fn owner(&self, layout: &Layout, id: ParamId) -> usize {
        id.0 / layout.params().len().div_ceil(self.count)
    }

    /// The parameters that this rank owns as a whole, or only the trained ones, in the order of storage.
    pub(crate) fn params(&self, layout: &Layout, only_trained: bool) -> Vec<Range<usize>> {
        let all = layout.params().iter().enumerate();
        let is_own = |(at, param): &(usize, &Param)| {
            self.owner(layout, ParamId(*at)) == self.index && !(only_trained && param.is_frozen)
        };
        in_order(all.filter(is_own).map(|(_, param)| param.range()).collect())
    }
}

/// Ranges that do not overlap, in order.
fn in_order(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges
}

pub(crate) fn num_elems(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// The elements of a unit that belong to no parameter, counted from the beginning of the unit.
pub(crate) fn padding(layout: &Layout, unit: UnitId) -> Vec<Range<usize>> {
    let whole = &layout.unit(unit).range;
    let mut gaps = Vec::new();
    let mut end = whole.start;
    for param in layout.params().iter().filter(|param| param.unit == unit) {
        gaps.push(end - whole.start..param.start - whole.start);
        end = param.range().end;
    }
    gaps.push(end - whole.start..whole.len());
    gaps.retain(|gap| !gap.is_empty());
    gaps
}

#[cfg(test)]
mod tests {
    use paceline_model::{Init, LayoutBuilder};

    use super::*;

    fn layout(world_size: usize) -> Layout {
        let mut builder = LayoutBuilder::new();
        for (unit, sizes) in [("a", [30, 3]), ("b", [500, 1]), ("c", [7, 7])] {
            let mut unit = builder.unit(unit);
            for size in sizes {
                unit.param("p", [size], Init::Constant(1.0));
            }
        }
        builder.finish(world_size)
    }

    /// Each element of storage belongs to exactly one rank.
    fn check_cover(parts: Vec<Vec<Range<usize>>>, of: &[Range<usize>]) {
        let mut all: Vec<usize> = parts.into_iter().flatten().flatten().collect();
        all.sort_unstable();
        let expected: Vec<usize> = of.iter().cloned().flatten().collect();
        assert_eq!(all, expected);
    }

    #[test]
    fn shards_cover_everything_once_and_evenly() {
        for count in 1..6 {
            let layout = layout(count).with_frozen(&["a".into()]).unwrap();
            let place = |index| ShardPlace { index, count };
            let shards = |only: bool| {
                (0..count).map(|index| place(index).shards(&layout, only)).collect::<Vec<_>>()
            };
            check_cover(shards(false), std::slice::from_ref(&(0..layout.len())));
            check_cover(shards(true), std::slice::from_ref(&(0..layout.trained_len())));
            let lens: Vec<usize> = shards(false).iter().map(|own| num_elems(own)).collect();
            assert!(lens.iter().all(|len| *len == lens[0]), "{lens:?}");
            let aligned = |range: &Range<usize>| {
                range.start.is_multiple_of(16) && range.end.is_multiple_of(16)
            };
            assert!(shards(false).iter().flatten().all(aligned));
        }
    }

    #[test]
    fn whole_parameters_cover_everything_once() {
        for count in 1..8 {
            let layout = layout(count);
            let owned = (0..count).map(|index| ShardPlace { index, count }.params(&layout, true));
            let all: Vec<_> = layout.params().iter().map(Param::range).collect();
            check_cover(owned.collect(), &all);
        }
        // Six parameters on four ranks: two each, and the last rank has none.
        let layout = layout(4);
        let place = ShardPlace { index: 0, count: 4 };
        let owners: Vec<_> = (0..6).map(|id| place.owner(&layout, ParamId(id))).collect();
        assert_eq!(owners, [0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn a_mesh_shards_along_its_axis() {
        let shape: MeshShape = "dp=2,shard=3".parse().unwrap();
        assert_eq!(ShardPlace::new(&shape, 4), ShardPlace { index: 1, count: 3 });
        assert_eq!(ShardPlace::new(&MeshShape::replicas(5), 4), ShardPlace { index: 4, count: 5 });
    }

    #[test]
    fn padding_lies_between_and_after_the_parameters() {
        let layout = layout(2);
        // 30 elements, padded to 32, 3 elements, padded to 64.
        assert_eq!(padding(&layout, UnitId(0)), [30..32, 35..64]);
    }
}
