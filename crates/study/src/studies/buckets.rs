//! `paceline bench buckets`: the same training with larger and larger buckets, compared with one
//! all-reduce per parameter and with a single all-reduce of all gradients.
//!
//! [`fit`] has the formula for the cost of buckets; [`table`] and [`chart`] show the results.

pub mod chart;
pub mod fit;
pub mod table;

use clap::Args;
use fit::Fit;
use paceline_choices::strategies::STRATEGIES;
use paceline_failure::Result;
use paceline_host::text::{hundredths, line_width};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::insight::anatomy::Anatomy;
use paceline_table::table::Table;
use serde::Serialize;

use crate::plan::Case;
use crate::rank;
use crate::step::StepTimes;
use crate::studies::bucket_cost::{MIB, distinct};
use crate::study::{
    Findings, Measured, SameRanksArgs, Setting, Study, layout_of, measuring, run_all, warn_of,
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
    /// The number of ranks, and the flags of all studies and of the runs.
    #[command(flatten)]
    pub same: SameRanksArgs,
}

/// The flag that the study sets, with advice.
const SET_HERE: [(&str, &str); 1] =
    [("bucket-cap-mb", "it is what the study varies; pass --sizes instead")];
/// The published sizes, in MiB.
pub(super) const COARSE: [f64; 4] = [1.0, 10.0, 100.0, 1000.0];
/// The sizes in powers of two begin with at most this fraction (1/32) of the gradients.
const SMALLEST_PART: f64 = 32.0;
/// The largest number of sizes.
const MAX_SIZES: usize = 100;
/// Strategies that buckets are compared with, and their descriptions.
const BASELINES: [(&str, &str); 2] =
    [("simple_ddp", "one all-reduce per parameter"), ("flat_ddp", "one all-reduce of everything")];

/// The results of one bucket size, or of one of the strategies that buckets are compared with.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The strategy.
    pub strategy: String,
    /// The bucket size in MiB; `None` for a strategy without buckets.
    pub bucket_mb: Option<f64>,
    /// All-reduces of gradients per step; `None` if the runs do not count them.
    pub num_buckets: Option<f64>,
    /// The times of a step.
    pub times: StepTimes,
}

impl Row {
    /// The row of a bucket size.
    fn of(case: &Measured<Option<f64>>) -> Result<Self> {
        Ok(Self {
            strategy: case.strategy(),
            bucket_mb: case.of,
            num_buckets: rank::median(case.rounds.iter().map(num_buckets)).map(hundredths),
            times: StepTimes::of(&case.rounds)?,
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

/// The contents of the JSON file, apart from the setting.
#[derive(Debug, Serialize)]
struct Report<'a> {
    ranks: usize,
    #[serde(flatten)]
    table: &'a Table,
    fit: &'a Fit,
    /// The size with the shortest step.
    shortest_step_mb: Option<f64>,
    /// The size with the least exposed communication, as the formula predicts it.
    least_exposed_mb: Option<f64>,
}

/// `paceline bench buckets`.
fn buckets(args: &BucketsArgs) -> Result<u8> {
    let (study, ranks) = (&args.same.study, args.same.nproc);
    let given = args.same.check("nothing to communicate", &SET_HERE)?;
    let (measured, config) = measuring(&given.with_default("strategy", "ddp"))?;
    let params = layout_of(&config, ranks)?.num_trained_params() as u64;
    let (sizes, note) = distinct(resolve_sizes(&args.sizes, 4 * params)?, 4 * params);
    let strategy = config.strategy.name();
    if !STRATEGIES.readers("bucket-cap-mb").contains(&strategy) {
        return usage(format!(
            "--strategy {strategy} has no buckets; pass ddp or another one that has"
        ));
    }
    warn_of([&config]);
    let of_size = sizes.into_iter().map(|mb| {
        let name = format!("{strategy}, buckets of {mb} MiB");
        Ok((Some(mb), Case::new(name, measured.with("bucket-cap-mb", mb))?))
    });
    let baselines = BASELINES.into_iter().map(|(name, what)| {
        let without = measured.without(&["first-bucket-mb", "no-gradient-view", "top-k"]);
        Ok((None, Case::new(format!("{name}, {what}"), without.with("strategy", name))?))
    });
    let planned = of_size.chain(baselines).collect::<Result<_>>()?;
    let cases = run_all(study, study.output.as_deref(), planned)?;
    let rows = cases.iter().map(Row::of).collect::<Result<Vec<Row>>>()?;
    let setting = Setting::new(study, &config, params);
    let (fit, table) = (Fit::of(&rows, 4 * params), table::columns().table(&rows));
    let charts = [
        ("buckets_step".to_owned(), chart::step(&rows, &setting, ranks)),
        ("buckets_exposed".to_owned(), chart::exposed(&rows, &fit, &setting, ranks)),
    ];
    let findings = Findings {
        heading: format!("Buckets of {strategy}, {ranks} ranks: {}", setting.words()),
        notes: note.into_iter().collect(),
        text: table::text(&rows, &fit, params, line_width()),
        report: Report {
            ranks,
            table: &table,
            fit: &fit,
            shortest_step_mb: best(&rows, |row| row.times.step.median)
                .and_then(|row| row.bucket_mb),
            least_exposed_mb: best(&rows, |row| row.times.exposed_ms).and_then(|row| row.bucket_mb),
        },
        table: &table,
        charts: charts.into(),
    };
    findings.publish(study, &setting)
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
    use crate::step::tests::times;

    /// Rows whose exposed communication follows the formula, with the given times of an operation and
    /// of all bytes, in milliseconds.
    pub(super) fn rows(buckets: &[f64], op_ms: f64, all_ms: f64) -> Vec<Row> {
        let row = |&count: &f64| {
            let exposed_ms = count * op_ms + all_ms / count;
            Row {
                strategy: "ddp".into(),
                bucket_mb: Some(64.0 / count),
                num_buckets: Some(count),
                times: times(100.0 + exposed_ms, 0.5, exposed_ms, 2.0),
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
        (naive.bucket_mb, naive.times) = (None, times(1.0, 0.5, 0.0, 0.0));
        rows.push(naive);
        assert_eq!(best(&rows, |row| row.times.step.median).unwrap().num_buckets, Some(4.0));
    }
}
