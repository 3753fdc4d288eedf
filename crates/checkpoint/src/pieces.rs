//! Which elements each rank writes, and under which names.
//!
//! Exactly one owner writes each element. Ranks that own the same elements divide them evenly, so replicas together
//! write one copy.

use std::collections::BTreeMap;
use std::ops::Range;

use paceline_failure::Result;
use paceline_memory::Tensor;
use paceline_model::{BufferId, Layout, Optimizer, Owned, ParamId, Storage, UnitId};

/// Divided ranges begin at multiples of this many elements, as owned ranges do.
const ALIGN_ELEMS: usize = 16;

/// A range of the elements of one tensor, in memory.
#[derive(Debug)]
pub struct Piece {
    /// The name of the tensor.
    pub name: String,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The first element, counted within the tensor without padding.
    pub start: usize,
    /// The elements.
    pub data: Tensor,
}

/// Ranges of flat storage, by their contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    /// Values.
    pub values: Vec<Range<usize>>,
    /// Optimizer state.
    pub state: Vec<Range<usize>>,
}

impl Ranges {
    /// Everything, as in a replica.
    pub fn everything(layout: &Layout) -> Self {
        let (all, trained) = (0..layout.len(), 0..layout.trained_len());
        Self { values: vec![all], state: vec![trained] }
    }

    /// The same without elements that others write.
    pub fn without(self, others: &[Range<usize>]) -> Self {
        let cut = |all: Vec<Range<usize>>| {
            others.iter().fold(all, |left, other| {
                let rest = left.into_iter().flat_map(|Range { start, end }| {
                    [start..other.start.clamp(start, end), other.end.clamp(start, end)..end]
                });
                rest.filter(|range| !range.is_empty()).collect()
            })
        };
        Self { values: cut(self.values), state: cut(self.state) }
    }
}

impl From<&Owned> for Ranges {
    fn from(owned: &Owned) -> Self {
        Self { values: owned.values.clone(), state: owned.state.clone() }
    }
}

/// The part that rank `own` writes if the ranks own these ranges.
pub fn share(owned: &[Ranges], own: usize) -> Ranges {
    let of = |part: fn(&Ranges) -> &Vec<Range<usize>>| {
        let ranges: Vec<&[Range<usize>]> = owned.iter().map(|ranges| &part(ranges)[..]).collect();
        divide(&ranges, own)
    };
    Ranges { values: of(|ranges| &ranges.values), state: of(|ranges| &ranges.state) }
}

/// Divides shared elements evenly among their owners. Returns the ranges of rank `own`, in order.
fn divide(owned: &[&[Range<usize>]], own: usize) -> Vec<Range<usize>> {
    let mut bounds: Vec<usize> =
        owned.iter().flat_map(|ranges| ranges.iter()).flat_map(|r| [r.start, r.end]).collect();
    bounds.sort_unstable();
    bounds.dedup();
    // Elements between two bounds have the same owners; all with the same owners are divided together.
    let mut by_owners: BTreeMap<Vec<usize>, Vec<Range<usize>>> = BTreeMap::new();
    for pair in bounds.windows(2) {
        let has = |ranges: &&[Range<usize>]| {
            ranges.iter().any(|range| range.start <= pair[0] && pair[1] <= range.end)
        };
        let owners: Vec<usize> =
            owned.iter().enumerate().filter(|(_, ranges)| has(ranges)).map(|(at, _)| at).collect();
        if owners.contains(&own) {
            by_owners.entry(owners).or_default().push(pair[0]..pair[1]);
        }
    }
    let mut shares: Vec<Range<usize>> = by_owners
        .into_iter()
        .flat_map(|(owners, ranges)| {
            let total: usize = ranges.iter().map(Range::len).sum();
            let place = owners.iter().position(|owner| *owner == own).unwrap_or(0);
            let cut = |place: usize| {
                let at = (total as u128 * place as u128 / owners.len() as u128) as usize;
                if place == owners.len() { total } else { at / ALIGN_ELEMS * ALIGN_ELEMS }
            };
            part_of(&ranges, cut(place)..cut(place + 1))
        })
        .collect();
    shares.sort_unstable_by_key(|range| range.start);
    shares
}

/// This part of the concatenated ranges.
fn part_of(ranges: &[Range<usize>], part: Range<usize>) -> Vec<Range<usize>> {
    let mut before = 0;
    let mut parts = Vec::new();
    for range in ranges {
        let clip = |at: usize| range.start + at.clamp(before, before + range.len()) - before;
        let clipped = clip(part.start)..clip(part.end);
        before += range.len();
        if !clipped.is_empty() {
            parts.push(clipped);
        }
    }
    parts
}

/// The parameters that lie in a range of flat storage, each with its elements in flat storage.
pub fn params_in(
    layout: &Layout,
    range: &Range<usize>,
) -> impl Iterator<Item = (ParamId, Range<usize>)> {
    let all = layout.params().iter().enumerate();
    all.filter_map(move |(at, param)| {
        let own = param.range();
        let common = own.start.max(range.start)..own.end.min(range.end);
        (!common.is_empty()).then_some((ParamId(at), common))
    })
}

