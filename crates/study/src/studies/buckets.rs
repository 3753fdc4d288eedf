//! `paceline bench buckets`: the same training with larger and larger buckets, compared with one
//! all-reduce per parameter and with a single all-reduce of all gradients.
//!
//! [`fit`] has the formula of the overhead; [`table`] and [`chart`] show the results.

pub mod chart;
pub mod fit;
pub mod table;

use clap::Args;
use fit::Fit;
use paceline_choices::strategies::STRATEGIES;
use paceline_failure::Result;
use paceline_host::text::{hundredths, line_width, say, warn};
use paceline_launch::launcher;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::insight::anatomy::Anatomy;
use serde::Serialize;

use crate::flags::TrainFlags;
use crate::plan::Case;
use crate::rank;
use crate::studies::bucket_cost::{MIB, distinct};
use crate::study::{
    Setting, Study, StudyArgs, check, csv_of, measuring, median_of, run_all, write_files,
};
use crate::usage;

/// The study, as `paceline bench` knows it.
pub const STUDY: Study =
    Study::new::<BucketsArgs>("buckets", "Which bucket size hides communication best", |matches| {
        buckets(&crate::study::flags_of(matches))
    });

const EXAMPLES: &str = "\
Examples:
  paceline bench buckets                              2 ranks, a CNN
  paceline bench buckets --link 10gbit,50us --channels 64 128 256 --hidden 2048
  paceline bench buckets --model mlp --sizes 1,2,4,8,16,32,64,128 --charts charts
";

/// Flags of `paceline bench buckets`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct BucketsArgs {
    /// Bucket sizes in MiB, separated by commas [default: 1, 10, 100, 1000, and powers of
    /// two from 1/32 of the gradients up to the first one that holds them all]
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

/// The published sizes, in MiB.
pub(super) const COARSE: [f64; 4] = [1.0, 10.0, 100.0, 1000.0];
/// The sizes in powers of two begin with at most this fraction (1/32) of the gradients.
const SMALLEST_PART: f64 = 32.0;
/// The largest number of sizes.
const MAX_SIZES: usize = 100;
/// Strategies that buckets are compared with, and what they are.
const BASELINES: [(&str, &str); 2] =
    [("simple_ddp", "one all-reduce per parameter"), ("flat_ddp", "one all-reduce of everything")];

/// The results of one bucket size, or of one of the strategies that buckets are compared with. Times are
/// per step, in milliseconds, and medians over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The strategy.
    pub strategy: String,
    /// The bucket size in MiB; `None` for a strategy without buckets.
    pub bucket_mb: Option<f64>,
    /// All-reduces of gradients per step; `None` if the runs do not count them.
    pub num_buckets: Option<f64>,
    /// The time of a step of the slowest rank.
    pub step_ms: f64,
    /// Exposed communication as a percentage of the step.
    pub exposed_pct: f64,
    /// Exposed communication: the time that the main thread was blocked on communication.
    pub exposed_ms: f64,
    /// Hidden communication: the communication while the main thread computed.
    pub hidden_ms: f64,
}

impl Row {
    /// The row of a case, from the summaries of its rounds.
    fn of(bucket_mb: Option<f64>, rounds: &[RunSummary]) -> Result<Self> {
        let step_ms = median_of(rounds, "step_ms_median")?;
        let exposed_ms = median_of(rounds, "comm_exposed_ms")?;
        Ok(Self {
            strategy: rounds.first().map_or("", |run| run.text("strategy")).to_owned(),
            bucket_mb,
            num_buckets: rank::median(rounds.iter().map(num_buckets)).map(hundredths),
            step_ms,
            exposed_pct: 100.0 * exposed_ms / step_ms,
            exposed_ms,
            hidden_ms: median_of(rounds, "comm_hidden_ms")?,
        })
    }
}

/// All-reduces of gradients per step.
fn num_buckets(run: &RunSummary) -> Option<f64> {
    match run.part::<Anatomy>("anatomy").buckets.len() {
        // Each step has one more operation, which adds up the losses.
        0 => run.number("comm_ops_per_step").map(|count| count - 1.0),
        count => Some(count as f64),
    }
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    setting: &'a Setting,
    ranks: usize,
    rows: &'a [Row],
    fit: &'a Fit,
    /// The size with the shortest step.
    shortest_step_mb: Option<f64>,
    /// The size with the least exposed communication, which is what the formula predicts.
    least_exposed_mb: Option<f64>,
}

