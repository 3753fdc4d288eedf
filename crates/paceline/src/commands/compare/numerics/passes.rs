//! Two run folders with digests of each pass, which `train --watch-passes` has kept.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use paceline_failure::Result;
use paceline_model::Difference;
use paceline_observe::views::passes::{FILE_NAME, read};
use paceline_run::agreement::in_ranges;
use paceline_strategies::{Digested, Phase};

use super::steps::{Steps, paired, unreadable};
use super::{Moment, Moments, PairOutcome, TensorPair};

/// The most further micro-batches that are named.
const MOST_OTHERS: usize = 7;

/// A tensor as the ranks of a run have it, each the whole or a part.
type Held = Vec<(usize, Digested)>;

/// The moments of each step that both runs have made: the phases of each micro-batch, then those of the step.
pub(super) fn moments(places: [&Path; 2]) -> Result<Moments<'_>> {
    let open = |place| -> Result<Steps<Vec<Vec<Digested>>>> {
        let steps = read(place).map_err(unreadable(place, FILE_NAME))?;
        Ok(Box::new(steps.map(move |step| step.map_err(unreadable(place, FILE_NAME)))))
    };
    paired(places, [open(places[0])?, open(places[1])?], compare)
}

fn compare(step: u64, runs: [Vec<Vec<Digested>>; 2]) -> Vec<Moment> {
    let mut all: BTreeMap<_, [Held; 2]> = BTreeMap::new();
    let mut with_gradients = [BTreeSet::new(), BTreeSet::new()];
    for (side, ranks) in runs.into_iter().enumerate() {
        let ranks = ranks.into_iter().enumerate();
        for (rank, of) in ranks.flat_map(|(rank, all)| all.into_iter().map(move |of| (rank, of))) {
            let Digested { phase, micro_batch, order, .. } = of;
            if phase == Phase::Gradient {
                with_gradients[side].insert(micro_batch);
            }
            let is_after = !phase.is_of_micro_batch();
            let key = (is_after, micro_batch, phase, order, of.place(step));
            all.entry(key).or_default()[side].push((rank, of));
        }
    }
    // Gradients that are added up in place are those of one micro-batch only once.
    let [a, b] = &with_gradients;
    all.retain(|(_, at, phase, ..), _| {
        *phase != Phase::Gradient || a.contains(at) == b.contains(at)
    });
    let mut moments: Vec<Moment> = Vec::new();
    for ((is_after, micro_batch, phase, _, place), held) in all {
        let of = if is_after { String::new() } else { format!("micro-batch {micro_batch}, ") };
        let label = format!("step {step}, {of}{}", format!("{phase:?}").to_lowercase());
        if moments.last().is_none_or(|last| last.label != label) {
            moments.push(Moment { label, tensors: Vec::new() });
        }
        let pair = pair(place, &held);
        moments.iter_mut().next_back().expect("there is one").tensors.push(pair);
    }
    name_others(&mut moments);
    moments
}

/// Adds the ranks of the other micro-batches in which the first tensor that differs does so too.
fn name_others(moments: &mut [Moment]) {
    let differing = |moment: &Moment| moment.tensors.iter().position(TensorPair::differs);
    let Some((at, first)) =
        moments.iter().enumerate().find_map(|(at, of)| Some((at, differing(of)?)))
    else {
        return;
    };
    let (name, label) = (moments[at].tensors[first].name.clone(), moments[at].label.clone());
    let phase = label.rsplit(", ").next().unwrap_or_default();
    let others = moments[at + 1..].iter().filter(|of| of.label.ends_with(phase));
    let rank = |of: &Moment| {
        let found = |of: &&TensorPair| of.name == name && !of.rank.is_empty();
        let pair = of.tensors.iter().find(found)?;
        Some(format!("; {}: {}", of.label.split(", ").nth(1)?, pair.rank))
    };
    let ranks: Vec<String> = others.filter_map(rank).take(MOST_OTHERS).collect();
    moments[at].tensors[first].rank += &ranks.concat();
}

fn pair(place: String, [a, b]: &[Held; 2]) -> TensorPair {
    let name = a.iter().chain(b).map(|(_, of)| of.name.clone()).next().unwrap_or_default();
    let plain = |outcome| TensorPair { name: name.clone(), rank: String::new(), outcome };
    let (Some((_, first)), Some((_, other))) = (a.first(), b.first()) else {
        let side = if b.is_empty() { "A" } else { "B" };
        return plain(PairOutcome::Other(format!("it is in {side} only")));
    };
    if first.shape != other.shape {
        let words = format!("it is {:?} in A and {:?} in B", first.shape, other.shape);
        return plain(PairOutcome::Other(words));
    }
    if whole(a).is_some() && whole(a) == whole(b) {
        return plain(PairOutcome::Same);
    }
    let bytes = assembled(a, None);
    let differing = |(_, of): &&(usize, Digested)| match bytes.as_deref() {
        Some(whole) => within(whole, of) != Some(&*of.values.1),
        None => !a.iter().any(|(_, own)| own.part == of.part && own.digest == of.digest),
    };
    let differing: Held = b.iter().filter(differing).cloned().collect();
    let found = bytes.zip(assembled(b, Some(&differing)));
    let found =
        found.and_then(|(a, b)| Difference::between(&first.values.0, &first.shape, [&a, &b]));
    let outcome = match found {
        Some(found) => PairOutcome::Differs(found),
        None => PairOutcome::Digests(Some(place)),
    };
    // If all of B is as the first of A, the ranks of A differ.
    let of_b = if differing.is_empty() { b } else { &differing };
    TensorPair { name, rank: format!("{} in A, {} in B", ranks(a), ranks(of_b)), outcome }
}

