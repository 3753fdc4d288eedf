//! The anatomy of a step: its times, operations and gradients, combined over all ranks.
//!
//! The main thread's times are disjoint and add up to the wall-clock time; time without a span is the rest.
//! Communication runs beside them and is listed separately.

use paceline_analysis::advice::Means;
use paceline_analysis::advice::blame::Slowest;
use paceline_model::Layout;
use serde::{Deserialize, Serialize};

use crate::record::gathers::GatherMoments;
use crate::record::op_moments::OpMoments;
use crate::record::rank_report::RankReport;
use crate::record::readiness::Moments;
use crate::record::steps::AllSteps;
use crate::record::times::StepTimes;

/// Where the time of a step goes: means over ranks and measured steps, in milliseconds.
///
/// Files have the skipped means as figures of the [table](crate::figures::table).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Anatomy {
    /// The times that decide whether there is something to advise: `wall_ms`, `sync_ms`, `comm_exposed_ms`,
    /// `comm_exposed_wait_ms` and `comm_ms`. The last one excludes the sums of the loss.
    #[serde(skip)]
    pub means: Means,
    /// The start of the last backward pass after the batch arrived.
    pub backward_begin_ms: f64,
    /// The end of the last backward pass, in milliseconds after the batch arrived.
    pub backward_end_ms: f64,
    /// The rank that the others waited for most.
    pub slowest: Option<Slowest>,
    /// When each gradient was final.
    pub ready: Vec<ReadyLine>,
    /// The operations of a step, in order.
    pub ops: Vec<OpMoments>,
    /// Those that carry buckets.
    pub buckets: Vec<BucketLine>,
    /// Those that sum the statistics of a synchronized batch norm. The passes wait for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub statistics: Vec<OpMoments>,
    /// The uses of units that are gathered, in order.
    pub gathers: Vec<GatherLine>,
}

/// A use of a unit of a sharded model. Its times are in milliseconds after the batch arrived.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GatherLine {
    /// The unit.
    pub unit: String,
    /// Whether the backward pass uses it.
    pub is_backward: bool,
    /// Its gather, without bytes if the unit was still there from the forward pass.
    #[serde(flatten)]
    pub op: OpMoments,
    /// When the pass needed it.
    pub needed_ms: f64,
    /// How long the pass waited.
    pub exposed_ms: f64,
    /// How long the reduction of the unit's gradients moved data, in the backward pass.
    pub reduce_ms: f64,
}

/// When a gradient was final.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReadyLine {
    /// The parameter's name.
    pub param: String,
    /// Milliseconds after the batch arrived.
    pub ready_ms: f64,
}

/// One bucket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BucketLine {
    /// Its operation.
    #[serde(flatten)]
    pub op: OpMoments,
    /// The units whose gradients it carries, the last layers first.
    pub units: Vec<String>,
}

impl Anatomy {
    /// Combines the ranks' reports. `buckets` are the units in each bucket.
    pub fn new(
        steps: &AllSteps,
        reports: &[RankReport],
        layout: &Layout,
        buckets: &[Vec<String>],
    ) -> Self {
        if steps.count() == 0 {
            return Self::default();
        }
        let mean = |part: fn(&StepTimes) -> u64| steps.mean(part).unwrap_or(0.0) / 1e6;
        let moments = Moments::mean(reports.iter().map(|report| &report.alike.moments));
        let ops = moments.ops;
        let ready = moments.ready.iter().map(|of| ReadyLine {
            param: layout.params()[of.param].name.clone(),
            ready_ms: of.at_ms,
        });
        let alike = &reports[0].alike;
        let gathers = moments.gathers.iter().map(|of| {
            let reduction = alike.reduction_of(of.unit).filter(|_| of.is_backward);
            let reduction = reduction.and_then(|at| ops.get(at));
            GatherLine {
                unit: layout.units()[of.unit].name.clone(),
                reduce_ms: reduction.map_or(0.0, OpMoments::move_ms),
                ..GatherLine::of(of)
            }
        });
        let of_buckets = alike.bucket_ops.iter().zip(buckets);
        let lines = of_buckets.filter_map(|(at, units)| {
            Some(BucketLine { op: *ops.get(*at)?, units: units.clone() })
        });
        let statistics = alike.statistics_ops.iter();
        Self {
            statistics: statistics.filter_map(|at| ops.get(*at).copied()).collect(),
            means: Means {
                wall_ms: mean(|t| t.step + t.data),
                apart_ms: steps.apart_ms(),
                sync_ms: mean(|t| t.sync),
                exposed_ms: mean(|t| t.exposed),
                exposed_wait_ms: mean(|t| t.exposed_wait),
                communication_ms: mean(|t| t.communicating),
            },
            backward_begin_ms: moments.passes[1],
            backward_end_ms: moments.passes[2],
            slowest: slowest(steps),
            ready: ready.collect(),
            buckets: lines.collect(),
            gathers: gathers.collect(),
            ops,
        }
    }
}

impl GatherLine {
    /// A use of a unit, without its name and reduction.
    pub(super) fn of(of: &GatherMoments) -> Self {
        let GatherMoments { is_backward, op, needed_ms, exposed_ms, .. } = *of;
        Self { is_backward, op, needed_ms, exposed_ms, ..Self::default() }
    }
}

/// Only exposed waiting counts: a wait that arithmetic hides costs nothing.
fn slowest(steps: &AllSteps) -> Option<Slowest> {
    Slowest::of(steps.each().map(|ranks| ranks.iter().map(|of| of.exposed_wait).collect()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::record::readiness::AlikeSteps;
    use crate::record::steps::StepLog;
    use crate::record::steps::tests::loss;

    /// A report with a step for each exposed wait.
    pub fn report(waits_ms: &[u64]) -> RankReport {
        let mut steps = StepLog::default();
        for (number, wait) in waits_ms.iter().enumerate() {
            let times = StepTimes {
                step: 10_000_000,
                forward: 3_000_000,
                backward: 4_000_000,
                exposed: 2_000_000,
                exposed_wait: wait * 1_000_000,
                hidden: 500_000,
                communicating: 2_000_000,
                wait: wait * 1_000_000,
                ..StepTimes::default()
            };
            steps.push(number as u64, &times, &loss(1, true));
        }
        let op = OpMoments {
            bytes: 8,
            sent_ms: 4.0,
            done_ms: 8.0,
            hidden_ms: 1.0,
            ..OpMoments::default()
        };
        let moments = Moments { ops: vec![op], ..Moments::default() };
        let alike = AlikeSteps { moments, bucket_ops: vec![0], ..AlikeSteps::default() };
        RankReport { steps, alike, ..RankReport::default() }
    }

    /// Waiting that arithmetic hides makes no step longer.
    #[test]
    fn a_rank_for_which_others_wait_while_they_compute_costs_nothing() {
        let logs = [9, 0].map(|wait_ms| {
            let wait = wait_ms * 1_000_000;
            let times = StepTimes { wait, hidden: wait, ..StepTimes::default() };
            let mut log = StepLog::default();
            log.push(0, &times, &loss(1, true));
            log
        });
        assert_eq!(slowest(&AllSteps::new(&logs)), None);
    }
}
