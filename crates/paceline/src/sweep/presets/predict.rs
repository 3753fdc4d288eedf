//! `paceline predict`: predicts the time of a step with more ranks on other links, from runs without
//! communication.
//!
//! Runs that do not communicate show how long a step computes and when each gradient is final. On a link,
//! the all-reduces of these gradients form a queue ([`crate::insight::replay`]). So the step, the overlap
//! and the best buckets can be predicted for links and strategies that were never run. With `--measure`,
//! the same links are emulated, and the measured times are printed beside the predicted ones.
//!
//! [`model`] makes the prediction, [`compression`] predicts what compressing gradients would change, and
//! [`table`] shows both. With `--memory`, [`memory`](mod@memory) predicts what a rank needs instead.

pub mod compression;
pub mod memory;
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
use crate::cli::part::TrainFlags;
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
  paceline predict --memory --nproc 2,4,64 --model mlp --rank-gb 16
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
    /// Predict the memory of a rank instead, by strategy and number of ranks. Nothing is run
    #[arg(
        long,
        conflicts_with_all = ["links", "measure", "rounds", "run_limit", "charts"],
        help_heading = "Memory"
    )]
    pub memory: bool,
    /// --memory: the strategies, separated by commas, or `all` [default: ddp and those that divide the model]
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        requires = "memory",
        help_heading = "Memory"
    )]
    pub strategies: Vec<String>,
    /// --memory: the memory of a rank in GB of 1e9 bytes [default: what this host has available, divided by the ranks]
    #[arg(long, value_name = "GB", requires = "memory", help_heading = "Memory")]
    pub rank_gb: Option<f64>,
    /// Also run on each link, emulated, and print the measured times beside the predicted ones
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
/// The largest number of ranks in a prediction. No link would stay the same for more.
const MAX_RANKS: usize = 4096;
/// Flags that a prediction cannot take into account, and what to do instead.
const NOT_PREDICTED: [(&str, &str); 6] = [
    ("strategy", "what ddp would do is predicted"),
    ("link", "pass --links"),
    ("algorithm", "the direct algorithm is predicted"),
    ("sync-batch-norm", "its blocking sums are not predicted"),
    ("broadcast-buffers", "its broadcasts are not predicted"),
    ("rank-samples", "the same batch on every rank is predicted"),
];
/// Sizes in bytes of the all-reduces from which the speed of the transport itself is fitted.
const PROBE_BYTES: [u64; 4] = [4 << 10, 256 << 10, 4 << 20, 32 << 20];

/// The prediction for one number of ranks on one link, and the measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Number of ranks.
    pub ranks: usize,
    /// The link, as the user named it.
    pub link: String,
    /// The prediction.
    #[serde(flatten)]
    pub prediction: Prediction,
    /// The measured step of `ddp` on the emulated link, in milliseconds.
    pub measured_ms: Option<f64>,
    /// The predicted step divided by the measured one.
    pub ratio: Option<f64>,
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    setting: &'a Setting,
    calibrations: &'a [Calibration],
    rows: &'a [Row],
    compression: &'a [Compression],
}

/// Runs `paceline predict`.
pub fn predict(args: &PredictArgs, placement: Option<Placement>) -> Result<u8> {
    refuse_ranks("a study", placement)?;
    check(&args.study)?;
    if args.memory {
        return memory::predict_memory(args);
    }
    let given = resolve(args)?;
    let (single, _) = measuring(&given.with("nproc", 1))?;
    // With more ranks on the same host, a rank computes more slowly, because the ranks share memory and
    // perhaps cores. Measured runs have all ranks on this host, so the runs behind their prediction must,
    // too. Without --measure the ranks are assumed to be on other hosts, so one rank is run alone.
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

/// Checks the flags, and returns those of the runs.
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

/// The flags with `ranks` ranks, each with the batch of the single rank.
fn at(single: &Spec, ranks: usize) -> Spec {
    match single.number("global-batch-size") {
        Some(batch) => single.with("nproc", ranks).with("global-batch-size", batch * ranks),
        None => single.with("nproc", ranks),
    }
}

/// The layout of the model on `ranks` ranks, which may be more than fit on this host.
fn layout_of(config: &TrainConfig, ranks: usize) -> Result<Arc<Layout>> {
    let dataset = config.data.open_train(config.seed)?;
    Ok(config.model.build(dataset.as_ref(), ranks)?.layout)
}

/// The link with this name. For `measured`, it is fitted to the times of all-reduces of a few sizes over
/// the transport, which are measured here.
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

/// The time of an all-reduce on a link, in milliseconds.
fn all_reduce_ms(link: Link, ranks: usize, bytes: u64) -> f64 {
    link.time(OpKind::AllReduce, Algorithm::Direct, ranks, bytes).as_secs_f64() * 1e3
}
