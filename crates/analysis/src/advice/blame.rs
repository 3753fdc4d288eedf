//! Whether a rank holds up the others, and in which words that is said.
//!
//! Input: for how long each rank waited in each step, or the critical path of the steps. Output: sentences. A rank is to
//! blame for waiting if it is the last one in nearly all steps. On a critical path, the gain of the steps decides: a
//! rank that is later than the others is compared with the transfer of data.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::Means;
use super::gain::{Gain, best};
use super::observed::{Observed, Seen};
use crate::ranks::{CriticalPath, RankShare, StepPath};

/// The percentage of the steps in which a rank has to be the last one to be blamed.
pub const BLAMED_PCT: f64 = 80.0;
/// A cause on the critical path that gains less, in percent of it, is not named.
const LEAST_PCT: f64 = 1.0;

/// The rank that the others waited for most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slowest {
    /// Its number.
    pub rank: usize,
    /// The percentage of the steps in which it waited least of all.
    pub steps_pct: f64,
    /// How long it made another rank wait per step, exposed: mean over the other ranks, in milliseconds.
    pub cost_ms: f64,
}

impl Slowest {
    /// The rank that made the others wait most. `steps` has for each step how long each rank waited, exposed, in
    /// nanoseconds. The rank that waited least is the last one to arrive. It cost each other rank the difference between the
    /// other rank's waiting and its own. In a step in which all ranks waited equally long, no rank was the last.
    pub fn of(steps: impl IntoIterator<Item = Vec<u64>>) -> Option<Self> {
        // For each rank: the time that it cost the others, and the number of steps in which it was the last.
        let mut ranks: Vec<(u64, u64)> = Vec::new();
        let mut num_steps = 0.0;
        for step in steps {
            num_steps += 1.0;
            ranks.resize(step.len(), (0, 0));
            let (rank, least) = step.iter().enumerate().min_by_key(|(_, waited)| **waited)?;
            let more = step.iter().map(|waited| waited - least).sum::<u64>();
            let (cost, count) = &mut ranks[rank];
            *cost += more;
            *count += u64::from(more > 0);
        }
        let (rank, (cost, count)) = ranks.iter().enumerate().max_by_key(|(_, (cost, _))| *cost)?;
        let others = ranks.len() as f64 - 1.0;
        (*cost > 0).then(|| Self {
            rank,
            steps_pct: 100.0 * *count as f64 / num_steps,
            cost_ms: *cost as f64 / others / num_steps / 1e6,
        })
    }
}

/// The sentences for steps that mostly wait, the last one without full stop.
pub(super) fn waiting(means: &Means, slowest: Option<Slowest>, observed: &Observed) -> String {
    let look = "look at what else runs on its cores, and at its share of the data";
    let Some(Slowest { rank, steps_pct, .. }) = slowest else {
        return "Look for what else uses the cores".to_owned();
    };
    if steps_pct < BLAMED_PCT {
        return "The ranks take turns at being late: look for what else uses the cores".to_owned();
    }
    let cost = |step: &Seen| {
        let own = step.ranks.get(rank)?.waiting;
        let others = step.ranks.len().checked_sub(1).filter(|others| *others > 0)?;
        Some(step.ranks.iter().map(|of| of.waiting - own).sum::<f64>() / others as f64)
    };
    let blamed = format!("Most of the waiting is for rank {rank}: {look}");
    let least_ms = means.apart_ms.unwrap_or(0.0);
    match Gain::of(observed.steps.iter().filter_map(cost)).filter(|gain| gain.holds(least_ms)) {
        Some(gain) => format!(
            "{blamed}. Were it as fast as the others, the step would take about {}",
            gain.words("less")
        ),
        None => blamed,
    }
}

impl CriticalPath {
    /// The rank that holds up the others: the one whose steps have the most to gain, and in nearly all steps of all ranks.
    pub(crate) fn late_rank(&self) -> Option<&RankShare> {
        let most = self.ranks.iter().max_by_key(|of| (of.gain_ns, Reverse(of.rank)))?;
        let is_most = |step: &&StepPath| {
            let of = step.gain_ns.iter().max_by_key(|(rank, ns)| (**ns, Reverse(**rank)));
            of.is_some_and(|(rank, _)| *rank == most.rank)
        };
        let count = self.steps.iter().filter(is_most).count();
        (100.0 * count as f64 >= BLAMED_PCT * self.steps.len() as f64).then_some(most)
    }

