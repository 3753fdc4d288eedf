//! `paceline lab buckets --trace DIR`: which `bucket_cap_mb` suits a run of PyTorch.
//!
//! Traces of all ranks go in. Each measured step is replayed with buckets of other sizes: gradients become final when they were,
//! and all-reduces take what those of the traces took, by their bytes. Nothing is run.

use std::path::{Path, PathBuf};

use paceline_analysis::advice::gain::Gain;
use paceline_analysis::advice::passes::Passes;
use paceline_analysis::advice::reducer::Reducer;
use paceline_analysis::advice::replay::Bucket;
use paceline_analysis::read::{self, Select};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::plural;
use paceline_table::plot::{Axis, LineChart, Series, Unit};
use paceline_table::table::{Columns, Table};

use super::outcome::Beside;
use super::show;
use crate::studies::bucket_cost::MIB;

/// Sizes in MiB.
const SIZES: [f64; 13] =
    [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 32.0, 64.0, 128.0, 256.0, 512.0];
/// A gain below this part of the backward pass is not worth a change.
const LEAST_PART: f64 = 0.01;
/// The name of the files, without their ending.
const NAME: &str = "buckets-of-trace";

/// A size, and the steps with it.
struct Point {
    mib: f64,
    plan: Vec<Bucket>,
    whole_ms: f64,
    exposed_ms: f64,
    gain_ms: f64,
}

/// Replays the traces in `traces`, and writes the curve into `folder`. Returns the exit code.
pub fn buckets(traces: &Path, folder: &Path) -> Result<u8> {
    let refused = |why: String| Failure::Run(format!("--trace {}: {why}", traces.printable()));
    let windows = read::find(&[PathBuf::from(traces)], Select::Latest)?;
    let files = windows.into_iter().next().map_or_else(Vec::new, |window| window.files);
    let mut timelines = Vec::new();
    for file in files {
        let mut timeline = read::open(&file.path)?;
        timeline.rank = Some(file.rank);
        timelines.push(timeline);
    }
    let reducer = Reducer::of(&timelines).map_err(refused)?;
    let (latency_ms, cost) = reducer.cost();
    let passes = Passes::measured(&reducer.observed, reducer.plan.clone(), None, &*cost);
    let passes = passes.ok_or_else(|| refused("no step has all gradients".to_owned()))?;
    let now = passes.with_buckets(&reducer.plan).unwrap_or_default();
    let mut points: Vec<Point> = Vec::new();
    for mib in SIZES {
        let plan = reducer.buckets((mib * MIB) as u64);
        let Some([whole_ms, exposed_ms, gain_ms]) = passes.with_buckets(&plan) else { continue };
        match points.last_mut().filter(|last| last.plan == plan) {
            // The same buckets.
            Some(last) => last.mib = mib,
            None => points.push(Point { mib, plan, whole_ms, exposed_ms, gain_ms }),
        }
    }
    // Without a latency, only sizes like the measured ones are believed.
    let least = match latency_ms {
        Some(_) => 0,
        None => reducer.plan.iter().map(|of| of.bytes).min().unwrap_or(0) / 2,
    };
    // The last bucket has what is left.
    let is_known = |of: &&Point| of.plan.iter().rev().skip(1).all(|bucket| bucket.bytes >= least);
    let plans = points.iter().rev().filter(is_known).map(|of| (of.mib, of.plan.clone()));
    let (best, _) = passes.other_buckets(plans, LEAST_PART * now[0]);
    let best = best.filter(|(_, gain)| gain.holds(LEAST_PART * now[0]));
    let chart = LineChart {
        title: "buckets: the backward pass over bucket_cap_mb, replayed".to_owned(),
        subtitle: traces.printable().to_string(),
        x: Axis::logarithmic("bucket_cap_mb, in bytes", Unit::Bytes),
        y: Axis::linear("until all gradients are there", Unit::Microseconds),
        series: vec![Series::line(
            "replayed",
            points.iter().map(|of| (of.mib * MIB, of.whole_ms * 1e3)),
        )],
    };
    let subtitle = format!(
        "{}, {} of {}, {} in {}",
        traces.printable(),
        plural(reducer.observed.steps.len(), "step"),
        plural(timelines.len(), "rank"),
        plural(reducer.gradient_bytes.len(), "gradient"),
        plural(reducer.plan.len(), "bucket"),
    );
    let found = Beside {
        id: NAME,
        title: "Each step of the traces, replayed with other buckets",
        definition: "Gradients become final when they did; all-reduces travel one after the other and take what those of the \
                     traces took: a latency and a time per byte."
            .to_owned(),
        table: table(&points),
        lines: lines(&reducer, &passes, now, latency_ms, best),
        chart: Some((NAME.to_owned(), Box::new(chart))),
    };
    show::publish_alone("Lab: buckets of a run of PyTorch", subtitle, found, folder)?;
    Ok(0)
}

fn table(points: &[Point]) -> Table {
    Columns::new()
        .add("bucket_cap_mb", "bucket_cap_mb", ("", 2), "PyTorch's, in MiB.", |of: &Point| of.mib)
        .add("operations", "all-reduces", ("", 0), "", |of| of.plan.len())
        .add(
            "whole_ms",
            "backward pass",
            ("ms", 2),
            "From its begin until it has ended and all gradients are there: median of the replayed steps.",
            |of| of.whole_ms,
        )
        .add("exposed_ms", "exposed", ("ms", 2), "Of it, communication that nothing hides.", |of| {
            of.exposed_ms
        })
        .add("gain_ms", "less than now", ("ms", 2), "Than the replay of the buckets of the traces: median over the steps.", |of| {
            of.gain_ms
        })
        .table(points)
}

fn lines(
    reducer: &Reducer,
    passes: &Passes,
    [now_ms, exposed_ms, _]: [f64; 3],
    latency_ms: Option<f64>,
    best: Option<(f64, Gain)>,
) -> Vec<String> {
    let bytes: Vec<String> =
        reducer.plan.iter().map(|of| format!("{:.2}", of.bytes as f64 / MIB)).collect();
    let missed = passes.unexplained_ms().unwrap_or_default();
    let mut lines = vec![format!(
        "Now: buckets of {} MiB; the replay takes {now_ms:.2} ms, {exposed_ms:.2} of them exposed, and the steps took {missed:+.2} ms \
         beside it",
        bytes.join(", ")
    )];
    lines.push(match latency_ms {
        Some(ms) => format!("The latency of an all-reduce is {ms:.2} ms in these steps"),
        None => "These steps do not tell the latency of an all-reduce, so buckets below half of the smallest one are not advised".to_owned(),
    });
    lines.push(match best {
        Some((mib, gain)) => format!(
            "Set bucket_cap_mb={mib}: {}. In PyTorch: DistributedDataParallel(model, bucket_cap_mb={mib})",
            gain.words("less per step")
        ),
        None => "No size of buckets gains more than 1 % of the backward pass and the noise of these steps; leave bucket_cap_mb as it is"
            .to_owned(),
    });
    lines
}
