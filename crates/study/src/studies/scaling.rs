//! `paceline bench scaling`: the same training on more and more ranks, with weak scaling (constant batch
//! per rank) and strong scaling (constant global batch).
//!
//! [`speedup`] has the formulas, [`fit`] the laws of Amdahl and Gustafson, and [`verdict`] the conclusion.
//! [`table`] and [`chart`] show the results.

pub mod chart;
pub mod fit;
pub mod speedup;
pub mod table;
pub mod verdict;

use clap::{Args, ValueEnum};
use fit::Fit;
use paceline_failure::Result;
use paceline_host::text::{line_width, plural};
use paceline_launch::launcher;
use paceline_table::table::Table;
use serde::Serialize;
use speedup::{Mode, Row};

use crate::flags::TrainFlags;
use crate::plan::Case;
use crate::spec::{self, Spec};
use crate::study::{
    Findings, Measured, Setting, Study, StudyArgs, check, measuring, run_all, warn_of,
};
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

/// The quantity that stays the same when ranks are added.
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
#[command(before_help = EXAMPLES, allow_negative_numbers = true, next_help_heading = "Study")]
pub struct ScalingArgs {
    /// Numbers of ranks, separated by commas; 1 has to be among them
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,4")]
    pub nproc: Vec<usize>,
    /// Held constant when ranks are added: the batch of each rank, or the global batch. Both begin with the
    /// batch of --batch-size or --global-batch-size on one rank
    #[arg(long, value_enum, default_value_t = ModeName::Both)]
    pub mode: ModeName,
    /// The flags of all studies.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// One way of scaling: its rows, and the conclusions from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scaling {
    /// The quantity that stays the same.
    pub mode: Mode,
    /// One per number of ranks, ascending, from 1 on.
    #[serde(skip)]
    pub rows: Vec<Row>,
    /// The rows as a table.
    #[serde(flatten)]
    pub table: Table,
    /// The serial fraction.
    pub fit: Fit,
    /// The limit of scaling here.
    pub verdict: String,
}

impl Scaling {
    /// The conclusions from the measured rows, the first of which is that of one rank.
    fn of(mode: Mode, measured: &[Row], setting: &Setting) -> Self {
        let rows = speedup::against_one_rank(mode, measured, setting.threads, setting.cores);
        let verdict = verdict::verdict(mode, &rows, setting);
        let (table, fit) = (table::columns().table(&rows), Fit::of(mode, &rows));
        Self { mode, rows, table, fit, verdict }
    }
}

/// The contents of the JSON file, apart from the setting.
#[derive(Debug, Serialize)]
struct Report<'a> {
    strategy: &'a str,
    scalings: &'a [Scaling],
}

/// A configuration to run. Weak and strong scaling share their first one, that of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
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
    let points_of = |mode: Mode| -> Result<Vec<Point>> {
        let point = |&ranks: &usize| {
            let global_batch = mode.global_batch(base.global_batch_size, ranks)?;
            Ok(Point { ranks, global_batch })
        };
        ranks.iter().map(point).collect()
    };
    let by_mode = modes.iter().map(|mode| points_of(*mode)).collect::<Result<Vec<_>>>()?;
    let (mut cases, mut configs) = (Vec::new(), Vec::new());
    for &point in by_mode.iter().flatten() {
        if cases.iter().any(|(other, _)| *other == point) {
            continue;
        }
        let Point { ranks, global_batch } = point;
        let name = format!("{}, {global_batch} samples", plural(ranks, "rank"));
        let (spec, config) = measuring(&at(&args.train.0, ranks, Some(global_batch)))?;
        configs.push(config);
        cases.push((point, Case { name, values: Vec::new(), spec }));
    }
    warn_of(&configs);
    let cases = run_all(&args.study, args.study.output.as_deref(), cases)?;
    let setting = Setting::new(&args.study, &base, cases[0].rounds[0].count("params"));
    // A single rank may train without a strategy, so the name is taken from the run with the most ranks.
    let strategy = cases.iter().max_by_key(|case| case.of.ranks);
    let strategy = strategy.map_or(String::new(), Measured::strategy);
    let scaling = |(mode, points): (&Mode, &Vec<Point>)| {
        let of_mode = points.iter().filter_map(|of| cases.iter().find(|case| case.of == *of));
        let measured = of_mode.map(Row::measured).collect::<Result<Vec<_>>>()?;
        Ok(Scaling::of(*mode, &measured, &setting))
    };
    let scalings = modes.iter().zip(&by_mode).map(scaling).collect::<Result<Vec<_>>>()?;
    let all: Vec<&Row> = scalings.iter().flat_map(|scaling| &scaling.rows).collect();
    let text = scalings.iter().map(|scaling| table::text(scaling, &setting, line_width()));
    let chart = |scaling: &Scaling| {
        let name = format!("{}_scaling", scaling.mode.name());
        (name, chart::chart(scaling, &strategy, &setting))
    };
    let findings = Findings {
        heading: format!("Scaling of {strategy}: {}", setting.words()),
        notes: Vec::new(),
        text: text.collect::<Vec<_>>().join("\n\n"),
        report: Report { strategy: &strategy, scalings: &scalings },
        table: &table::columns().table(all),
        charts: scalings.iter().map(chart).collect(),
    };
    findings.publish(&args.study, &setting)
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