    /// Advice in one sentence; `None` for a single rank or an empty path.
    ///
    /// It names the largest gain for the steps: a rank that is no later than the next rank, or the same bytes moved in half
    /// the time. This need not be the rank with the largest share.
    pub fn headline(&self) -> Option<String> {
        let num_steps = self.steps.len().max(1);
        let ms_per_step = |ns: i64| ns as f64 / 1e6 / num_steps as f64;
        let len_ms = ms_per_step(self.len_ns());
        if self.ranks.len() < 2 || len_ms == 0.0 {
            return None;
        }
        let pct = |ms: f64| 100.0 * ms / len_ms;
        let transfer_ms = ms_per_step(self.transfer_ns());
        let share = format!("{:.0} % of", pct(transfer_ms));
        let is_late = self.late_rank().map(|late| {
            let parts_ns = late.compute_ns.saturating_add(late.host_ns).max(1) as f64;
            let most = late.parts.first().map_or(String::new(), |(what, ns)| {
                format!(", {:.0} % of it in {what}", 100.0 * *ns as f64 / parts_ns)
            });
            let words = format!(
                "Rank {} holds {:.0} % of the critical path{most}; were it no later than the next rank, the steps \
                 would take up to",
                late.rank,
                100.0 * late.share
            );
            (late.gain_ns, words)
        });
        let exposed_ns = self.exposed_ns();
        let is_transfer = self.transfers.first().map(|most| {
            let change = if most.is_small { "a lower latency, or fewer operations, as without synchronized batch norm" } else { "a faster network, or fewer bytes" };
            format!(
                "{share} the critical path is transfer, most of it in {} ({:.1} per step): {transfer_ms:.2} ms per step, \
                 {:.2} of them with nothing computed beside. If data moved in half the time ({change}), the steps would \
                 take about",
                most.what,
                most.count as f64 / num_steps as f64,
                ms_per_step(exposed_ns)
            )
        });
        // Computation beside the transfer takes as long as before, so no more than the exposed part can be gained.
        let half_ns = (self.transfer_ns() / 2).min(exposed_ns);
        let gain = |ns: i64| Gain::steady(ms_per_step(ns), num_steps);
        let causes = [is_late, is_transfer.map(|words| (half_ns, words))]
            .map(|of| of.map(|(ns, words)| (gain(ns), words)));
        let cause = best(causes.into_iter().flatten(), |(gain, _)| *gain, 0.0);
        Some(match cause.filter(|(gain, _)| pct(gain.ms) >= LEAST_PCT) {
            Some((Gain { ms, .. }, words)) => {
                format!("{words} {:.1} % less ({ms:.2} ms per step).", pct(ms))
            }
            None => format!(
                "No rank holds up the others: the critical path changes between them, and {share} it is transfer."
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Build, across, timeline};
    use crate::timeline::{Collective, Timeline};

    /// A rank that computes until `ready_us`, takes part in an all-reduce of `elems` elements that ends at 80, beside which
    /// it computes until `beside_us`, and runs the optimizer until 100.
    fn rank(rank: usize, ready_us: i64, beside_us: i64, elems: u64) -> Timeline {
        let said = Collective { seq: Some(0), in_elems: Some(elems), ..Collective::default() };
        let timeline = timeline(rank).step(3, 0, 100).compute("conv", 0, beside_us);
        timeline.said(ready_us, 80, said).compute("adam", 80, 100)
    }

    fn headline(ready_us: [i64; 2], beside_us: i64, elems: u64) -> String {
        let ranks = [0, 1].map(|at| rank(at, ready_us[at], beside_us.max(ready_us[at]), elems));
        across(&ranks).path.headline().unwrap()
    }

    #[test]
    fn a_transfer_that_costs_more_than_a_rank_is_the_cause() {
        // Rank 1 comes 2 us late. Half of the 58 us of the transfer would be gone with a network of twice the speed.
        let told = headline([20, 22], 0, 1 << 20);
        let expected = "58 % of the critical path is transfer, most of it in all_reduce (1.0 per step): 0.06 ms per step, \
            0.06 of them with nothing computed beside. If data moved in half the time (a faster network, or fewer bytes), \
            the steps would take about 29.0 % less (0.03 ms per step).";
        assert_eq!(told, expected);
        // Hidden time is not gained: the rank computes until 70.
        let told = headline([20, 22], 70, 1 << 20);
        assert!(
            told.contains("58 % of the critical path") && told.contains("about 10.0 % less"),
            "{told}"
        );
        // Rank 1 comes 50 us late: now it is the rank.
        assert!(headline([20, 70], 0, 1 << 20).starts_with("Rank 1 holds"));
    }

    #[test]
    fn small_messages_are_a_transfer_of_their_own() {
        let told = headline([20, 22], 0, 64);
        assert!(told.contains("all_reduce of small messages (1.0 per step)"), "{told}");
        assert!(told.contains("a lower latency, or fewer operations"), "{told}");
    }

    #[test]
    fn the_slowest_rank_is_the_one_that_others_wait_for() {
        const MS: u64 = 1_000_000;
        let slowest = Slowest::of([[4, 0], [0, 1], [5, 1]].map(|of| of.map(|ms| ms * MS).to_vec()));
        let slowest = slowest.unwrap();
        assert_eq!(slowest.rank, 1);
        assert!((slowest.steps_pct - 200.0 / 3.0).abs() < 1e-9);
        assert!((slowest.cost_ms - 8.0 / 3.0).abs() < 1e-9);
        // No rank is the last in a step in which all wait equally long.
        let slowest = Slowest::of([[3, 0], [2, 2], [2, 2]].map(|of| of.to_vec())).unwrap();
        assert!((slowest.steps_pct - 100.0 / 3.0).abs() < 1e-9);
        assert_eq!(Slowest::of([vec![2, 2]]), None);
    }
}
