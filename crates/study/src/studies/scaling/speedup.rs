//! Compares numbers of ranks with one rank: speed-up, efficiency and the cost of communication. Knows
//! neither how the runs are made nor how rows are shown.

use paceline_failure::{Failure, Result};
use serde::Serialize;

use super::Point;
use crate::step::StepTimes;
use crate::study::Measured;

/// The quantity that stays the same when ranks are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The samples of each rank.
    #[default]
    Weak,
    /// The samples of all ranks together.
    Strong,
}

impl Mode {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Weak => "weak",
            Mode::Strong => "strong",
        }
    }

    /// The global batch of `ranks` ranks, if that of one rank is `base` samples.
    pub fn global_batch(self, base: usize, ranks: usize) -> Result<usize> {
        match self {
            Mode::Strong => Ok(base),
            Mode::Weak => base.checked_mul(ranks).ok_or_else(|| {
                Failure::Usage("--batch-size is too large for so many ranks".into())
            }),
        }
    }

    /// The time that `ranks` ranks would take without any loss, if one rank takes `single_ms`.
    pub fn ideal_ms(self, single_ms: f64, ranks: usize) -> f64 {
        match self {
            Mode::Weak => single_ms,
            Mode::Strong => single_ms / ranks as f64,
        }
    }
}

/// The results with one number of ranks. Times are per step, in milliseconds, and medians over the
/// rounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The quantity that stays the same.
    pub mode: Mode,
    /// Number of ranks.
    pub ranks: usize,
    /// Samples of a step, of all ranks together.
    pub global_batch: usize,
    /// Whether there are more ranks x threads than cores. Such a row does not show scaling, because ranks
    /// share cores.
    pub is_oversubscribed: bool,
    /// The times of a step.
    pub times: StepTimes,
    /// Samples of all ranks per second.
    pub samples_per_s: f64,
    /// Samples per second over those of one rank.
    pub speedup: f64,
    /// T_comm: the step minus the ideal step. `None` for one rank.
    pub t_comm_ms: Option<f64>,
    /// The part of the communication that waited for the slowest rank.
    pub waiting_ms: f64,
    /// The part of the waiting during which the main thread was blocked.
    pub exposed_waiting_ms: f64,
    /// The time that the main thread computed.
    pub compute_ms: f64,
    /// The serial fraction that follows from this row alone. `None` for one rank.
    pub serial_pct: Option<f64>,
}

impl Row {
    /// The measured fields. [`against_one_rank`] fills in the fields that compare with one rank.
    pub(super) fn measured(case: &Measured<Point>) -> Result<Self> {
        Ok(Self {
            ranks: case.of.ranks,
            global_batch: case.of.global_batch,
            times: StepTimes::of(&case.rounds)?,
            samples_per_s: case.median("samples_per_s_without_data")?,
            compute_ms: case.median("compute_ms")?,
            waiting_ms: case.median("comm_wait_ms")?,
            exposed_waiting_ms: case.median("comm_exposed_wait_ms")?,
            ..Self::default()
        })
    }

    /// Speed-up over the number of ranks, in percent.
    pub fn efficiency_pct(&self) -> f64 {
        100.0 * self.speedup / self.ranks as f64
    }
}

/// Completes the measured rows, the first of which is that of one rank.
pub fn against_one_rank(mode: Mode, measured: &[Row], threads: usize, cores: usize) -> Vec<Row> {
    let Some(single) = measured.first() else { return Vec::new() };
    let row = |of: &Row| {
        let speedup = of.samples_per_s / single.samples_per_s;
        let beside_one = |value: f64| (of.ranks != 1).then_some(value);
        let ideal_ms = mode.ideal_ms(single.times.step.median, of.ranks);
        Row {
            mode,
            is_oversubscribed: of.ranks * threads > cores,
            speedup,
            t_comm_ms: beside_one(of.times.step.median - ideal_ms),
            serial_pct: beside_one(100.0 * serial_fraction(mode, of.ranks, speedup)),
            ..of.clone()
        }
    };
    measured.iter().map(row).collect()
}

