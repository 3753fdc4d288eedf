//! Chooses where to cut a model and in which order to run its stages, by rehearsal.
//!
//! Input: what each block takes. Output: the cut with the shortest step. Steps follow each other: a rank that
//! is done with one begins the next, unless something makes all ranks wait.

use std::cmp::Ordering;

use crate::{Action, Costs, Kind, Placement, Plan, PlanError, Schedule, Timeline, cut};

/// The costs of a model's blocks on a rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockCosts {
    /// The forward pass of a micro-batch.
    pub forward: Vec<f64>,
    /// The input half of its backward pass; of the last block also the loss.
    pub backward_input: Vec<f64>,
    /// The weight half.
    pub backward_weight: Vec<f64>,
    /// The memory of a micro-batch from its forward pass to the end of its backward pass, in any unit.
    pub kept: Vec<f64>,
    /// The time of a message between ranks.
    pub message: f64,
    /// Whether all ranks wait for each other at the end of a step, as for the norm of all gradients.
    pub has_barrier: bool,
}

impl BlockCosts {
    /// The costs of stages that begin with the first block and with these.
    pub fn costs(&self, cut: &[usize]) -> Costs {
        Costs {
            forward: sums(&self.forward, cut),
            backward_input: sums(&self.backward_input, cut),
            backward_weight: sums(&self.backward_weight, cut),
            message: self.message,
            side_by_side: None,
        }
    }

    fn each(&self) -> Vec<f64> {
        let halves = self.backward_input.iter().zip(&self.backward_weight);
        self.forward.iter().zip(halves).map(|(f, (i, w))| f + i + w).collect()
    }
}

/// The sum over each stage.
fn sums(of_blocks: &[f64], cut: &[usize]) -> Vec<f64> {
    let begins = std::iter::once(0).chain(cut.iter().copied());
    let ends = cut.iter().copied().chain([of_blocks.len()]);
    begins.zip(ends).map(|(begin, end)| of_blocks[begin..end].iter().sum()).collect()
}

/// A schedule and a cut.
#[derive(Clone)]
pub struct CutChoice {
    /// The schedule.
    pub schedule: &'static dyn Schedule,
    /// The first block of each stage but the first one.
    pub cut: Vec<usize>,
    /// The time from step to step.
    pub step: f64,
    /// The most that a rank keeps of micro-batches in flight, in the unit of [`BlockCosts::kept`].
    pub kept: f64,
    /// The messages between ranks in a step.
    pub messages: usize,
}

impl std::fmt::Debug for CutChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { schedule, cut, step, kept, .. } = self;
        write!(f, "Choice({} cut at {cut:?}: step {step}, kept {kept})", schedule.name())
    }
}

/// How many actions are rehearsed for a choice, at most.
const MAX_ACTIONS: usize = 1 << 20;

impl CutChoice {
    /// The shorter step comes first. Among steps that differ by less than a thousandth, the one that keeps less comes
    /// first, and then the one with fewer messages.
    pub fn by_step(&self, other: &Self) -> Ordering {
        if (self.step - other.step).abs() <= 1e-3 * self.step.max(other.step) {
            self.kept.total_cmp(&other.kept).then(self.messages.cmp(&other.messages))
        } else {
            self.step.total_cmp(&other.step)
        }
    }
}

/// The best cut for a schedule: of all cuts if there are few, and otherwise one that moving a single boundary does not
/// improve. A `fixed` cut is the only one. `None` if there are too few blocks, or if each cut keeps more than `limit`.
///
/// # Errors
///
/// If the schedule does not know such a step.
pub fn best_cut(
    schedule: &'static dyn Schedule,
    ranks: usize,
    micro_batches: usize,
    blocks: &BlockCosts,
    (limit, fixed): (Option<f64>, Option<&[usize]>),
) -> Result<Option<CutChoice>, PlanError> {
    let (num_blocks, stages) = (blocks.forward.len(), schedule.placement(ranks).stages());
    let Some(even) = cut(&blocks.each(), stages) else { return Ok(None) };
    let rehearsed = |cut: Vec<usize>| rehearsed(schedule, ranks, micro_batches, blocks, cut);
    let fits = |choice: &CutChoice| limit.is_none_or(|limit| choice.kept <= limit);
    if let Some(fixed) = fixed {
        let fits_blocks =
            fixed.len() + 1 == stages && fixed.last().is_none_or(|at| *at < num_blocks);
        let only = fits_blocks.then(|| rehearsed(fixed.to_vec())).transpose()?;
        return Ok(only.filter(fits));
    }
    let mut left = MAX_ACTIONS / (6 * stages * micro_batches).max(1);
    let mut best = Some(rehearsed(even.clone())?);
    if num_cuts(num_blocks, stages, left).is_some() {
        for cut in all_cuts(num_blocks, stages) {
            let other = rehearsed(cut)?;
            let is_better =
                best.as_ref().is_none_or(|best| !fits(best) || other.by_step(best).is_lt());
            if fits(&other) && is_better {
                best = Some(other);
            }
        }
        return Ok(best.filter(fits));
    }
    let mut current = rehearsed(even)?;
    loop {
        let mut next: Option<CutChoice> = None;
        for cut in neighbors(&current.cut, num_blocks) {
            left = left.saturating_sub(1);
            let other = rehearsed(cut)?;
            let is_better =
                !fits(&current) || other.by_step(next.as_ref().unwrap_or(&current)).is_lt();
            if is_better && (fits(&other) || other.kept < current.kept) {
                next = Some(other);
            }
        }
        match next {
            Some(other) if left > 0 => current = other,
            _ => return Ok(Some(current).filter(fits)),
        }
    }
}

