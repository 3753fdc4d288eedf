//! `paceline bench naive-ddp`: four ways to synchronize gradients, from naive to bucketed.
//!
//! Naive is one all-reduce per parameter after the backward pass, flat is one all-reduce of everything, overlapped is one
//! asynchronous all-reduce per parameter during the backward pass, and bucketed is one per bucket. [`theory`] has the best
//! bucket size by formula. [`best`] measures it beside the best measured one. [`table`] shows all of it.

pub mod best;
pub mod table;
pub mod theory;

use best::SideBySide;
use clap::Args;
use paceline_failure::{Failure, Result};
use paceline_host::text::{hundredths, line_width, say, warn};
use paceline_launch::launcher;
use paceline_model::Layout;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_strategies::{BucketCaps, plan_buckets};
use serde::Serialize;
use theory::Theory;

use crate::flags::TrainFlags;
use crate::plan::Case;
use crate::rank::Spread;
use crate::spec::Spec;
use crate::studies::bucket_cost::{MIB, distinct};
use crate::studies::buckets::{self, check_sizes};
use crate::study::{
    Setting, Study, StudyArgs, check, csv_of, measuring, median_of, run_all, with_strategy,
    write_files,
};
use crate::usage;

/// The study, as `paceline bench` knows it.
pub const STUDY: Study = Study::new::<NaiveDdpArgs>(
    "naive-ddp",
    "Naive, flat, overlapped and bucketed synchronization, compared",
    |matches| naive_ddp(&crate::study::flags_of(matches)),
);

const EXAMPLES: &str = "\
Examples:
  paceline bench naive-ddp                            2 ranks, a CNN
  paceline bench naive-ddp --link 10gbit,50us --model mlp --num-layers 12 --hidden-dim 512
  paceline bench naive-ddp --model mlp --sizes 1,2,4,8 --json naive.json --charts charts
";

/// Flags of `paceline bench naive-ddp`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct NaiveDdpArgs {
    /// Bucket sizes in MiB, separated by commas [default: 1,10,100,1000]
    #[arg(long, value_name = "MiB", value_delimiter = ',', help_heading = "Study")]
    pub sizes: Vec<f64>,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Study")]
    pub nproc: usize,
    /// What all studies have.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// The cases without buckets: what they are, and the strategy.
const PLAIN: [(&str, &str); 3] =
    [("naive", "simple_ddp"), ("flat", "flat_ddp"), ("overlapped", "simple_ddp_async")];
/// The cases of [`PLAIN`] whose operations run while nobody computes.
const BLOCKING: usize = 2;
/// The strategy with buckets.
const BUCKETED: &str = "ddp";
/// Flags that the study sets, and what to do instead.
const SET_HERE: [(&str, &str); 3] = [
    ("strategy", "the study runs naive, flat, overlapped and bucketed strategies; leave it out"),
    ("bucket-cap-mb", "it is what the study varies; pass --sizes instead"),
    ("first-bucket-mb", "the first bucket is as large as the others; pass --sizes instead"),
];

/// The results of a case. Times are per step, in milliseconds, and medians over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What it is.
    pub case: String,
    /// The strategy.
    pub strategy: String,
    /// The bucket size in MiB; `None` for a strategy without buckets.
    pub bucket_mb: Option<f64>,
    /// The number of buckets; `None` for a strategy without.
    pub num_buckets: Option<usize>,
    /// The time of a step of the slowest rank.
    pub step_ms: f64,
    /// The shortest of the rounds' step times.
    pub step_ms_min: f64,
    /// The longest of the rounds' step times.
    pub step_ms_max: f64,
    /// How many rounds there are.
    pub rounds: usize,
    /// Exposed communication in percent of the step.
    pub exposed_pct: f64,
    /// Exposed communication: the time that the main thread was blocked on communication.
    pub exposed_ms: f64,
    /// Hidden communication: the communication while the main thread computed.
    pub hidden_ms: f64,
    /// Operations of a step, with the one that adds up the loss.
    pub ops_per_step: f64,
}

impl Row {
    /// The row of a case, from the summaries of its rounds.
    fn of(plan: &Planned, rounds: &[RunSummary]) -> Result<Self> {
        let step = Spread::of(rounds.iter().map(|run| run.number("step_ms_median")))
            .ok_or_else(|| Failure::Run("a summary lacks step_ms_median".into()))?;
        Ok(Self {
            case: plan.case.name.clone(),
            strategy: rounds.first().map_or("", |run| run.text("strategy")).to_owned(),
            bucket_mb: plan.bucket_mb,
            num_buckets: plan.num_buckets,
            step_ms: step.median,
            step_ms_min: step.min,
            step_ms_max: step.max,
            rounds: step.rounds,
            exposed_pct: median_of(rounds, "comm_overhead_pct")?,
            exposed_ms: median_of(rounds, "comm_exposed_ms")?,
            hidden_ms: median_of(rounds, "comm_hidden_ms")?,
            ops_per_step: hundredths(median_of(rounds, "comm_ops_per_step")?),
        })
    }

    /// The step times of the rounds.
    fn step(&self) -> Spread {
        Spread {
            median: self.step_ms,
            min: self.step_ms_min,
            max: self.step_ms_max,
            rounds: self.rounds,
        }
    }
}

/// A case before it has run.
#[derive(Clone, Debug)]
struct Planned {
    case: Case,
    bucket_mb: Option<f64>,
    num_buckets: Option<usize>,
}

/// Makes cases for one model.
#[derive(Debug)]
struct Planner<'a> {
    /// The flags of the runs, with the strategy [`BUCKETED`].
    flags: &'a Spec,
    layout: &'a Layout,
    elem_bytes: usize,
}

