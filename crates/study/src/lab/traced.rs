//! `paceline lab buckets --trace DIR`: which `bucket_cap_mb` suits a run of PyTorch.
//!
//! Traces of all ranks go in. Each measured step is replayed with buckets of other sizes: gradients become final when they were,
//! and all-reduces take as long as those of the traces, by their bytes. Nothing is run.

use std::path::{Path, PathBuf};

use paceline_analysis::advice::reducer::Reducer;
use paceline_analysis::advice::sizes::{Point, Sizes};
use paceline_analysis::read::{self, Select};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::{plural, say};
use paceline_table::chart::{Axis, Picture, Series};
use paceline_table::table::Cell;

use crate::report::{Found, Report, tabled};
use crate::studies::bucket_cost::MIB;

/// The name of the files, without their ending.
const NAME: &str = "buckets-of-trace";

/// Replays the traces in `traces`, and writes the curve into `folder`. Returns the exit code.
pub fn buckets(traces: &Path, folder: &Path) -> Result<u8> {
    let refused = |why: String| Failure::Usage(format!("--trace {}: {why}", traces.printable()));
    let windows = read::find(&[PathBuf::from(traces)], Select::Latest);
    let windows = windows.map_err(|e| refused(e.to_string()))?;
    let files = windows.into_iter().next().map_or_else(Vec::new, |window| window.files);
    let timelines = read::open_all(&files, read::open).map_err(|e| refused(e.to_string()))?;
    let reducer = Reducer::of(&timelines).map_err(refused)?;
    let sizes =
        Sizes::of(&reducer).ok_or_else(|| refused("no step has all gradients".to_owned()))?;
    let chart = Picture::lines(
        "buckets: the backward pass over bucket_cap_mb, replayed".to_owned(),
        traces.printable().to_string(),
        [
            Axis::logarithmic("bucket_cap_mb, in bytes", "B"),
            Axis::linear("until all gradients are there", "us"),
        ],
        vec![Series::line(
            "replayed",
            sizes.points.iter().map(|of| (of.mib * MIB, of.whole_ms * 1e3)),
        )],
    );
    let subtitle = format!(
        "{}, {} of {}, {} in {}",
        traces.printable(),
        plural(reducer.observed.steps.len(), "step"),
        plural(timelines.len(), "rank"),
        plural(reducer.gradient_bytes.len(), "gradient"),
        plural(reducer.plan.len(), "bucket"),
    );
    let definition = "Gradients become final when they did; all-reduces travel one after the other and take what those of the \
                      traces took: a latency and a time per byte. Medians of the replayed steps.";
    let heads = [
        ("bucket_cap_mb", "bucket_cap_mb", ("", 2)),
        ("operations", "all-reduces", ("", 0)),
        ("whole_ms", "backward pass until all gradients are there", ("ms", 2)),
        ("exposed_ms", "exposed", ("ms", 2)),
        ("gain_ms", "less than now", ("ms", 2)),
    ];
    let row = |of: &Point| {
        let [mib, whole, exposed] = [of.mib, of.whole_ms, of.exposed_ms].map(Cell::Number);
        [mib, of.plan.len().into(), whole, exposed, of.gain_ms.into()]
    };
    let title = "Each step of the traces, replayed with other buckets";
    let found = Found {
        lines: lines(&reducer, &sizes),
        chart: Some((NAME.to_owned(), chart)),
        ..Found::new(NAME, title, definition, tabled(heads, sizes.points.iter().map(row)))
    };
    Report::write_found("Lab: buckets of a run of PyTorch", subtitle, found, folder)?;
    say(&format!("\nFiles in {}: {NAME}.html, .csv, .json, .md, .svg", folder.printable()));
    Ok(0)
}

fn lines(reducer: &Reducer, sizes: &Sizes) -> Vec<String> {
    let bytes: Vec<String> =
        reducer.plan.iter().map(|of| format!("{:.2}", of.bytes as f64 / MIB)).collect();
    let ([now_ms, exposed_ms], missed) = (sizes.now_ms, sizes.missed_ms);
    let mut lines = vec![format!(
        "Now: buckets of {} MiB; the replay takes {now_ms:.2} ms, {exposed_ms:.2} of them exposed, and the steps took {missed:+.2} ms \
         beside it",
        bytes.join(", ")
    )];
    lines.push(match sizes.latency_ms {
        Some(ms) => format!("The latency of an all-reduce is {ms:.2} ms in these steps"),
        None => "These steps do not tell the latency of an all-reduce, so buckets below half of the smallest one are not advised".to_owned(),
    });
    lines.push(match sizes.best {
        Some((mib, _, gain)) => format!(
            "Set bucket_cap_mb={mib}: {}. In PyTorch: DistributedDataParallel(model, bucket_cap_mb={mib})",
            gain.words("less per step")
        ),
        None => "No size of buckets gains more than 1 % of the backward pass and the noise of these steps; leave bucket_cap_mb as it is"
            .to_owned(),
    });
    lines
}
