//! `paceline predict`: the step that more ranks on other links would take, from runs without communication.
//!
//! Runs that do not communicate tell what a step computes and when each gradient is final. What a link
//! makes of that is a queue ([`crate::insight::replay`]): so the step, the overlap and the best buckets follow for
//! links and strategies that were never run. With `--measure` the same links are emulated, and what
//! was measured stands beside what was predicted.
//!
//! [`model`] holds the prediction, [`compression`] what compressing gradients would change, [`table`] shows.

pub mod compression;
pub mod model;
pub mod table;

use std::sync::Arc;

use clap::Args;
use paceline_collectives::{Algorithm, Link, OpKind};
use paceline_model::Layout;
use serde::Serialize;

use super::{
    Case, Setting, Spec, StudyArgs, check, measuring, median_of, refuse_ranks, run_all, usage,
    write_files,
};
use crate::bench::screen::say;
use crate::bench::sweep;
use crate::cli::TrainFlags;
use crate::environment::Placement;
use crate::run::config::TrainConfig;
use crate::sweep::spec;
use crate::{Failure, Result, launcher};

use compression::Compression;
use model::{Calibration, Prediction};

const EXAMPLES: &str = "\
Examples:
  paceline predict                                    2 ranks on 1, 10 and 100 Gbit/s
  paceline predict --nproc 2,8,64 --links 10gbit,50us 100gbe --channels 64 128 256 --hidden 2048
  paceline predict --model mlp --links 25gbe measured --measure
";

/// Flags of `paceline predict`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct PredictArgs {
    /// Numbers of ranks to predict, separated by commas
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "2",
        help_heading = "Study"
    )]
    pub nproc: Vec<usize>,
    /// Links to predict, separated by spaces: BANDWIDTH,LATENCY, or a name as in `paceline links`, or
    /// `measured` for the transport as it is here
    #[arg(
        long,
        num_args = 1..,
        value_name = "LINK",
        default_values = ["1gbe", "10gbe", "100gbe"],
        help_heading = "Study"
    )]
    pub links: Vec<String>,
    /// Emulate each link too, and put what was measured beside what was predicted
    #[arg(long, help_heading = "Study")]
    pub measure: bool,
    /// What all studies have.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// The name that stands for the transport itself.
const MEASURED: &str = "measured";
/// Ranks at most that are predicted; more than any link is the same for.
const MAX_RANKS: usize = 4096;
/// Flags of which a prediction knows nothing, and what to do instead.
const NOT_PREDICTED: [(&str, &str); 6] = [
    ("strategy", "what ddp would do is predicted"),
    ("link", "pass --links"),
    ("algorithm", "the direct algorithm is predicted"),
    ("sync-batch-norm", "its blocking sums are not predicted"),
    ("broadcast-buffers", "its broadcasts are not predicted"),
    ("rank-samples", "the same batch on every rank is predicted"),
];
/// Sizes of the all-reduces that tell what the transport itself delivers.
const PROBE_BYTES: [u64; 4] = [4 << 10, 256 << 10, 4 << 20, 32 << 20];

/// What is predicted for one number of ranks on one link, and what was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Number of ranks.
    pub ranks: usize,
    /// The link, as it was asked for.
    pub link: String,
    /// What is predicted.
    #[serde(flatten)]
    pub prediction: Prediction,
    /// The measured step of `ddp` on the emulated link, in milliseconds.
    pub measured_ms: Option<f64>,
    /// The prediction over what was measured.
    pub ratio: Option<f64>,
}

/// All that was found.
#[derive(Clone, Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    setting: &'a Setting,
    calibrations: &'a [Calibration],
    rows: &'a [Row],
    compression: &'a [Compression],
}