/// `paceline bench buckets`.
fn buckets(args: &BucketsArgs) -> Result<u8> {
    check(&args.study)?;
    launcher::check_num_ranks("--nproc", args.nproc)?;
    if args.nproc == 1 {
        return usage("--nproc 1: one rank has nothing to communicate; pass 2 or more");
    }
    if args.train.0.has("bucket-cap-mb") {
        return usage("--bucket-cap-mb is what the study varies; pass --sizes instead");
    }
    let given = args.train.0.with("nproc", args.nproc).with_default("strategy", "ddp");
    let (measured, config) = measuring(&given)?;
    let built = config.data.open_train(config.seed)?;
    let params = config.model.build(built.as_ref(), args.nproc)?.layout.num_trained_params() as u64;
    let (sizes, note) = distinct(resolve_sizes(&args.sizes, 4 * params)?, 4 * params);
    let strategy = config.strategy.name();
    if !STRATEGIES.readers("bucket-cap-mb").contains(&strategy) {
        return usage(format!(
            "--strategy {strategy} has no buckets; pass ddp or another one that has"
        ));
    }
    for warning in &config.warnings {
        warn(warning);
    }
    let of_size = sizes.into_iter().map(|mb| {
        let name = format!("{strategy}, buckets of {mb} MiB");
        (Some(mb), Case::new(name, measured.with("bucket-cap-mb", mb)))
    });
    let baselines = BASELINES.into_iter().map(|(name, what)| {
        let without = measured.without(&["first-bucket-mb", "no-gradient-view", "top-k"]);
        (None, Case::new(format!("{name}, {what}"), without.with("strategy", name)))
    });
    let (sizes, cases): (Vec<_>, Vec<_>) = of_size.chain(baselines).unzip();
    let cases = cases.into_iter().collect::<Result<Vec<Case>>>()?;
    let found = run_all(&args.study, &cases)?;
    let setting = Setting::new(&args.study, &config, params);
    let rows = sizes.iter().zip(&found).map(|(mb, rounds)| Row::of(*mb, rounds));
    let rows = rows.collect::<Result<Vec<Row>>>()?;
    let fit = Fit::of(&rows, 4 * params);
    say(&format!("Buckets of {strategy}, {} ranks: {}", args.nproc, setting.words()));
    note.iter().for_each(|note| say(note));
    say(&format!("\n{}", table::text(&rows, &fit, params, line_width())));
    let report = Report {
        setting: &setting,
        ranks: args.nproc,
        rows: &rows,
        fit: &fit,
        shortest_step_mb: best(&rows, |row| row.step_ms).and_then(|row| row.bucket_mb),
        least_exposed_mb: best(&rows, |row| row.exposed_ms).and_then(|row| row.bucket_mb),
    };
    let charts = [
        ("buckets_step".to_owned(), chart::step(&rows, &setting, args.nproc)),
        ("buckets_exposed".to_owned(), chart::exposed(&rows, &fit, &setting, args.nproc)),
    ];
    write_files(&args.study, &report, &csv_of(&rows)?, &charts)?;
    Ok(0)
}

/// The row with buckets for which `of` is smallest.
fn best(rows: &[Row], of: impl Fn(&Row) -> f64) -> Option<&Row> {
    let with_buckets = rows.iter().filter(|row| row.bucket_mb.is_some());
    with_buckets.min_by(|a, b| of(a).total_cmp(&of(b)))
}

/// The sizes, ascending and without duplicates. By default: the published sizes, and powers of two from a
/// small part of the gradients up to the first one that holds all of them, since larger ones change
/// nothing.
fn resolve_sizes(given: &[f64], gradient_bytes: u64) -> Result<Vec<f64>> {
    let mut sizes = check_sizes(given)?;
    if sizes.is_empty() {
        let all = gradient_bytes as f64 / MIB;
        let first = (all / SMALLEST_PART).log2().floor() as i32;
        let powers = (first..).map(|power| 2f64.powi(power));
        let fine = powers.take_while(|mb| *mb < 2.0 * all && *mb < COARSE[3]);
        sizes = check_sizes(&COARSE.into_iter().chain(fine).collect::<Vec<_>>())?;
    }
    Ok(sizes)
}

/// The sizes that the user passed, ascending and without duplicates.
pub(super) fn check_sizes(given: &[f64]) -> Result<Vec<f64>> {
    if let Some(bad) = given.iter().find(|mb| !(**mb > 0.0 && mb.is_finite())) {
        return usage(format!("--sizes {bad}: pass sizes in MiB above zero, as 1,2,4"));
    }
    let mut sizes = given.to_vec();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    if sizes.len() > MAX_SIZES {
        return usage(format!("--sizes: {} sizes are too many; pass {MAX_SIZES}", sizes.len()));
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows whose exposed communication follows the formula, with the given times of an operation and
    /// of all bytes, in milliseconds.
    pub(super) fn rows(buckets: &[f64], op_ms: f64, all_ms: f64) -> Vec<Row> {
        let row = |&count: &f64| {
            let exposed_ms = count * op_ms + all_ms / count;
            Row {
                strategy: "ddp".into(),
                bucket_mb: Some(64.0 / count),
                num_buckets: Some(count),
                step_ms: 100.0 + exposed_ms,
                exposed_pct: 100.0 * exposed_ms / (100.0 + exposed_ms),
                exposed_ms,
                hidden_ms: 2.0,
            }
        };
        buckets.iter().map(row).collect()
    }

    #[test]
    fn the_default_sizes_end_where_one_bucket_holds_all() {
        assert_eq!(
            resolve_sizes(&[], 2_752_552).unwrap(),
            [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0, 1000.0]
        );
        let many = resolve_sizes(&[], 400_000_000).unwrap();
        let expected = [1., 8., 10., 16., 32., 64., 100., 128., 256., 512., 1000.];
        assert_eq!(many, expected);
        assert_eq!(resolve_sizes(&[], u64::MAX).unwrap().last(), Some(&1000.0));
        assert_eq!(resolve_sizes(&[4.0, 0.5, 4.0], 1).unwrap(), [0.5, 4.0]);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(resolve_sizes(&[1.0, bad], 1).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_best_row_has_buckets() {
        let mut rows = rows(&[1.0, 4.0, 16.0], 0.5, 8.0);
        let mut naive = rows[0].clone();
        (naive.bucket_mb, naive.step_ms) = (None, 1.0);
        rows.push(naive);
        assert_eq!(best(&rows, |row| row.step_ms).unwrap().num_buckets, Some(4.0));
    }
}
