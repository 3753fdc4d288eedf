//! The anatomy of a step: where its time goes, put together from what the ranks measured.
//!
//! The main thread's times are disjoint and add up to the wall clock, with what no span accounts for
//! printed as the rest. What communication did meanwhile stands beside them. What follows from the
//! numbers for the user is [`advice`](crate::insight::advice)'s.

use paceline_model::Layout;
use serde::{Deserialize, Serialize};

use crate::metrics::meter::{OpMean, RankReport, StepTimes};
use crate::text::plain_table;

/// Where the time of a step goes: means over ranks and measured steps, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Anatomy {
    /// From asking for a batch to the end of the optimizer.
    pub wall_ms: f64,
    /// Waiting for the batch.
    pub data_ms: f64,
    /// Forward pass and loss.
    pub forward_ms: f64,
    /// Backward pass.
    pub backward_ms: f64,
    /// Arithmetic and copies that synchronisation adds.
    pub sync_ms: f64,
    /// Blocked on communication.
    pub exposed_ms: f64,
    /// Part of it: the operation itself waited for the last rank to arrive.
    pub exposed_wait_ms: f64,
    /// Optimizer.
    pub optimizer_ms: f64,
    /// What is left of the wall clock.
    pub rest_ms: f64,
    /// Communication ran, but for the sums of the loss.
    pub communication_ms: f64,
    /// Communication, but for the sums of the loss, ran while the main thread computed.
    pub hidden_ms: f64,
    /// Operations, all of them, waited for the last rank to arrive.
    pub wait_ms: f64,
    /// Operations moved and reduced data.
    pub move_ms: f64,
    /// The begin of the last backward pass since the batch was there.
    pub backward_begin_ms: f64,
    /// Its end.
    pub backward_end_ms: f64,
    /// The rank that the others waited for most.
    pub slowest: Option<Slowest>,
    /// When each gradient was final.
    pub ready: Vec<ReadyLine>,
    /// The operations of a step, in order.
    pub ops: Vec<OpLine>,
    /// Of them those that carry buckets.
    pub buckets: Vec<BucketLine>,
}

/// The rank that the others waited for most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slowest {
    /// Which one.
    pub rank: usize,
    /// The part of the steps in which it waited least of all.
    pub steps_pct: f64,
    /// What it made another rank wait, per step: mean over the other ranks.
    pub cost_ms: f64,
}

/// When a gradient was final, since the batch was there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReadyLine {
    /// The parameter's name.
    pub param: String,
    /// When.
    pub ready_ms: f64,
}

/// One operation, since the batch was there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpLine {
    /// Size of the message.
    pub bytes: u64,
    /// Submitted.
    pub ready_ms: f64,
    /// Started.
    pub sent_ms: f64,
    /// All ranks had arrived.
    pub present_ms: f64,
    /// Finished.
    pub done_ms: f64,
    /// The part of its time during which the main thread computed.
    pub hidden_pct: f64,
}

/// One bucket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BucketLine {
    /// Its operation.
    #[serde(flatten)]
    pub op: OpLine,
    /// The units whose gradients it carries, those of the last layers first.
    pub units: Vec<String>,
}

impl Anatomy {
    /// Puts the ranks' reports together. `buckets` are the units in each bucket.
    pub fn new(reports: &[RankReport], layout: &Layout, buckets: &[Vec<String>]) -> Self {
        let num_steps = reports.iter().map(|report| report.steps.len()).min().unwrap_or(0);
        if num_steps == 0 {
            return Self::default();
        }
        let mean = |part: fn(&StepTimes) -> u64| {
            let all = reports.iter().flat_map(|report| &report.steps[..num_steps]);
            all.map(part).sum::<u64>() as f64 / (num_steps * reports.len()) as f64 / 1e6
        };
        let over_ranks =
            |part: &dyn Fn(&RankReport) -> f64| part_mean(reports.iter().map(part)) / 1e6;
        let num_ops = reports.iter().map(|report| report.ops.len()).min().unwrap_or(0);
        let ops: Vec<OpLine> = (0..num_ops)
            .map(|at| {
                let mean = |part: fn(&OpMean) -> f64| over_ranks(&|report| part(&report.ops[at]));
                let (sent_ms, done_ms) = (mean(|op| op.sent), mean(|op| op.done));
                OpLine {
                    bytes: reports[0].ops[at].bytes,
                    ready_ms: mean(|op| op.ready),
                    sent_ms,
                    present_ms: mean(|op| op.present),
                    done_ms,
                    hidden_pct: pct(mean(|op| op.hidden), done_ms - sent_ms),
                }
            })
            .collect();
        let num_ready = reports.iter().map(|report| report.ready.len()).min().unwrap_or(0);
        let ready = (0..num_ready).map(|at| ReadyLine {
            param: layout.params()[reports[0].ready[at].param].name.clone(),
            ready_ms: over_ranks(&|report| report.ready[at].at),
        });
        let of_buckets = reports[0].bucket_ops.iter().zip(buckets);
        let lines = of_buckets.filter_map(|(at, units)| {
            Some(BucketLine { op: *ops.get(*at)?, units: units.clone() })
        });
        Self {
            wall_ms: mean(|t| t.step + t.data),
            data_ms: mean(|t| t.data),
            forward_ms: mean(|t| t.forward),
            backward_ms: mean(|t| t.backward),
            sync_ms: mean(|t| t.sync),
            exposed_ms: mean(|t| t.exposed),
            exposed_wait_ms: mean(|t| t.exposed_wait),
            optimizer_ms: mean(|t| t.optimizer),
            rest_ms: mean(StepTimes::rest),
            communication_ms: mean(|t| t.communicating),
            hidden_ms: mean(|t| t.hidden),
            wait_ms: mean(|t| t.wait),
            move_ms: mean(|t| t.moving),
            backward_begin_ms: over_ranks(&|report| report.backward_begin),
            backward_end_ms: over_ranks(&|report| report.backward_end),
            slowest: slowest(reports, num_steps),
            ready: ready.collect(),
            buckets: lines.collect(),
            ops,
        }
    }

