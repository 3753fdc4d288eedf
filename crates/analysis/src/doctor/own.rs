//! The diagnosis of a run of paceline, for a comparison of two runs.
//!
//! Input: the traces of a run looked at across ranks. Output: a [`Diagnosis`] with the lengths of the critical paths of its steps,
//! and the two causes that this path shows: a rank that holds up the others, and transfers beside which nothing is computed. It
//! knows no flags: `paceline train` itself says which of them would help.

use super::causes::{exposed, straggler};
use super::finding::NEGLIGIBLE;
use super::{Advice, Cause, Diagnosis, Evidence};
use crate::advice::gain::Gain;
use crate::ranks::AcrossRanks;

/// Diagnoses a run.
pub(super) fn diagnose(across: &AcrossRanks) -> Diagnosis {
    let path = &across.path;
    let named = || path.steps.iter().filter(|step| step.step.is_some());
    let lengths_ms: Vec<f64> = named().map(|step| step.len_ns() as f64 / 1e6).collect();
    let steps = lengths_ms.len();
    if steps == 0 {
        return Diagnosis::default();
    }
    let step_ms = lengths_ms.iter().sum::<f64>() / steps as f64;
    let ms = |ns: i64| ns as f64 / 1e6 / steps as f64;
    let advice = |cause: &'static Cause, title: String, low_ms: f64, high_ms: f64, text: String| {
        let gain = Gain::between(low_ms, high_ms, steps);
        let evidence = Evidence { text, ..Evidence::default() };
        let change = "`paceline train` names the flags that would help".to_owned();
        Advice { cause, title, change, gain, step_ms, evidence }
    };
    let mut all = Vec::new();
    if path.ranks.len() > 1
        && let Some(late) = path.late_rank()
    {
        let high_ms = ms(late.gain_ns);
        let title = format!("Rank {} makes the others wait", late.rank);
        let text = format!("it holds {:.0} % of the critical path", 100.0 * late.share);
        all.push(advice(&straggler::CAUSE, title, high_ms / 2.0, high_ms, text));
    }
    // Computation beside a transfer takes as long as before, so no more than the exposed part can be gained.
    let exposed_ms = ms(path.exposed_ns());
    let transfer_ms = ms(path.transfer_ns());
    let text = format!(
        "{exposed_ms:.2} of {transfer_ms:.2} ms of transfers run while nothing is computed"
    );
    let [low_ms, high_ms] = [transfer_ms / 4.0, transfer_ms / 2.0].map(|ms| ms.min(exposed_ms));
    let title = exposed::CAUSE.title.to_owned();
    all.push(advice(&exposed::CAUSE, title, low_ms, high_ms, text));
    all.retain(|of| of.gain.ms >= NEGLIGIBLE * step_ms);
    all.sort_by(|a, b| b.gain.ms.total_cmp(&a.gain.ms));
    Diagnosis { advice: all, step_ms: Some(step_ms), steps, lengths_ms, ..Diagnosis::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Build, across, timeline};

    #[test]
    fn the_causes_are_those_of_the_critical_path() {
        // Two steps of 100 us. Rank 1, or one rank after the other, comes to the all-reduce `late` us after the other rank,
        // and data move for 40.
        let run = |late: i64, takes_turns: bool| {
            across(&[0, 1].map(|rank| {
                let at = |begin: i64, seq: u64, timeline: crate::timeline::Timeline| {
                    let is_late = rank as u64 == if takes_turns { seq % 2 } else { 1 };
                    let ready = begin + 20 + if is_late { late } else { 0 };
                    timeline
                        .step(seq, begin, begin + 100)
                        .compute("conv", begin, ready)
                        .all_reduce(seq, ready, begin + 60 + late)
                        .compute("adam", begin + 60 + late, begin + 100)
                };
                // The last step may have been cut off and does not count.
                at(200, 2, at(100, 1, at(0, 0, timeline(rank))))
            }))
        };
        let causes = |of: &Diagnosis| of.advice.iter().map(|of| of.cause.key).collect::<Vec<_>>();
        let even = diagnose(&run(0, false));
        assert_eq!((causes(&even), even.steps), (vec!["exposed"], 2));
        assert_eq!((even.advice[0].gain.low_ms, even.advice[0].gain.high_ms), (0.01, 0.02));
        let late = diagnose(&run(30, false));
        assert_eq!(causes(&late), ["straggler", "exposed"]);
        assert_eq!(late.advice[0].gain.high_ms, 0.03);
        assert_eq!(causes(&diagnose(&run(30, true))), ["exposed"]);
        assert_eq!(diagnose(&AcrossRanks::default()), Diagnosis::default());
    }
}