/// `paceline predict`.
pub fn predict(args: &PredictArgs, placement: Option<Placement>) -> Result<u8> {
    refuse_ranks("a study", placement)?;
    check(&args.study)?;
    let given = resolve(args)?;
    let (single, _) = measuring(&given.with("nproc", 1))?;
    // With more ranks beside it, a rank computes more slowly: they share memory, and perhaps cores. What
    // is measured here has that, so the prediction must, too; ranks elsewhere have it not.
    let places: Vec<usize> = if args.measure { args.nproc.clone() } else { vec![1] };
    let mut cases = Vec::new();
    for &ranks in &places {
        let strategy = if ranks == 1 { "single" } else { "no_sync" };
        let flags = at(&single, ranks).with("strategy", strategy);
        cases.push(Case::new(format!("{ranks} without communication"), flags)?);
    }
    let num_places = cases.len();
    let config = spec::resolve(&single.with("strategy", "ddp"))?;
    for &ranks in &args.nproc {
        for link in args.links.iter().filter(|_| args.measure) {
            let flags = at(&single, ranks).with("strategy", "ddp");
            let flags = if link == MEASURED { flags } else { flags.with("link", link) };
            cases.push(Case::new(format!("{ranks} on {link}"), flags)?);
        }
    }
    let found = run_all(&args.study, &cases)?;
    let calibrations = found[..num_places].iter().zip(&places);
    let calibrations: Vec<Calibration> = calibrations
        .map(|(rounds, ranks)| Calibration::of(*ranks, rounds))
        .collect::<Result<_>>()?;
    let mut measured = found[num_places..].iter();
    let (mut rows, mut compressions, mut params) = (Vec::new(), Vec::new(), 0);
    for ranks in &args.nproc {
        let at = places.iter().position(|place| place == ranks).unwrap_or(0);
        let layout = layout_of(&config, *ranks)?;
        params = layout.num_params() as u64;
        let costs = compression::costs(&layout, &config)?;
        for name in &args.links {
            let link = link_of(name, *ranks, &config)?;
            let cost = |bytes: u64| all_reduce_ms(link, *ranks, bytes);
            let prediction =
                Prediction::new(&calibrations[at], &layout, config.strategy.caps_for_ddp(), &cost)?;
            let measured_ms = measured
                .next()
                .filter(|_| args.measure)
                .map(|rounds| median_of(rounds, "step_ms_median"))
                .transpose()?;
            compressions.push(Compression::new(
                *ranks,
                name,
                &calibrations[at],
                &layout,
                config.strategy.caps_for_ddp(),
                &prediction,
                &costs,
                link,
            )?);
            rows.push(Row {
                ranks: *ranks,
                link: name.clone(),
                ratio: measured_ms.map(|ms| prediction.step_ms / ms),
                measured_ms,
                prediction,
            });
        }
    }
    let setting = Setting::new(&args.study, &config, params);
    say(&format!("Predicted steps: {}", setting.words()));
    say(&format!("\n{}", table::text(&calibrations, &rows, &compressions)));
    let report = Report {
        setting: &setting,
        calibrations: &calibrations,
        rows: &rows,
        compression: &compressions,
    };
    write_files(&args.study, &report, &table::table(&rows).csv(), &[])?;
    Ok(0)
}

/// The flags of the runs, checked.
fn resolve(args: &PredictArgs) -> Result<Spec> {
    if args.nproc.is_empty() || args.links.is_empty() {
        return usage("--nproc and --links need at least one value each");
    }
    for &ranks in &args.nproc {
        if args.measure {
            launcher::check_num_ranks("--nproc", ranks)?;
        }
        if !(2..=MAX_RANKS).contains(&ranks) {
            return usage(format!(
                "--nproc {ranks}: one rank has nothing to communicate; pass 2 to {MAX_RANKS}"
            ));
        }
    }
    for name in args.links.iter().filter(|name| *name != MEASURED) {
        name.parse::<Link>().map_err(|e| {
            Failure::Usage(format!("--links: {e}, or {MEASURED} for the transport as it is here"))
        })?;
    }
    for (flag, instead) in NOT_PREDICTED {
        if args.train.0.has(flag) {
            return usage(format!("--{flag}: {instead}; leave it out"));
        }
    }
    Ok(args.train.0.clone())
}

/// The flags with so many ranks, each with the batch of one.
fn at(single: &Spec, ranks: usize) -> Spec {
    match single.number("global-batch-size") {
        Some(batch) => single.with("nproc", ranks).with("global-batch-size", batch * ranks),
        None => single.with("nproc", ranks),
    }
}

/// The layout of the model on so many ranks, which need not fit on this host.
fn layout_of(config: &TrainConfig, ranks: usize) -> Result<Arc<Layout>> {
    let dataset = config.data.open_train(config.seed)?;
    Ok(config.model.build(dataset.as_ref(), ranks)?.layout)
}

/// The link of this name; `measured` is what an all-reduce over the transport takes here, fitted to a few
/// sizes.
fn link_of(name: &str, ranks: usize, config: &TrainConfig) -> Result<Link> {
    if name != MEASURED {
        return name.parse().map_err(|e| Failure::Usage(format!("--links: {e}")));
    }
    let words = ["bench", "all_reduce", "-n", "10", "-w", "2", "-c", "0", "--style", "lines"];
    let rows = sweep::rows_of(&words.map(str::to_owned), config.transport, &PROBE_BYTES, ranks)?;
    let points = rows.iter().zip(PROBE_BYTES).filter_map(|(row, bytes)| {
        let timing = row.in_place.as_ref().or(row.timing())?;
        Some((bytes as f64, timing.median_us * 1e-6))
    });
    Ok(model::fit_link(&points.collect::<Vec<_>>(), ranks))
}

/// What an all-reduce takes on a link, in milliseconds.
fn all_reduce_ms(link: Link, ranks: usize, bytes: u64) -> f64 {
    link.time(OpKind::AllReduce, Algorithm::Direct, ranks, bytes).as_secs_f64() * 1e3
}
