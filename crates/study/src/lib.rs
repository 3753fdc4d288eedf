//! Studies: training runs that are repeated several times, interleaved, and compared; and predictions about runs that
//! were not made.
//!
//! | file | purpose |
//! |---|---|
//! | [`spec`] | changes one setting of a run after the other |
//! | [`plan`] | makes the list of cases, and the order of all runs |
//! | [`execute`] | makes the runs |
//! | [`ledger`] | keeps the results of finished runs |
//! | [`rank`] | decides which case is better, and which differences are noise |
//! | [`sweep`], [`show`] | `paceline sweep`, and its result as table, files and chart |
//! | [`study`], [`step`], [`flags`] | the common parts of all studies |
//! | [`studies`] | studies with reports of their own |
//! | [`lab`] | `paceline lab`: which option helps, on which workload |
//! | [`predict`] | `paceline predict`: links and ranks with which nothing was run |
//!
//! All times come from the runs' own summaries; nothing here measures.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod execute;
pub mod flags;
pub mod lab;
pub mod ledger;
pub mod plan;
pub mod predict;
pub mod rank;
pub mod show;
pub mod spec;
pub mod step;
pub mod studies;
pub mod study;
pub mod sweep;

use std::time::Duration;

use paceline_failure::{Failure, Result};
use paceline_launch::environment::Placement;

/// The largest number of rounds.
const MAX_ROUNDS: usize = 1000;
/// The largest time limit of a run in seconds: a month.
const MAX_RUN_LIMIT: f64 = 2.6e6;

/// Checks both flags, and returns how long a run may take.
fn run_limit(rounds: usize, run_limit: f64) -> Result<Duration> {
    if !(1..=MAX_ROUNDS).contains(&rounds) {
        return Err(Failure::Usage(format!("--rounds {rounds}: pass 1 to {MAX_ROUNDS} rounds")));
    }
    if !(run_limit > 0.0 && run_limit <= MAX_RUN_LIMIT) {
        return Err(Failure::Usage(format!(
            "--run-limit {run_limit}: pass seconds above zero, at most {MAX_RUN_LIMIT}"
        )));
    }
    Ok(Duration::from_secs_f64(run_limit))
}

/// Fails if this process is a rank: a command that starts runs must not be part of another run.
fn refuse_ranks(what: &str, placement: Option<Placement>) -> Result<()> {
    placement.map_or(Ok(()), |placement| {
        Err(Failure::Usage(format!(
            "{what} starts ranks of its own, but another launcher has started {}; start it by itself, or {}",
            placement.place.world_size,
            placement.unset()
        )))
    })
}

/// The command line of this process, without the path of the program.
pub(crate) fn command_line() -> String {
    let args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    ["paceline".to_owned()].into_iter().chain(args).collect::<Vec<_>>().join(" ")
}

fn usage<T>(reason: impl Into<String>) -> Result<T> {
    Err(Failure::Usage(reason.into()))
}
