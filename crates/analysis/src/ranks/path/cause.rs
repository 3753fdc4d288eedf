//! What to change first to make the steps shorter, in one sentence.
//!
//! Input: a critical path. Output: a [`Cause`] with what the steps would gain. Both kinds of causes are compared by
//! that gain: a rank that is later than the others, and the transfer of data.

use std::cmp::Reverse;

use super::{CriticalPath, RankShare, Transfer, add_up};

/// What to change first to make the steps shorter.
#[derive(Clone, Debug, PartialEq)]
pub enum Cause {
    /// A rank is later than all others.
    Rank(RankShare),
    /// Moving data takes long.
    Transfer(Transfer),
}

impl CriticalPath {
    /// The part of the transfer in which the rank of the path did not compute, in nanoseconds.
    pub fn exposed_ns(&self) -> i64 {
        add_up(self.transfers.iter().map(|of| of.time_ns - of.hidden_ns))
    }

    /// What the steps would gain, in nanoseconds, if the same bytes moved in half the time. Computation that ran
    /// beside the transfer takes as long as before, so no more than the exposed part can be gained.
    pub fn half_transfer_ns(&self) -> i64 {
        (self.transfer_ns() / 2).min(self.exposed_ns())
    }

    /// What to change first: whichever gains the steps more, a rank that is no later than the next rank, or a
    /// transfer in half the time. `None` for a single rank, or if neither gains 1 %.
    pub fn cause(&self) -> Option<Cause> {
        if self.ranks.len() < 2 {
            return None;
        }
        let rank = self.ranks.iter().max_by_key(|share| (share.gain_ns, Reverse(share.rank)))?;
        let transfer_ns = self.half_transfer_ns();
        let (cause, gain_ns) = match self.transfers.first() {
            Some(first) if transfer_ns > rank.gain_ns => {
                (Cause::Transfer(first.clone()), transfer_ns)
            }
            _ => (Cause::Rank(rank.clone()), rank.gain_ns),
        };
        (self.percent(gain_ns) >= 1.0).then_some(cause)
    }

    /// A time as a percentage of the paths of all steps.
    fn percent(&self, ns: i64) -> f64 {
        100.0 * ns as f64 / self.len_ns().max(1) as f64
    }

    /// A time of all steps as milliseconds per step.
    fn ms_per_step(&self, ns: i64) -> f64 {
        ns as f64 / 1e6 / self.steps.len().max(1) as f64
    }

    /// Advice in one sentence; `None` for a single rank or an empty path.
    ///
    /// It names the [`Cause`] that would gain the steps most. This need not be the rank with the largest share.
    pub fn headline(&self) -> Option<String> {
        if self.ranks.len() < 2 || self.len_ns() == 0 {
            return None;
        }
        let transfer = self.percent(self.transfer_ns());
        Some(match self.cause() {
            None => format!(
                "No rank holds up the others: the critical path changes between them, and {transfer:.0} % \
                 of it is transfer."
            ),
            Some(Cause::Rank(slowest)) => {
                let most = slowest.parts.first().map_or(String::new(), |(what, ns)| {
                    format!(
                        ", {:.0} % of it in {what}",
                        100.0 * *ns as f64 / slowest.parts_ns() as f64
                    )
                });
                format!(
                    "Rank {} holds {:.0} % of the critical path{most}; were it no later than the next rank, the \
                     steps would take up to {:.1} % less ({:.2} ms per step).",
                    slowest.rank,
                    100.0 * slowest.share,
                    self.percent(slowest.gain_ns),
                    self.ms_per_step(slowest.gain_ns)
                )
            }
            Some(Cause::Transfer(most)) => {
                let gain_ns = self.half_transfer_ns();
                let count = most.count as f64 / self.steps.len().max(1) as f64;
                let change = match most.is_small {
                    true => {
                        "a lower latency, or fewer operations, as without synchronized batch norm"
                    }
                    false => "a faster network, or fewer bytes",
                };
                format!(
                    "{transfer:.0} % of the critical path is transfer, most of it in {} ({count:.1} per step): {:.2} \
                     ms per step, {:.2} of them with nothing computed beside. If data moved in half the time \
                     ({change}), the steps would take about {:.1} % less ({:.2} ms per step).",
                    most.what,
                    self.ms_per_step(self.transfer_ns()),
                    self.ms_per_step(self.exposed_ns()),
                    self.percent(gain_ns),
                    self.ms_per_step(gain_ns)
                )
            }
        })
    }
}

impl RankShare {
    fn parts_ns(&self) -> i64 {
        self.compute_ns.saturating_add(self.host_ns).max(1)
    }
}

#[cfg(test)]
mod tests {
    use crate::ranks::sample::{across, timeline};
    use crate::timeline::{Collective, Timeline};

    /// A rank that computes until `ready_us`, takes part in an all-reduce of so many elements that ends at 80, beside which
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
        // What is hidden is not gained: the rank computes until 70.
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
}