/// The number of cuts of so many blocks, if it is at most `most`.
fn num_cuts(num_blocks: usize, stages: usize, most: usize) -> Option<usize> {
    let (from, take) = (num_blocks - 1, stages - 1);
    let mut count = 1usize;
    for at in 0..take.min(from - take) {
        count = count.checked_mul(from - at)? / (at + 1);
        if count > most {
            return None;
        }
    }
    Some(count)
}

/// All cuts of so many blocks.
fn all_cuts(num_blocks: usize, stages: usize) -> Vec<Vec<usize>> {
    let mut cuts = vec![Vec::new()];
    for stage in 1..stages {
        let left = stages - stage;
        let longer = |cut: Vec<usize>| {
            let first = cut.last().map_or(1, |last| last + 1);
            (first..=num_blocks - left).map(move |at| [cut.as_slice(), &[at]].concat())
        };
        cuts = cuts.into_iter().flat_map(longer).collect();
    }
    cuts
}

/// The cuts in which one boundary is one block further left or right.
fn neighbors(cut: &[usize], num_blocks: usize) -> Vec<Vec<usize>> {
    let mut all = Vec::new();
    for at in 0..cut.len() {
        let low = if at == 0 { 0 } else { cut[at - 1] };
        let high = cut.get(at + 1).copied().unwrap_or(num_blocks);
        for moved in [cut[at] - 1, cut[at] + 1] {
            if low < moved && moved < high {
                let mut other = cut.to_vec();
                other[at] = moved;
                all.push(other);
            }
        }
    }
    all
}

fn rehearsed(
    schedule: &'static dyn Schedule,
    ranks: usize,
    micro_batches: usize,
    blocks: &BlockCosts,
    cut: Vec<usize>,
) -> Result<CutChoice, PlanError> {
    let costs = blocks.costs(&cut);
    let plan = Plan::new(schedule, ranks, micro_batches, |_: &Placement| costs.clone())?;
    let step = step_time(&plan, &costs, blocks.has_barrier)?;
    let kept = plan.kept(&sums(&blocks.kept, &cut)).into_iter().fold(0.0, f64::max);
    let is_sent = |action: &&Action| matches!(action.kind, Kind::SendForward | Kind::SendBackward);
    let sent = |rank| plan.actions(rank).iter().filter(is_sent).count();
    let messages = (0..ranks).map(sent).sum();
    Ok(CutChoice { schedule, cut, step, kept, messages })
}