    /// The part of the communication that ran while the main thread computed; none without communication.
    pub fn overlap_pct(&self) -> Option<f64> {
        (self.communication_ms > 0.0).then(|| pct(self.hidden_ms, self.communication_ms))
    }

    /// The lines for the console.
    pub fn lines(&self) -> Vec<String> {
        let parts = [
            ("forward", self.forward_ms),
            ("backward", self.backward_ms),
            ("sync", self.sync_ms),
            ("exposed comm.", self.exposed_ms),
            ("optimizer", self.optimizer_ms),
            ("data", self.data_ms),
            ("rest", self.rest_ms),
            ("step", self.wall_ms),
        ];
        let share = |ms: f64| format!("{:.1}", pct(ms, self.wall_ms));
        let table = plain_table(
            ["Main thread", "ms", "%"],
            1,
            &parts.map(|(name, ms)| [name.to_owned(), format!("{ms:.2}"), share(ms)]),
        );
        let mut lines = vec!["Anatomy of a step, means over ranks and steps:".to_owned(), table];
        if let Some(overlap) = self.overlap_pct() {
            lines.push(format!(
                "Beside them: {:.2} ms of communication, {:.2} hidden ({overlap:.1} % overlap); all operations, \
                 that of the loss included, waited {:.2} ms for the last rank, {:.2} of them exposed",
                self.communication_ms, self.hidden_ms, self.wait_ms, self.exposed_wait_ms
            ));
        }
        if let Some(Slowest { rank, steps_pct, cost_ms }) = self.slowest {
            lines.push(format!(
                "Slowest: rank {rank}, last in {steps_pct:.0} % of the steps; each other rank waited \
                 {cost_ms:.2} ms per step for it"
            ));
        }
        if !self.buckets.is_empty() {
            lines.push(self.bucket_table());
        }
        lines
    }

    fn bucket_table(&self) -> String {
        let line = |(at, BucketLine { op, units }): (usize, &BucketLine)| {
            let ms = |ms: f64| format!("{ms:.2}");
            [
                at.to_string(),
                format!("{:.2}", op.bytes as f64 / 1e6),
                ms(op.ready_ms),
                ms(op.sent_ms),
                ms(op.done_ms),
                format!("{:.0}", op.hidden_pct),
                units.join(" "),
            ]
        };
        let lines: Vec<[String; 7]> = self.buckets.iter().enumerate().map(line).collect();
        let names =
            ["Bucket", "MB", "Ready (ms)", "Sent (ms)", "Done (ms)", "Hidden (%)", "Gradients of"];
        format!(
            "Buckets, since the batch was there (backward ends at {:.2} ms):\n{}",
            self.backward_end_ms,
            plain_table(names, 0, &lines)
        )
    }
}

fn pct(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { 100.0 * part / whole } else { 0.0 }
}

fn part_mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1) as f64;
    values.sum::<f64>() / count
}

/// The rank whose lateness cost the others most. In each step it is the one that waited least, and it
/// cost each other one what that one waited more.
fn slowest(reports: &[RankReport], num_steps: usize) -> Option<Slowest> {
    if reports.len() < 2 {
        return None;
    }
    let mut costs = vec![0u64; reports.len()];
    let mut steps = vec![0usize; reports.len()];
    for step in 0..num_steps {
        let waits: Vec<u64> = reports.iter().map(|report| report.steps[step].wait).collect();
        let (rank, least) = waits.iter().enumerate().min_by_key(|(_, wait)| **wait)?;
        costs[rank] += waits.iter().map(|wait| wait - least).sum::<u64>();
        steps[rank] += 1;
    }
    let (rank, cost) = costs.iter().enumerate().max_by_key(|(_, cost)| **cost)?;
    let others = (reports.len() - 1) as f64;
    (*cost > 0).then(|| Slowest {
        rank,
        steps_pct: pct(steps[rank] as f64, num_steps as f64),
        cost_ms: *cost as f64 / others / num_steps as f64 / 1e6,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(waits_ms: &[u64]) -> RankReport {
        let times = |wait: &u64| StepTimes {
            step: 10_000_000,
            forward: 3_000_000,
            backward: 4_000_000,
            exposed: 2_000_000,
            hidden: 500_000,
            communicating: 2_000_000,
            wait: wait * 1_000_000,
            ..StepTimes::default()
        };
        RankReport {
            steps: waits_ms.iter().map(times).collect(),
            ops: vec![OpMean { bytes: 8, sent: 4e6, done: 8e6, hidden: 1e6, ..OpMean::default() }],
            bucket_ops: vec![0],
            ..RankReport::default()
        }
    }

    #[test]
    fn the_slowest_rank_is_the_one_that_others_wait_for() {
        let reports = [report(&[4, 0, 5]), report(&[0, 1, 1])];
        let slowest = slowest(&reports, 3).unwrap();
        assert_eq!(slowest.rank, 1);
        assert!((slowest.steps_pct - 200.0 / 3.0).abs() < 1e-9);
        assert!((slowest.cost_ms - 8.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn the_lines_of_a_run() {
        let layout = paceline_model::LayoutBuilder::new().finish(1);
        let reports = [report(&[1, 1]), report(&[2, 0])];
        let anatomy = Anatomy::new(&reports, &layout, &[vec!["fc1".into(), "fc0".into()]]);
        insta::assert_snapshot!(anatomy.lines().join("\n"));
    }
}
