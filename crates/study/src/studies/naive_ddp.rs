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
use paceline_failure::Result;
use paceline_host::text::{hundredths, line_width};
use paceline_model::Layout;
use paceline_strategies::{BucketCaps, plan_buckets};
use paceline_table::table::Table;
use serde::Serialize;
use theory::Theory;

use crate::plan::Case;
use crate::spec::Spec;
use crate::step::StepTimes;
use crate::studies::bucket_cost::{MIB, distinct};
use crate::studies::buckets::{self, check_sizes};
use crate::study::{
    Findings, Measured, SameRanksArgs, Setting, Study, layout_of, measuring, run_all, warn_of,
    with_strategy,
};

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
    /// The number of ranks, and the flags of all studies and of the runs.
    #[command(flatten)]
    pub same: SameRanksArgs,
}

/// The cases without buckets: their descriptions and strategies.
const PLAIN: [(&str, &str); 3] =
    [("naive", "simple_ddp"), ("flat", "flat_ddp"), ("overlapped", "simple_ddp_async")];
/// The cases of [`PLAIN`] whose operations run while no rank computes.
const BLOCKING: usize = 2;
/// The strategy with buckets.
const BUCKETED: &str = "ddp";
/// Flags that the study sets, with advice.
const SET_HERE: [(&str, &str); 3] = [
    ("strategy", "the study runs naive, flat, overlapped and bucketed strategies; leave it out"),
    ("bucket-cap-mb", "it is what the study varies; pass --sizes instead"),
    ("first-bucket-mb", "the first bucket is as large as the others; pass --sizes instead"),
];

/// The results of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The description of the case.
    pub case: String,
    /// The strategy.
    pub strategy: String,
    /// The buckets; `None` for a strategy without.
    pub buckets: Option<Buckets>,
    /// The times of a step.
    pub times: StepTimes,
    /// Operations of a step, with the one that adds up the loss.
    pub ops_per_step: f64,
}

/// The buckets of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Buckets {
    /// Their size in MiB.
    pub mb: f64,
    /// How many there are.
    pub count: usize,
}

impl Row {
    /// The row of a case.
    fn of(case: &Measured<Option<Buckets>>) -> Result<Self> {
        Ok(Self {
            case: case.name.clone(),
            strategy: case.strategy(),
            buckets: case.of,
            times: StepTimes::of(&case.rounds)?,
            ops_per_step: hundredths(case.median("comm_ops_per_step")?),
        })
    }

    /// The size of its buckets in MiB.
    fn bucket_mb(&self) -> Option<f64> {
        self.buckets.map(|buckets| buckets.mb)
    }
}

/// A case before it has run.
type Planned = (Option<Buckets>, Case);

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
        Ok((None, Case::new(name, with_strategy(self.flags, strategy)?)?))
    }

    fn bucketed(&self, mb: f64) -> Result<Planned> {
        let flags = self.flags.with("bucket-cap-mb", mb).with("first-bucket-mb", mb);
        let buckets = Buckets { mb, count: self.begins(mb).len() };
        Ok((Some(buckets), Case::new(format!("bucketed, {mb} MiB"), flags)?))
    }

    /// Where the buckets of this size begin. Sizes with the same beginnings make the same buckets.
    fn begins(&self, mb: f64) -> Vec<usize> {
        let bytes = (mb * MIB) as usize;
        let buckets =
            plan_buckets(self.layout, self.elem_bytes, BucketCaps { first_bytes: bytes, bytes });
        buckets.into_iter().map(|bucket| bucket.range.start).collect()
    }
}

/// The contents of the JSON file, apart from the setting.
#[derive(Debug, Serialize)]
struct Report<'a> {
    ranks: usize,
    gradient_bytes: u64,
    #[serde(flatten)]
    table: &'a Table,
    theory: &'a Theory,
    /// The requested size with the shortest step.
    measured_best_mb: Option<f64>,
    best: &'a Option<SideBySide>,
}

/// `paceline bench naive-ddp`.
fn naive_ddp(args: &NaiveDdpArgs) -> Result<u8> {
    let (study, ranks) = (&args.same.study, args.same.nproc);
    let flags = args.same.check("nothing to communicate", &SET_HERE)?;
    let given = if args.sizes.is_empty() { &buckets::COARSE[..] } else { &args.sizes };
    let sizes = check_sizes(given)?;
    let (flags, config) = measuring(&flags.with("strategy", BUCKETED))?;
    let layout = layout_of(&config, ranks)?;
    let params = layout.num_trained_params() as u64;
    let elem_bytes = config.strategy.options.precision.grads.size_bytes();
    let gradient_bytes = params * elem_bytes as u64;
    let (sizes, note) = distinct(sizes, gradient_bytes);
    let planner = Planner { flags: &flags, layout: &layout, elem_bytes };
    let plain = PLAIN.into_iter().map(|plain| planner.plain(plain));
    let bucketed = sizes.iter().map(|mb| planner.bucketed(*mb));
    let planned = plain.chain(bucketed).collect::<Result<Vec<Planned>>>()?;
    warn_of([&config]);
    let cases = run_all(study, study.output.as_deref(), planned)?;
    let rows = cases.iter().map(Row::of).collect::<Result<Vec<Row>>>()?;
    let theory = match config.comm.link {
        Some(link) => {
            Theory::of_link(link, config.comm.algorithm, config.world_size, gradient_bytes)
        }
        None => {
            let blocking = cases[..BLOCKING].iter().map(|case| case.rounds.as_slice());
            Theory::of_runs(&blocking.collect::<Vec<_>>(), gradient_bytes)
        }
    };
    let best = SideBySide::measure(study, &planner, &rows, &theory)?;
    let setting = Setting::new(study, &config, params);
    let (words, table) = (setting.words(), table::columns().table(&rows));
    let findings = Findings {
        heading: format!("Synchronization of gradients, {ranks} ranks: {words}"),
        notes: note.into_iter().collect(),
        text: table::text(&rows, &theory, best.as_ref(), &setting, gradient_bytes, line_width()),
        report: Report {
            ranks,
            gradient_bytes,
            table: &table,
            theory: &theory,
            measured_best_mb: best::measured(&rows).and_then(Row::bucket_mb),
            best: &best,
        },
        table: &table,
        charts: vec![("naive_ddp_step".to_owned(), table::chart(&rows, &setting, ranks))],
    };
    findings.publish(study, &setting)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::times;

    /// Rows of the four ways, with steps of these milliseconds in the middle of a range of 1 ms.
    pub fn rows(bucketed: &[(f64, usize, f64)]) -> Vec<Row> {
        let row = |(case, strategy): (&str, &str), step_ms: f64| Row {
            case: case.to_owned(),
            strategy: strategy.to_owned(),
            buckets: None,
            times: times(step_ms, 0.5, step_ms - 10.0, 0.0),
            ops_per_step: 27.0,
        };
        let plain = PLAIN.into_iter().zip([30.0, 26.0, 20.0]).map(|(plain, ms)| row(plain, ms));
        let bucketed = bucketed.iter().map(|&(mb, count, ms)| Row {
            buckets: Some(Buckets { mb, count }),
            times: times(ms, 0.5, ms - 10.0, 4.0),
            ops_per_step: count as f64 + 1.0,
            ..row((&format!("bucketed, {mb} MiB"), BUCKETED), ms)
        });
        plain.chain(bucketed).collect()
    }
}