/// The digest of the whole tensor; `None` if ranks disagree about a part.
fn whole(held: &Held) -> Option<[u64; 2]> {
    let mut parts: BTreeMap<[usize; 2], [u64; 2]> = BTreeMap::new();
    for (_, Digested { part, digest, .. }) in held {
        if parts.entry([part.start, part.end]).or_insert(*digest) != digest {
            return None;
        }
    }
    let add = |sum: [u64; 2], of: &[u64; 2]| [0, 1].map(|at| sum[at].wrapping_add(of[at]));
    Some(parts.values().fold([0; 2], add))
}

/// The bytes of a part within those of the whole tensor.
fn bytes_of(of: &Digested) -> Option<Range<usize>> {
    let size = of.values.1.len().checked_div(of.part.len())?;
    Some(of.part.start.checked_mul(size)?..of.part.end.checked_mul(size)?)
}

fn within<'a>(whole: &'a [u8], of: &Digested) -> Option<&'a [u8]> {
    whole.get(bytes_of(of)?)
}

/// The bytes of the whole tensor, if they were kept: those of the lowest rank, but rather those of `first`.
fn assembled(held: &Held, first: Option<&Held>) -> Option<Vec<u8>> {
    let mut whole: Vec<u8> = Vec::new();
    for (_, of) in held.iter().rev().chain(first.into_iter().flatten().rev()) {
        let range =
            bytes_of(of).filter(|range| range.len() == of.values.1.len() && !range.is_empty())?;
        // A stranger's file does not decide about memory.
        let sum: usize = held.iter().map(|(_, of)| of.values.1.len()).sum();
        whole.resize(whole.len().max(range.end.min(sum)), 0);
        whole.get_mut(range)?.copy_from_slice(&of.values.1);
    }
    Some(whole)
}

/// As in `rank 1 (as its micro-batch 0)`.
fn ranks(held: &Held) -> String {
    let ranks: BTreeSet<usize> = held.iter().map(|(rank, _)| *rank).collect();
    let ranks: Vec<usize> = ranks.into_iter().collect();
    let other = held.iter().find(|(_, of)| of.own != of.micro_batch);
    let own = other.map(|(_, of)| format!(" (as its micro-batch {})", of.own)).unwrap_or_default();
    format!("rank{} {}{own}", if ranks.len() == 1 { "" } else { "s" }, in_ranges(&ranks))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of a vector of four numbers that a rank has, with a digest that is their sum.
    fn held(rank: usize, start: usize, values: &[f32], is_kept: bool) -> (usize, Digested) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        let of = Digested {
            phase: Phase::Weights,
            micro_batch: 0,
            own: 0,
            order: 0,
            name: "w".into(),
            shape: vec![4],
            part: start..start + values.len(),
            digest: [values.iter().sum::<f32>() as u64, 0],
            values: ("F32".into(), if is_kept { bytes.collect() } else { Vec::new() }),
        };
        (rank, of)
    }

    fn said(a: Held, b: Held) -> (String, String) {
        let TensorPair { rank, outcome, .. } = pair("1:0:weights:w".into(), &[a, b]);
        let words = match outcome {
            PairOutcome::Same => "same".into(),
            PairOutcome::Differs(of) => format!("{:?} {:?}", of.first, of.values),
            PairOutcome::Digests(place) => place.unwrap_or_default(),
            PairOutcome::Other(words) => words,
        };
        (rank, words)
    }

    #[test]
    fn parts_add_up_and_ranks_that_differ_are_named() {
        let whole = |values: [f32; 4], is_kept| vec![held(0, 0, &values, is_kept)];
        let parts = |low: [f32; 2], high: [f32; 2], is_kept| {
            let part = |rank, start, values: [f32; 2]| held(rank, start, &values, is_kept);
            vec![part(0, 0, [1.0, 2.0]), part(1, 2, [3.0, 4.0]), part(2, 0, low), part(3, 2, high)]
        };
        let a = [1.0, 2.0, 3.0, 4.0];
        for is_kept in [false, true] {
            let same = said(whole(a, is_kept), parts([1.0, 2.0], [3.0, 4.0], is_kept));
            assert_eq!(same, (String::new(), "same".into()));
        }
        let replica = said(whole(a, true), parts([1.0, 2.0], [3.0, 8.0], true));
        let values = "[3] [\"4.0\", \"8.0\"]";
        assert_eq!(replica, ("rank 0 in A, rank 3 in B".into(), values.into()));
        // Without values, no part of B is one of A.
        let digests = said(whole(a, false), parts([1.0, 2.0], [3.0, 8.0], false));
        assert_eq!(digests, ("rank 0 in A, ranks 0-3 in B".into(), "1:0:weights:w".into()));
        let own = said(parts([5.0, 2.0], [3.0, 4.0], true), whole(a, true));
        assert_eq!(own.0, "ranks 0-3 in A, rank 0 in B");
        let only = said(whole(a, true), Vec::new());
        assert_eq!(only.1, "it is in A only");
    }
}