impl Planner<'_> {
    fn plain(&self, (name, strategy): (&str, &str)) -> Result<Planned> {
        let case = Case::new(name, with_strategy(self.flags, strategy)?)?;
        Ok(Planned { case, bucket_mb: None, num_buckets: None })
    }

    fn bucketed(&self, mb: f64) -> Result<Planned> {
        let flags = self.flags.with("bucket-cap-mb", mb).with("first-bucket-mb", mb);
        let case = Case::new(format!("bucketed, {mb} MiB"), flags)?;
        Ok(Planned { case, bucket_mb: Some(mb), num_buckets: Some(self.begins(mb).len()) })
    }

    /// Where the buckets of this size begin. Sizes with the same beginnings make the same buckets.
    fn begins(&self, mb: f64) -> Vec<usize> {
        let bytes = (mb * MIB) as usize;
        let buckets =
            plan_buckets(self.layout, self.elem_bytes, BucketCaps { first_bytes: bytes, bytes });
        buckets.into_iter().map(|bucket| bucket.range.start).collect()
    }
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    setting: &'a Setting,
    ranks: usize,
    gradient_bytes: u64,
    rows: &'a [Row],
    theory: &'a Theory,
    /// The size with the shortest step of those that were asked for.
    measured_best_mb: Option<f64>,
    best: &'a Option<SideBySide>,
}

/// `paceline bench naive-ddp`.
fn naive_ddp(args: &NaiveDdpArgs) -> Result<u8> {
    check(&args.study)?;
    launcher::check_num_ranks("--nproc", args.nproc)?;
    if args.nproc == 1 {
        return usage("--nproc 1: one rank has nothing to communicate; pass 2 or more");
    }
    for (flag, instead) in SET_HERE {
        if args.train.0.has(flag) {
            return usage(format!("--{flag}: {instead}"));
        }
    }
    let given = if args.sizes.is_empty() { &buckets::COARSE[..] } else { &args.sizes };
    let sizes = check_sizes(given)?;
    let flags = args.train.0.with("nproc", args.nproc).with("strategy", BUCKETED);
    let (flags, config) = measuring(&flags)?;
    let built = config.data.open_train(config.seed)?;
    let layout = config.model.build(built.as_ref(), args.nproc)?.layout;
    let params = layout.num_trained_params() as u64;
    let elem_bytes = config.strategy.options.precision.grads.size_bytes();
    let gradient_bytes = params * elem_bytes as u64;
    let (sizes, note) = distinct(sizes, gradient_bytes);
    let planner = Planner { flags: &flags, layout: &layout, elem_bytes };
    let plain = PLAIN.into_iter().map(|plain| planner.plain(plain));
    let bucketed = sizes.iter().map(|mb| planner.bucketed(*mb));
    let planned = plain.chain(bucketed).collect::<Result<Vec<Planned>>>()?;
    for warning in &config.warnings {
        warn(warning);
    }
    let cases: Vec<Case> = planned.iter().map(|of| of.case.clone()).collect();
    let found = run_all(&args.study, &cases)?;
    let rows = planned.iter().zip(&found).map(|(of, rounds)| Row::of(of, rounds));
    let rows = rows.collect::<Result<Vec<Row>>>()?;
    let theory = match config.comm.link {
        Some(link) => {
            Theory::of_link(link, config.comm.algorithm, config.world_size, gradient_bytes)
        }
        None => {
            let blocking: Vec<&[RunSummary]> =
                found[..BLOCKING].iter().map(Vec::as_slice).collect();
            Theory::of_runs(&blocking, gradient_bytes)
        }
    };
    let best = SideBySide::measure(&args.study, &planner, &rows, &theory)?;
    let setting = Setting::new(&args.study, &config, params);
    say(&format!("Synchronization of gradients, {} ranks: {}", args.nproc, setting.words()));
    note.iter().for_each(|note| say(note));
    say(&format!(
        "\n{}",
        table::text(&rows, &theory, best.as_ref(), &setting, gradient_bytes, line_width())
    ));
    let report = Report {
        setting: &setting,
        ranks: args.nproc,
        gradient_bytes,
        rows: &rows,
        theory: &theory,
        measured_best_mb: best::measured(&rows).and_then(|row| row.bucket_mb),
        best: &best,
    };
    let chart = ("naive_ddp_step".to_owned(), table::chart(&rows, &setting, args.nproc));
    write_files(&args.study, &report, &csv_of(&rows)?, &[chart])?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of the four ways, with steps of these milliseconds in the middle of a range of 1 ms.
    pub fn rows(bucketed: &[(f64, usize, f64)]) -> Vec<Row> {
        let row = |(case, strategy): (&str, &str), step_ms: f64| Row {
            case: case.to_owned(),
            strategy: strategy.to_owned(),
            bucket_mb: None,
            num_buckets: None,
            step_ms,
            step_ms_min: step_ms - 0.5,
            step_ms_max: step_ms + 0.5,
            rounds: 3,
            exposed_pct: 100.0 * (step_ms - 10.0) / step_ms,
            exposed_ms: step_ms - 10.0,
            hidden_ms: 0.0,
            ops_per_step: 27.0,
        };
        let plain = PLAIN.into_iter().zip([30.0, 26.0, 20.0]).map(|(plain, ms)| row(plain, ms));
        let bucketed = bucketed.iter().map(|&(mb, num, ms)| Row {
            bucket_mb: Some(mb),
            num_buckets: Some(num),
            ops_per_step: num as f64 + 1.0,
            hidden_ms: 4.0,
            ..row((&format!("bucketed, {mb} MiB"), BUCKETED), ms)
        });
        plain.chain(bucketed).collect()
    }
}