/// The serial fraction for which the law gives exactly this speed-up. The law is Amdahl's for strong
/// scaling (solved by Karp and Flatt, 1990), and Gustafson's for weak scaling.
fn serial_fraction(mode: Mode, ranks: usize, speedup: f64) -> f64 {
    let n = ranks as f64;
    match mode {
        Mode::Strong => (1.0 / speedup - 1.0 / n) / (1.0 - 1.0 / n),
        Mode::Weak => (n - speedup) / (n - 1.0),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use paceline_observe::figures::run_summary::RunSummary;

    use super::*;
    use crate::step::tests::times;

    /// A configuration whose steps consist of computation only.
    pub(in super::super) fn measured(ranks: usize, global_batch: usize, step_ms: f64) -> Row {
        Row {
            ranks,
            global_batch,
            times: times(step_ms, 0.0, 0.0, 0.0),
            samples_per_s: global_batch as f64 / step_ms * 1e3,
            compute_ms: step_ms,
            ..Row::default()
        }
    }

    #[test]
    fn strong_scaling_follows_its_formulas() {
        // Serial fraction 0.2: T(2) = 100 (0.2 + 0.4), T(4) = 100 (0.2 + 0.2).
        let all = [measured(1, 64, 100.0), measured(2, 64, 60.0), measured(4, 64, 40.0)];
        let rows = against_one_rank(Mode::Strong, &all, 1, 2);
        let about = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
        about(rows[1].speedup, 100.0 / 60.0);
        about(rows[1].efficiency_pct(), 100.0 / 1.2);
        about(rows[1].t_comm_ms.unwrap(), 10.0);
        about(rows[2].t_comm_ms.unwrap(), 15.0);
        about(rows[1].serial_pct.unwrap(), 20.0);
        about(rows[2].serial_pct.unwrap(), 20.0);
        about(rows[2].samples_per_s, 1600.0);
        assert_eq!((rows[0].t_comm_ms, rows[0].serial_pct), (None, None));
        assert_eq!(
            rows.iter().map(|r| r.is_oversubscribed).collect::<Vec<_>>(),
            [false, false, true]
        );
    }

    #[test]
    fn weak_scaling_follows_its_formulas() {
        let all = [measured(1, 64, 100.0), measured(2, 128, 125.0)];
        let rows = against_one_rank(Mode::Weak, &all, 2, 2);
        assert_eq!((rows[1].speedup, rows[1].efficiency_pct()), (1.6, 80.0));
        assert_eq!(rows[1].t_comm_ms, Some(25.0));
        assert!((rows[1].serial_pct.unwrap() - 40.0).abs() < 1e-9);
        assert!(!rows[0].is_oversubscribed && rows[1].is_oversubscribed, "threads count");
    }

    #[test]
    fn medians_are_taken_over_rounds() {
        let run = |step: f64| -> RunSummary {
            let figures = serde_json::json!({
                "step_ms_median": step, "samples_per_s_without_data": 1e3 * 8.0 / step, "compute_ms": step - 1.0,
                "comm_exposed_ms": 1.0, "comm_hidden_ms": 0.5, "comm_wait_ms": 0.25,
                "comm_exposed_wait_ms": 0.0
            });
            figures.into()
        };
        let case = |rounds: Vec<RunSummary>| Measured {
            of: Point { ranks: 2, global_batch: 8 },
            name: String::new(),
            rounds,
        };
        let of = Row::measured(&case(vec![run(5.0), run(3.0), run(9.0)])).unwrap();
        assert_eq!((of.times.step.median, of.times.step.min, of.times.step.max), (5.0, 3.0, 9.0));
        assert_eq!((of.compute_ms, of.waiting_ms), (4.0, 0.25));
        assert!(Row::measured(&case(vec![RunSummary::default()])).is_err());
    }
}
