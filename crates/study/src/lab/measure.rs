//! Makes the runs of an experiment, in rounds, until the effects are known well enough.
//!
//! Every round runs every variant once; the order reverses every round. After the third round it goes on only as long as an
//! interval is wider than requested, and as there are rounds and time left.

use std::time::{Duration, Instant};

use paceline_failure::Result;

use super::args::LabArgs;
use super::effect::Effect;
use super::scene::Scene;
use crate::execute;
use crate::ledger::Ledger;
use crate::plan::Case;
use crate::rank::MIN_ROUNDS;

/// The figure that effects are about.
pub const FIGURE: &str = "samples_per_s";

/// Makes the runs. Those that the ledger has already are not made again.
pub fn measure(
    args: &LabArgs,
    scenes: &[Scene],
    cases: &[Case],
    ledger: &mut Ledger,
) -> Result<usize> {
    let limit = Duration::from_secs_f64(args.run_limit);
    let (begin, budget) = (Instant::now(), Duration::from_secs_f64(args.seconds));
    let made = ledger.records().iter().map(|record| record.round + 1).max().unwrap_or(0);
    let mut rounds = MIN_ROUNDS.max(made).min(args.rounds);
    loop {
        execute::make(cases, rounds, limit, None, ledger)?;
        if rounds >= args.rounds || begin.elapsed() > budget || is_known(args, scenes, ledger) {
            return Ok(rounds);
        }
        rounds = (rounds + 1).min(args.rounds);
    }
}

/// Whether all effects are known as well as requested.
fn is_known(args: &LabArgs, scenes: &[Scene], ledger: &Ledger) -> bool {
    let mut first = 0;
    scenes.iter().all(|scene| {
        let base = figures(ledger, first);
        let others = first + 1..first + scene.variants.len();
        first = others.end;
        others.clone().all(|case| {
            let has_failed = ledger.of_case(case).1.is_some();
            let effect = Effect::of(&base, &figures(ledger, case));
            has_failed || effect.is_some_and(|effect| effect.half_width_pct() <= args.within)
        })
    })
}

/// The figure that effects are about, in each round of a case.
pub fn figures(ledger: &Ledger, case: usize) -> Vec<f64> {
    let (rounds, _) = ledger.of_case(case);
    rounds.iter().map(|run| run.number(FIGURE).unwrap_or(f64::NAN)).collect()
}