/// The time from step to step, which overlap unless there is a barrier.
pub(crate) fn step_time(plan: &Plan, costs: &Costs, has_barrier: bool) -> Result<f64, PlanError> {
    let ranks = plan.shape().placement.ranks();
    let mut begin = vec![0.0; ranks];
    let mut last = 0.0;
    // After some steps the distance between them is the same.
    for step in 0..3 {
        let timeline = Timeline::beginning_at(plan, costs, begin.clone())?;
        let took = timeline.makespan - last;
        if has_barrier || step == 2 {
            return Ok(took);
        }
        last = timeline.makespan;
        let ends = timeline.ranks.iter().zip(&begin);
        begin = ends.map(|(own, begin)| own.last().map_or(*begin, |ran| ran.end)).collect();
    }
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OneFOneB, SCHEDULES, ZbH2, Zbv, named};

    fn blocks(each: &[f64]) -> BlockCosts {
        let ones = each.to_vec();
        BlockCosts {
            forward: ones.clone(),
            backward_input: ones.clone(),
            backward_weight: ones,
            kept: vec![1.0; each.len()],
            ..BlockCosts::default()
        }
    }

    #[test]
    fn a_step_without_a_barrier_overlaps_the_next_one() {
        let ranks = 4;
        let plan = Plan::new(&ZbH2, ranks, 8, |of| Costs::even(of, 1.0, 1.0, 1.0)).unwrap();
        let costs = Costs::even(&plan.shape().placement, 1.0, 1.0, 1.0);
        assert_eq!(step_time(&plan, &costs, true), Ok(27.0));
        assert_eq!(step_time(&plan, &costs, false), Ok(24.0));
    }

    #[test]
    fn the_heavy_block_decides_where_the_cut_is() {
        // A V gives the first rank the first and the last stage, so the heavy last block wants little beside it.
        let blocks = blocks(&[1.0, 1.0, 1.0, 1.0, 1.0, 3.0]);
        let line = best_cut(&OneFOneB, 2, 8, &blocks, (None, None)).unwrap().unwrap();
        assert_eq!(line.cut, [4]);
        let v = best_cut(&Zbv, 2, 8, &blocks, (None, None)).unwrap().unwrap();
        let costs = blocks.costs(&v.cut);
        assert_eq!(
            (costs.forward[0] + costs.forward[3], costs.forward[1] + costs.forward[2]),
            (4.0, 4.0)
        );
        assert!(v.step < line.step, "{v:?} {line:?}");
    }

    #[test]
    fn a_limit_of_memory_leaves_schedules_out() {
        let blocks = blocks(&[1.0; 8]);
        let choose = |ranks, limit| {
            let best = |of| best_cut(of, ranks, 16, &blocks, (limit, None)).unwrap();
            SCHEDULES.into_iter().filter_map(best).collect::<Vec<_>>()
        };
        assert_eq!(choose(4, None).len(), SCHEDULES.len());
        let some = choose(4, Some(8.0));
        assert!(some.iter().all(|choice| choice.kept <= 8.0), "{some:?}");
        assert!(!some.is_empty() && some.len() < SCHEDULES.len(), "{some:?}");
        assert!(choose(4, Some(0.5)).is_empty());
        assert!(choose(9, None).is_empty());
    }

    #[test]
    fn fewer_messages_decide_between_steps_and_memory_that_are_equal() {
        let (forward, mut input, weight) = (vec![2.5; 8], vec![4.0; 8], vec![2.0; 8]);
        // The first block has no gradient to pass on.
        input[0] = 0.0;
        let (backward_input, backward_weight, kept) = (input, weight, vec![1.0; 8]);
        let others = BlockCosts::default();
        let blocks = BlockCosts { forward, backward_input, backward_weight, kept, ..others };
        let choice =
            |name| best_cut(named(name).unwrap(), 4, 16, &blocks, (None, None)).unwrap().unwrap();
        let (zbv, interleaved) = (choice("zbv"), choice("interleaved_zb"));
        assert_eq!(zbv.kept, interleaved.kept);
        // The turn of a V is no message.
        assert_eq!((zbv.messages, interleaved.messages), (2 * 6 * 16, 2 * 7 * 16));
        assert!((zbv.step - interleaved.step).abs() < 1e-3 * zbv.step, "{zbv:?} {interleaved:?}");
        assert!(zbv.by_step(&interleaved).is_lt() && interleaved.by_step(&zbv).is_gt());
    }

    #[test]
    fn many_blocks_are_cut_by_moving_boundaries() {
        let each: Vec<f64> = (0..200).map(|at| 1.0 + (at % 7) as f64).collect();
        assert_eq!(num_cuts(200, 8, 1 << 16), None);
        let blocks = blocks(&each);
        let found = best_cut(&OneFOneB, 8, 16, &blocks, (None, None)).unwrap().unwrap();
        let even = rehearsed(&OneFOneB, 8, 16, &blocks, cut(&each, 8).unwrap()).unwrap();
        assert!(found.step <= even.step, "{found:?} {even:?}");
    }

    #[test]
    fn all_cuts_are_counted() {
        for (num_blocks, stages) in [(6, 1), (6, 2), (6, 4), (6, 6), (9, 3)] {
            let all = all_cuts(num_blocks, stages);
            assert_eq!(num_cuts(num_blocks, stages, 1000), Some(all.len()));
            assert!(
                all.iter().all(|cut| cut.is_sorted_by(|a, b| a < b) && cut.len() == stages - 1)
            );
        }
    }
}