/// The pieces of values and optimizer state in these ranges, with names that begin with `prefix`.
pub fn of_ranges(
    prefix: &str,
    ranges: &Ranges,
    storage: &Storage,
    optimizer: &Optimizer,
) -> Result<Vec<Piece>> {
    let layout = storage.layout();
    let mut pieces = Vec::new();
    // A part of a parameter may be many runs of elements of the whole.
    let mut add = |kind: &str, id: ParamId, range: &Range<usize>, data: Tensor| -> Result<()> {
        let param = layout.param(id);
        let (name, shape) = (format!("{prefix}{kind}.{}", param.name), param.whole_shape());
        let own = range.start - param.start..range.end - param.start;
        for (run, start) in param.in_whole(own.clone()) {
            let data = data.slice(run.start - own.start..run.end - own.start)?;
            let (name, shape) = (name.clone(), shape.dims().to_vec());
            pieces.push(Piece { name, shape, start, data });
        }
        Ok(())
    };
    for (id, range) in ranges.values.iter().flat_map(|range| params_in(layout, range)) {
        let data = storage.values().slice(range.clone())?;
        add("model", id, &range, data)?;
    }
    for (id, range) in ranges.state.iter().flat_map(|range| params_in(layout, range)) {
        for (state, data) in optimizer.state_of(range.clone())? {
            add(&format!("optimizer.{state}"), id, &range, data)?;
        }
    }
    Ok(pieces)
}

/// The running statistics of the units that this rank writes.
pub fn of_buffers(storage: &Storage, counts_unit: impl Fn(UnitId) -> bool) -> Result<Vec<Piece>> {
    let layout = storage.layout();
    let buffers = layout.buffers().iter().enumerate();
    buffers
        .filter(|(_, buffer)| buffer.shape.num_elems() > 0)
        .filter(|(_, buffer)| counts_unit(buffer.unit))
        .map(|(at, buffer)| {
            let data = storage.buffer(BufferId(at))?;
            let (name, shape) = (format!("model.{}", buffer.name), data.dims().to_vec());
            Ok(Piece { name, shape, start: 0, data })
        })
        .collect()
}

/// Tensors that one rank keeps for its strategy.
pub fn of_strategy(rank: usize, state: Vec<(String, Tensor)>) -> Vec<Piece> {
    let piece = |(name, data): (String, Tensor)| {
        let (name, shape) = (format!("{}{name}", strategy_prefix(rank)), data.dims().to_vec());
        Piece { name, shape, start: 0, data }
    };
    let with_elems = state.into_iter().filter(|(_, data)| data.num_elems() > 0);
    with_elems.map(piece).collect()
}

/// The prefix of the names of tensors that only one rank needs.
pub fn strategy_prefix(rank: usize) -> String {
    format!("strategy.{rank}.")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that exactly one owner writes each element. Returns how many elements each rank writes.
    fn check(owned: &[&[Range<usize>]]) -> Vec<usize> {
        let shares: Vec<_> = (0..owned.len()).map(|rank| divide(owned, rank)).collect();
        let end = owned.iter().flat_map(|ranges| ranges.iter()).map(|range| range.end).max();
        for at in 0..end.unwrap_or(0) {
            let of = |ranges: &[Range<usize>]| ranges.iter().filter(|r| r.contains(&at)).count();
            let is_owned = owned.iter().any(|ranges| of(ranges) > 0);
            let writers: Vec<usize> =
                (0..owned.len()).filter(|rank| of(&shares[*rank]) > 0).collect();
            assert_eq!(writers.len(), usize::from(is_owned), "element {at}: {shares:?}");
            assert!(writers.iter().all(|rank| of(owned[*rank]) > 0), "element {at}: {shares:?}");
        }
        shares.iter().map(|ranges| ranges.iter().map(Range::len).sum()).collect()
    }

    #[test]
    fn every_element_is_written_by_one_of_its_owners() {
        // One range each.
        let one = |ranges: &[Range<usize>]| {
            let lists: Vec<Vec<Range<usize>>> = ranges.iter().map(|r| vec![r.clone()]).collect();
            check(&lists.iter().map(Vec::as_slice).collect::<Vec<_>>())
        };
        let all = || 0..640;
        assert_eq!(one(&[all()]), [640]);
        assert_eq!(one(&[all(), all(), all(), all()]), [160; 4]);
        assert_eq!(one(&[0..320, 320..640]), [320; 2]);
        // Two replicas of two shards, and of uneven ones.
        assert_eq!(one(&[0..320, 320..640, 0..320, 320..640]), [160; 4]);
        assert_eq!(
            check(&[&[0..16, 32..48], &[16..24, 24..32], &[0..16, 32..48], &[16..24, 24..32]]),
            [16, 0, 16, 16]
        );
        // A rank that owns nothing, ranks that own a part in common, and fewer elements than ranks.
        assert_eq!(check(&[&[], &[0..320, 320..640]]), [0, 640]);
        assert_eq!(
            check(&[&[0..160, 160..320], &[160..320, 320..640], &[]]).iter().sum::<usize>(),
            640
        );
        assert_eq!(one(&[0..5, 0..5, 0..5]).iter().sum::<usize>(), 5);
    }

    #[test]
    fn what_others_write_is_left_out() {
        let whole = || Ranges { values: vec![0..10, 20..40], state: vec![0..4, 4..10] };
        let without = |others: &[Range<usize>]| {
            let Ranges { values, state } = whole().without(others);
            (values, state)
        };
        assert_eq!(without(&[]), (vec![0..10, 20..40], vec![0..4, 4..10]));
        assert_eq!(without(&[10..20, 50..60]), without(&[]));
        assert_eq!(without(&[4..24, 30..30]).0, [0..4, 24..30, 30..40]);
        assert_eq!(without(&[2..4, 6..8, 0..1]).1, [1..2, 4..6, 8..10]);
        assert_eq!(without(&[0..20, 20..40]), (vec![], vec![]));
    }

    #[test]
    fn ranges_of_several_ranges_are_cut_at_their_bounds() {
        let ranges = [10..20, 30..35, 50..60];
        assert_eq!(part_of(&ranges, 0..25), ranges);
        assert_eq!(part_of(&ranges, 5..16), [15..20, 30..35, 50..51]);
        assert!(part_of(&ranges, 10..10).is_empty());
    }
}
