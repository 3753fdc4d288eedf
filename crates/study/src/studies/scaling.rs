//! `paceline bench scaling`: the same training on more and more ranks, with weak scaling (constant batch
//! per rank) and strong scaling (constant global batch).
//!
//! [`rows`] has the formulas, [`fit`] the laws of Amdahl and Gustafson, and [`verdict`] the conclusion.
//! [`table`] and [`chart`] show the results.

pub mod chart;
pub mod fit;
pub mod rows;
pub mod table;
pub mod verdict;

use clap::{Args, ValueEnum};
use fit::Fit;
use paceline_failure::Result;
use paceline_host::text::{line_width, plural, say, warn};
use paceline_launch::launcher;
use rows::{Mode, Row};
use serde::Serialize;

use crate::flags::TrainFlags;
use crate::plan::Case;
use crate::spec;
use crate::spec::Spec;
use crate::study::{Setting, Study, StudyArgs, check, csv_of, measuring, run_all, write_files};
use crate::usage;

/// The study, as `paceline bench` knows it.
pub const STUDY: Study = Study::new::<ScalingArgs>(
    "scaling",
    "How training speeds up with the number of ranks, and what limits it",
    |matches| scaling(&crate::study::flags_of(matches)),
);

const EXAMPLES: &str = "\
Examples:
  paceline bench scaling                              1, 2 and 4 ranks, weak and strong
  paceline bench scaling --model mlp --hidden-dim 1024 --charts charts
  paceline bench scaling --link 10gbit,50us           on a network that this machine does not have
  paceline bench scaling --nproc 1,2,4,8 --mode strong --global-batch-size 256 --json scaling.json
";

/// What stays the same when ranks are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModeName {
    /// The samples of each rank
    Weak,
    /// The samples of all ranks together
    Strong,
    /// Both, one after the other
    Both,
}

/// Flags of `paceline bench scaling`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct ScalingArgs {
    /// Numbers of ranks, separated by commas; 1 has to be among them
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,2,4",
        help_heading = "Study"
    )]
    pub nproc: Vec<usize>,
    /// What stays the same when ranks are added: the batch of each rank, or the global batch. Both
    /// begin with the batch of --batch-size or --global-batch-size on one rank
    #[arg(long, value_enum, default_value_t = ModeName::Both, help_heading = "Study")]
    pub mode: ModeName,
    /// What all studies have.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// One way of scaling: its rows, and what follows from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scaling {
    /// What stays the same.
    pub mode: Mode,
    /// One per number of ranks, ascending, from 1 on.
    pub rows: Vec<Row>,
    /// The serial fraction.
    pub fit: Fit,
    /// What limits scaling here.
    pub verdict: String,
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    setting: &'a Setting,
    strategy: &'a str,
    scalings: &'a [Scaling],
}

/// A configuration to run. Weak and strong scaling share their first one, that of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    ranks: usize,
    global_batch: usize,
}

/// `paceline bench scaling`.
fn scaling(args: &ScalingArgs) -> Result<u8> {
    check(&args.study)?;
    let ranks = resolve_ranks(&args.nproc)?;
    let base = spec::resolve(&at(&args.train.0, 1, None))?;
    let modes = match args.mode {
        ModeName::Weak => vec![Mode::Weak],
        ModeName::Strong => vec![Mode::Strong],
        ModeName::Both => vec![Mode::Weak, Mode::Strong],
    };
    let mut points: Vec<Point> = Vec::new();
    for (mode, &ranks) in modes.iter().flat_map(|mode| ranks.iter().map(move |r| (mode, r))) {
        let global_batch = mode.global_batch(base.global_batch_size, ranks)?;
        let point = Point { ranks, global_batch };
        if !points.contains(&point) {
            points.push(point);
        }
    }
    let mut cases = Vec::new();
    let mut warnings: Vec<String> = Vec::new();
    for &Point { ranks, global_batch } in &points {
        let name = format!("{}, {global_batch} samples", plural(ranks, "rank"));
        let (spec, config) = measuring(&at(&args.train.0, ranks, Some(global_batch)))?;
        warnings.extend(config.warnings);
        cases.push(Case { name, values: Vec::new(), spec });
    }
    warnings.dedup();
    for warning in warnings {
        warn(&warning);
    }
    let found = run_all(&args.study, &cases)?;
    let params = found[0][0].count("params");
    let setting = Setting::new(&args.study, &base, params);
    // A single rank may train without a strategy, so the name is taken from the run with the most ranks.
    let strategy = found.iter().flatten().max_by_key(|run| run.count("world_size"));
    let strategy = strategy.map_or("", |run| run.text("strategy"));
    let mut scalings = Vec::new();
    for mode in modes {
        let of = |ranks: usize| -> Result<_> {
            let global_batch = mode.global_batch(base.global_batch_size, ranks)?;
            let is_it = |point: &Point| *point == Point { ranks, global_batch };
            let at = points.iter().position(is_it);
            let rounds = at.map_or(&[][..], |at| &found[at]);
            Row::measured(ranks, global_batch, rounds)
        };
        let measured = ranks.iter().map(|&ranks| of(ranks)).collect::<Result<Vec<_>>>()?;
        let rows = rows::rows(mode, &measured, setting.threads, setting.cores);
        let fit = Fit::of(mode, &rows);
        let verdict = verdict::verdict(mode, &rows, &setting);
        scalings.push(Scaling { mode, rows, fit, verdict });
    }
    say(&format!("Scaling of {strategy}: {}", setting.words()));
    for scaling in &scalings {
        say(&format!("\n{}", table::text(scaling, &setting, line_width())));
    }
    let report = Report { setting: &setting, strategy, scalings: &scalings };
    let rows: Vec<&Row> = scalings.iter().flat_map(|scaling| &scaling.rows).collect();
    let chart = |scaling: &Scaling| {
        let name = format!("{}_scaling", scaling.mode.name());
        (name, chart::chart(scaling, strategy, &setting))
    };
    let charts: Vec<_> = scalings.iter().map(chart).collect();
    write_files(&args.study, &report, &csv_of(&rows)?, &charts)?;
    Ok(0)
}

/// The numbers of ranks, ascending, each once.
fn resolve_ranks(nproc: &[usize]) -> Result<Vec<usize>> {
    for &ranks in nproc {
        launcher::check_num_ranks("--nproc", ranks)?;
    }
    let mut ranks = nproc.to_vec();
    ranks.sort_unstable();
    ranks.dedup();
    match ranks.as_slice() {
        [1, _, ..] => Ok(ranks),
        [1] => usage(
            "--nproc 1: nothing scales with one number of ranks; pass another one too, as 1,2",
        ),
        _ => {
            let listed = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
            usage(format!("--nproc {listed}: speed-up is against one rank; pass 1,{listed}"))
        }
    }
}

/// The flags for `ranks` ranks, with the user's own batch or with this one.
fn at(given: &Spec, ranks: usize, global_batch: Option<usize>) -> Spec {
    let flags = given.with("nproc", ranks);
    match global_batch {
        Some(batch) => flags.without(&["batch-size"]).with("global-batch-size", batch),
        None => flags,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_sorted_and_begin_with_one() {
        assert_eq!(resolve_ranks(&[4, 1, 2, 2]).unwrap(), [1, 2, 4]);
        for (bad, word) in [(&[2, 4][..], "pass 1,2,4"), (&[1], "1,2"), (&[0, 1], "--nproc 0")] {
            let error = resolve_ranks(bad).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
