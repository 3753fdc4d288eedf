//! Studies: training runs, repeated in alternating rounds and compared; and predictions about runs that were not made.
//!
//! | file | purpose |
//! |---|---|
//! | [`spec`] | changes one setting of a run after the other |
//! | [`cases`], [`scene`] | make the list of cases, and the order of all runs |
//! | [`execute`] | makes the runs |
//! | [`ledger`] | keeps the results of finished runs |
//! | [`noise`] | the one rule that tells differences from noise |
//! | [`outcome`], [`report`] | the results of all studies: rows and effects; text, page, JSON, CSV and charts |
//! | [`sweep`], [`grid`] | `paceline sweep`, and the effects of each varied flag |
//! | [`study`], [`flags`] | the common parts of the studies of `paceline bench` |
//! | [`studies`] | those studies, and comparisons of strategies |
//! | [`lab`] | `paceline lab`: which option helps, on which workload |
//! | [`plan`] | `paceline plan`: every layout of a step on stated hardware |
//! | [`predict`] | `paceline predict`: links and ranks with which nothing was run |
//!
//! All times come from the runs' own summaries; nothing here measures.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod answer;
pub mod cases;
pub mod execute;
pub mod flags;
pub mod grid;
pub mod lab;
pub mod ledger;
pub mod noise;
pub mod outcome;
pub mod plan;
pub mod predict;
pub mod report;
pub mod scene;
pub mod spec;
pub mod studies;
pub mod study;
pub mod sweep;

use paceline_failure::numbers::within;
use paceline_failure::{Failure, Result, usage};
use paceline_launch::environment::Placement;

/// The largest number of rounds.
const MAX_ROUNDS: usize = 1000;
/// The largest time limit of a run in seconds: a month.
const MAX_RUN_LIMIT: f64 = 2.6e6;

/// A parser of `--rounds`.
fn rounds(text: &str) -> std::result::Result<usize, String> {
    within(1, MAX_ROUNDS)(text)
}

/// A parser of the seconds of `--run-limit`.
fn seconds(text: &str) -> std::result::Result<f64, String> {
    within(0.001, MAX_RUN_LIMIT)(text)
}

/// Fails if this process is a rank: a command that starts runs cannot be part of one.
fn refuse_ranks(what: &str, placement: Option<Placement>) -> Result<()> {
    placement.map_or(Ok(()), |placement| {
        Err(Failure::Usage(format!(
            "{what} starts ranks of its own, but another launcher has started {}; start it by itself, or {}",
            placement.place.world_size,
            placement.unset()
        )))
    })
}

/// The command line of this process, as a shell reads it, without the path of the program.
pub(crate) fn command_line() -> String {
    let args = std::env::args_os().skip(1).map(|arg| quoted(&arg.to_string_lossy()));
    ["paceline".to_owned()].into_iter().chain(args).collect::<Vec<_>>().join(" ")
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_=./,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}
