//! The times of a step that every study compares, over the rounds of a case, and their columns.

use paceline_failure::{Failure, Result};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_table::table::Columns;

use crate::rank::Spread;
use crate::study::{median_of, spread_of};

/// The definition of the times of a run's steps.
pub const STEP_TIMES: &str = "median step: median over the steps, each as long as on its slowest rank; other times of a \
                              step: means over ranks and steps";
/// The definition of the times of a study.
pub const MEDIANS: &str = "step: median over the rounds of the runs' median step, of the slowest rank; other times: medians \
                           over the rounds of means over ranks and steps";
/// The definitions of the shares of communication in a study, and of the range of its steps.
pub const RANGES: &str = "least, most: the shortest and the longest step of a round; communication: exposed communication in \
                          percent of the step";

/// The times of a step over the rounds of a case, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTimes {
    /// The step of the slowest rank.
    pub step: Spread,
    /// Exposed communication: the time that the main thread was blocked on communication. The median of the rounds.
    pub exposed_ms: f64,
    /// Hidden communication: the communication while the main thread computed. The median of the rounds.
    pub hidden_ms: f64,
}

impl StepTimes {
    /// The times of these rounds.
    pub fn of(rounds: &[RunSummary]) -> Result<Self> {
        let step = spread_of(rounds, "step_ms_median");
        Ok(Self {
            step: step.ok_or_else(|| Failure::Run("a summary lacks step_ms_median".into()))?,
            exposed_ms: median_of(rounds, "comm_exposed_ms")?,
            hidden_ms: median_of(rounds, "comm_hidden_ms")?,
        })
    }

    /// Exposed communication in percent of the step.
    pub fn exposed_pct(&self) -> f64 {
        100.0 * self.exposed_ms / self.step.median
    }

    /// How much longer the step is than that of `base`, in words.
    pub fn against(&self, base: &Self) -> String {
        if self.step.differs_from(&base.step) {
            format!("{:+.1} %", 100.0 * (self.step.median / base.step.median - 1.0))
        } else {
            "within noise".to_owned()
        }
    }

    /// The median step with the range of the rounds, in words.
    pub fn words(&self) -> String {
        let Spread { median, min, max, .. } = self.step;
        format!("{median:.2} ms ({min:.2} to {max:.2})")
    }
}

/// How a study finds the times of its rows.
type Times<T> = fn(&T) -> &StepTimes;

/// Adds the columns of the step. `least_and_most` are the labels of the range of the rounds, both empty if only files have
/// it.
pub(crate) fn step_columns<T: 'static>(
    columns: Columns<T>,
    [least, most]: [&'static str; 2],
    times: Times<T>,
) -> Columns<T> {
    let step = move |row: &T| times(row).step;
    columns
        .add("step_ms", "step", ("ms", 2), "The step of the slowest rank.", move |of| {
            step(of).median
        })
        .add("step_ms_min", least, ("", 2), "The shortest of a round, in ms.", move |of| {
            step(of).min
        })
        .add("step_ms_max", most, ("", 2), "The longest of a round, in ms.", move |of| step(of).max)
        .add("rounds", "", ("", 0), "How many rounds there are.", move |of| step(of).rounds)
}

/// Adds the columns of communication: exposed in percent and in milliseconds, and hidden. Each has a label, empty if
/// only files have the column, and decimals.
pub(crate) fn communication_columns<T: 'static>(
    columns: Columns<T>,
    [percent, exposed, hidden]: [(&'static str, usize); 3],
    times: Times<T>,
) -> Columns<T> {
    let [in_percent, blocked, hidden_time] = [
        "Exposed communication in percent of the step.",
        "Exposed communication: the time that the main thread was blocked on communication.",
        "Hidden communication: the communication while the main thread computed.",
    ];
    columns
        .add("exposed_pct", percent.0, ("%", percent.1), in_percent, move |of| {
            times(of).exposed_pct()
        })
        .add("exposed_ms", exposed.0, ("ms", exposed.1), blocked, move |of| times(of).exposed_ms)
        .add("hidden_ms", hidden.0, ("ms", hidden.1), hidden_time, move |of| times(of).hidden_ms)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Times of three rounds around a step of these milliseconds.
    pub fn times(step_ms: f64, half_range_ms: f64, exposed_ms: f64, hidden_ms: f64) -> StepTimes {
        let (min, max) = (step_ms - half_range_ms, step_ms + half_range_ms);
        StepTimes { step: Spread { median: step_ms, min, max, rounds: 3 }, exposed_ms, hidden_ms }
    }

    #[test]
    fn medians_are_taken_over_rounds() {
        let run = |step: f64| -> RunSummary {
            serde_json::json!({
                "step_ms_median": step, "comm_exposed_ms": step / 10.0, "comm_hidden_ms": 0.5
            })
            .into()
        };
        let of = StepTimes::of(&[run(5.0), run(3.0), run(9.0)]).unwrap();
        assert_eq!((of.step.median, of.step.min, of.step.max), (5.0, 3.0, 9.0));
        assert_eq!((of.exposed_ms, of.hidden_ms, of.exposed_pct()), (0.5, 0.5, 10.0));
        assert!(StepTimes::of(&[RunSummary::default()]).is_err());
    }

    #[test]
    fn steps_within_noise_are_said_to_be() {
        let base = times(10.0, 0.5, 0.0, 0.0);
        assert_eq!(times(12.0, 0.5, 0.0, 0.0).against(&base), "+20.0 %");
        assert_eq!(times(10.8, 0.5, 0.0, 0.0).against(&base), "within noise");
        assert_eq!(base.words(), "10.00 ms (9.50 to 10.50)");
    }
}
