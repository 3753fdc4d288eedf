//! Makes the runs of an experiment, in rounds, until the effects are known well enough.
//!
//! Every round runs every variant once; the order reverses every round. After the third round it goes on only as long as an
//! interval is wider than requested, and as there are rounds and time left.

use std::time::{Duration, Instant};

use paceline_failure::Result;

use super::args::LabArgs;
use crate::execute;
use crate::ledger::Ledger;
use crate::noise::MIN_ROUNDS;
use crate::outcome::{Outcome, Row};
use crate::plan::Case;
use crate::scene::Scene;

/// Makes the runs. Those that the ledger has already are not made again.
pub fn measure(
    args: &LabArgs,
    experiment: &str,
    scenes: &[Scene],
    (cases, of_variants): (&[Case], &[usize]),
    ledger: &mut Ledger,
) -> Result<Outcome> {
    let limit = Duration::from_secs_f64(args.run_limit);
    let (begin, budget) = (Instant::now(), Duration::from_secs_f64(args.seconds));
    let made = ledger.records.iter().map(|record| record.round + 1).max().unwrap_or(0);
    let mut rounds = MIN_ROUNDS.max(made).min(args.rounds);
    loop {
        execute::make(cases, rounds, limit, None, ledger)?;
        let outcome = Outcome::new(experiment, scenes, of_variants, rounds, ledger);
        let is_known = |row: &Row| {
            let effect = row.effect.is_some_and(|of| of.half_width_pct() <= args.within);
            row.is_base || !row.is_timed || row.failure.is_some() || effect
        };
        let is_over = rounds >= args.rounds || begin.elapsed() > budget;
        if is_over || outcome.rows.iter().all(is_known) {
            return Ok(outcome);
        }
        rounds = (rounds + 1).min(args.rounds);
    }
}
