//! Makes the runs of an experiment, in rounds, until the effects are known well enough.
//!
//! Every round runs every variant once; the order reverses every round. After the third round it goes on only as long as an
//! interval is wider than requested, and as there are rounds and time left. Then the variants whose effect is unclear go on
//! with their bases, for twice that time. Only the records decide, so an experiment that was interrupted goes on the same way.

use std::collections::BTreeSet;
use std::time::Duration;

use paceline_failure::Result;

use super::args::LabArgs;
use crate::cases::{self, Case};
use crate::execute;
use crate::ledger::Ledger;
use crate::noise::{Effect, MIN_ROUNDS};
use crate::outcome::{Outcome, Row};
use crate::scene::Scene;

/// The time for unclear effects ends at so many times `--seconds`.
const UNCLEAR_TIMES: f64 = 3.0;

/// Makes the runs. Those that the ledger has already are not made again.
pub fn measure(
    args: &LabArgs,
    experiment: &str,
    scenes: &[Scene],
    (cases, of_variants): (&[Case], &[usize]),
    ledger: &mut Ledger,
) -> Result<Outcome> {
    let limit = Duration::from_secs_f64(args.run_limit);
    let mut rounds = MIN_ROUNDS.min(args.rounds);
    let mut runs = cases::order(cases.len(), rounds);
    loop {
        execute::make(cases, runs, limit, None, ledger)?;
        let outcome = Outcome::new(experiment, scenes, of_variants, rounds, ledger);
        let seconds = ledger.of_rounds(rounds).map(|record| record.seconds).sum();
        let wanted = wanted(args, &outcome, of_variants, seconds);
        if rounds >= args.rounds || wanted.is_empty() {
            return Ok(outcome);
        }
        rounds += 1;
        runs = cases::order(cases.len(), rounds);
        runs.retain(|(_, (round, case))| round + 1 == rounds && wanted.contains(case));
    }
}

/// The cases of the next round, after so many seconds.
fn wanted(args: &LabArgs, of: &Outcome, of_variants: &[usize], seconds: f64) -> BTreeSet<usize> {
    let is_known = |row: &Row| {
        let effect = row.effect.is_some_and(|of| of.half_width_pct() <= args.within);
        row.is_base || !row.is_timed || row.failure.is_some() || effect
    };
    let is_unclear = |row: &Row| row.effect.as_ref().is_some_and(Effect::is_unclear);
    if seconds <= args.seconds {
        let all = if of.rows.iter().all(is_known) { &[] } else { of_variants };
        return all.iter().copied().collect();
    }
    let (mut base, mut wanted) = (0, BTreeSet::new());
    for (row, case) in of.rows.iter().zip(of_variants) {
        base = if row.is_base { *case } else { base };
        if is_unclear(row) && seconds <= UNCLEAR_TIMES * args.seconds {
            wanted.extend([base, *case]);
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};
    use serde_json::json;

    use super::*;
    use crate::outcome::tests::outcome;

    /// A variant that is known, one that is unclear, and the base, in three rounds.
    #[test]
    fn unclear_variants_go_on_with_their_base() {
        let rounds = |all: [f64; 3]| all.map(|of| json!({ "samples_per_s": of })).to_vec();
        let of = outcome(&[
            ("base", rounds([100.0, 102.0, 99.0])),
            ("twice", rounds([200.0, 203.0, 197.0])),
            ("noisy", rounds([20.0, 300.0, 120.0])),
        ]);
        let flags = ["lab", "buckets", "--seconds", "10"];
        let typed = LabArgs::augment_args(Command::new("lab")).get_matches_from(flags);
        let args = LabArgs::from_arg_matches(&typed).unwrap();
        // Variants have the cases 3, 4 and 5.
        let wanted = |seconds| Vec::from_iter(wanted(&args, &of, &[3, 4, 5], seconds));
        assert_eq!(wanted(9.0), [3, 4, 5]);
        assert_eq!(wanted(11.0), [3, 5]);
        assert_eq!(wanted(31.0), [0; 0]);
    }
}
