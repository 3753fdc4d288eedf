//! The flags of `paceline predict`, and the checks of how they fit together.

use std::path::PathBuf;

use clap::Args;
use paceline_collectives::{Algorithm, Link};
use paceline_failure::numbers::{above_zero, at_least, within};
use paceline_failure::{Failure, Result};

use super::network::{Hosts, Route};
use crate::flags::TrainFlags;
use crate::spec::Spec;
use crate::study::{StudyArgs, refuse_flags};
use crate::usage;

const EXAMPLES: &str = "\
Examples:
  paceline predict                                    2 ranks on 1, 10 and 100 Gbit/s
  paceline predict --links                            what links deliver
  paceline predict --nproc 2,8,64 --links 10gbit,50us 100gbe --channels 64 128 256 --hidden 2048
  paceline predict --model mlp --links 25gbe measured --measure
  paceline predict --nproc 16,64 --ranks-per-host 8 --link-in-host nvlink4 --links 100gbe hdr
  paceline predict --gradient-bytes 500MB --compute-ms 180 --nproc 8 --algorithm ring
  paceline predict --trace profile/ddp --nproc 8,64 --links 25gbe 100gbe
";

const GIVEN: &str = "Model given as bytes and milliseconds";

/// Flags of `paceline predict`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true, next_help_heading = "Study")]
pub struct PredictArgs {
    /// Numbers of ranks to predict, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "2", value_parser = within(1, MAX_RANKS))]
    pub nproc: Vec<usize>,
    /// Links to predict, separated by spaces: BANDWIDTH,LATENCY, or a name, or `measured` for the transport as it is
    /// here; without a value, the links with a name are listed
    #[arg(long, num_args = 0.., value_name = "LINK", default_values = ["1gbe", "10gbe", "100gbe"])]
    pub links: Vec<String>,
    /// Hosts of several ranks.
    #[command(flatten)]
    pub hosts: HostArgs,
    /// The efficiency in percent for which to find the slowest link: the step without communication by the step
    #[arg(long, value_name = "PCT", default_value_t = 90.0)]
    pub efficiency: f64,
    /// Run nothing, and predict a model with as many bytes of gradients, as 102.4e6 or 500MB
    #[arg(
        long,
        value_name = "BYTES",
        value_parser = super::stated::bytes,
        conflicts_with_all = ["measure", "rounds", "run_limit", "output"],
        help_heading = GIVEN
    )]
    pub gradient_bytes: Option<f64>,
    /// --gradient-bytes: the computing time of a step in milliseconds
    #[arg(long, value_name = "MS", requires = "gradient_bytes", help_heading = GIVEN, value_parser = above_zero)]
    pub compute_ms: Option<f64>,
    /// --gradient-bytes: the part of it that is the backward pass, during which the gradients become final at an
    /// even pace [default: two thirds]
    #[arg(long, value_name = "MS", requires = "gradient_bytes", help_heading = GIVEN)]
    pub backward_ms: Option<f64>,
    /// Run nothing, and take computing times and gradients from the traces in this folder: of `train --profile`, or of
    /// PyTorch's profiler
    #[arg(
        long,
        value_name = "FOLDER",
        conflicts_with_all = ["measure", "rounds", "run_limit", "output", "compute_ms", "backward_ms"],
        help_heading = "Traces"
    )]
    pub trace: Option<PathBuf>,
    /// --trace: how many times as long the ranks compute, as 2 where two of them share what one had
    #[arg(
        long,
        value_name = "FACTOR",
        requires = "trace",
        default_value_t = 1.0,
        help_heading = "Traces",
        value_parser = within(MIN_SCALE, MAX_SCALE)
    )]
    pub compute_scale: f64,
    /// --trace: what a step takes without the profiler, with the ranks and the network of the traces, in milliseconds. Computing
    /// is taken as shorter by what recording cost
    #[arg(long, value_name = "MS", requires = "trace", help_heading = "Traces")]
    pub step_ms: Option<f64>,
    /// Also run on each link, emulated, and print the measured times beside the predicted ones
    #[arg(long)]
    pub measure: bool,
    /// The flags of all studies.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// Flags about hosts of several ranks.
#[derive(Debug, Args)]
pub struct HostArgs {
    /// Ranks on each host, which share the host's link to other hosts. Other links are then those between hosts
    #[arg(long, value_name = "K", default_value_t = 1, conflicts_with = "measure", value_parser = at_least::<usize>(1))]
    pub ranks_per_host: usize,
    /// The link between two ranks of a host, with --ranks-per-host
    #[arg(long, value_name = "LINK")]
    pub link_in_host: Option<String>,
}

impl HostArgs {
    /// The hosts, and the name of their link; `None` if each rank has a host of its own.
    pub fn hosts(&self) -> Result<Option<(String, Hosts)>> {
        let ranks_per_host = self.ranks_per_host;
        match &self.link_in_host {
            None if ranks_per_host > 1 => usage(format!(
                "--ranks-per-host {ranks_per_host} needs --link-in-host, the link between ranks of a host, as nvlink4"
            )),
            None => Ok(None),
            Some(_) if ranks_per_host == 1 => {
                usage("--link-in-host needs --ranks-per-host, of 2 ranks or more")
            }
            Some(name) => {
                let inside = link("--link-in-host", name)?;
                Ok(Some((name.clone(), Hosts { ranks_per_host, inside })))
            }
        }
    }
}

/// The name that stands for the transport itself.
pub const MEASURED: &str = "measured";
/// The most ranks of a prediction: no link would stay the same for more.
pub const MAX_RANKS: usize = 4096;
const MIN_SCALE: f64 = 1e-3;
const MAX_SCALE: f64 = 1e3;
/// Flags that a prediction ignores, each with advice.
const NOT_PREDICTED: [(&str, &str); 2] = [
    ("strategy", "what ddp would do is predicted; leave it out"),
    ("link", "pass --links; leave it out"),
];
/// Flags that a plan ignores too.
pub const NOT_PLANNED: [(&str, &str); 4] = [
    ("sync-batch-norm", "its blocking sums are not predicted; leave it out"),
    ("broadcast-buffers", "its broadcasts are not predicted; leave it out"),
    ("replicate-shards", "its messages are not predicted; leave it out"),
    ("rank-samples", "the same batch on every rank is predicted; leave it out"),
];
/// The flag that says how ranks reduce.
pub(super) const ALGORITHM: &str = "algorithm";
/// Flags of training for a model given in numbers.
const WITH_NUMBERS: [&str; 3] = [ALGORITHM, "bucket-cap-mb", "first-bucket-mb"];

/// Checks the flags, and returns the flags of the runs.
pub fn resolve(args: &PredictArgs) -> Result<Spec> {
    check_ranks(args)?;
    for name in args.links.iter().filter(|name| *name != MEASURED) {
        link("--links", name).map_err(|failure| match failure {
            Failure::Usage(message) => {
                Failure::Usage(format!("{message}, or {MEASURED} for the transport as it is here"))
            }
            other => other,
        })?;
    }
    if !(args.efficiency > 0.0 && args.efficiency < 100.0) {
        return usage(format!(
            "--efficiency {}: pass a percentage above 0 and below 100",
            args.efficiency
        ));
    }
    refuse_flags(&args.train.0, &NOT_PREDICTED)?;
    refuse_flags(&args.train.0, &NOT_PLANNED)?;
    if args.gradient_bytes.is_some() && args.compute_ms.is_none() && args.trace.is_none() {
        return usage(
            "--gradient-bytes needs --compute-ms, the computing time of a step in milliseconds, or --trace",
        );
    }
    for (flag, is_given) in
        [("trace", args.trace.is_some()), ("gradient-bytes", args.gradient_bytes.is_some())]
    {
        if is_given {
            check_not_run(args, flag)?;
        }
    }
    let is_run = args.measure || args.links.iter().any(|name| name == MEASURED);
    Ok(if is_run {
        args.train.0.clone()
    } else {
        // Only tcp has a choice of algorithms, but nothing is sent.
        args.train.0.without(&[ALGORITHM])
    })
}

/// The link that `flag` names.
pub fn link(flag: &str, name: &str) -> Result<Link> {
    let link: Link = name.parse().map_err(|e| Failure::Usage(format!("{flag}: {e}")))?;
    if link.is_possible() {
        Ok(link)
    } else {
        usage(format!("{flag} {name}: pass a smaller bandwidth, as 10gbit,50us"))
    }
}

/// Checks the numbers of ranks and the hosts.
fn check_ranks(args: &PredictArgs) -> Result<()> {
    let local = args.hosts.ranks_per_host;
    for &ranks in &args.nproc {
        let most = if args.measure { paceline_collectives::MAX_RANKS } else { MAX_RANKS };
        if !(2..=most).contains(&ranks) {
            return usage(format!(
                "--nproc {ranks}: one rank has nothing to communicate; pass 2 to {most}"
            ));
        }
        if local > 1 && (ranks <= local || ranks % local != 0) {
            return usage(format!(
                "--nproc {ranks} with --ranks-per-host {local}: pass a multiple of {local}, for two hosts or more"
            ));
        }
    }
    if args.hosts.hosts()?.is_some() && args.links.iter().any(|link| link == MEASURED) {
        return usage(format!(
            "--links {MEASURED}: this is one host, and --ranks-per-host makes --links those between hosts"
        ));
    }
    Ok(())
}

/// Refuses flags about a model that is run, beside `instead`, with which nothing is run.
fn check_not_run(args: &PredictArgs, instead: &str) -> Result<()> {
    if args.links.iter().any(|name| name == MEASURED) {
        return usage(format!(
            "--links {MEASURED} measures here; with --{instead} nothing is run: pass other --links"
        ));
    }
    match args.train.0.keys().find(|key| !WITH_NUMBERS.contains(key)) {
        Some(flag) => {
            usage(format!("--{flag} is about a run, and --{instead} runs nothing; leave it out"))
        }
        None => Ok(()),
    }
}

/// The ways to all-reduce, all of them for `auto`; the fastest is predicted.
pub fn ways(args: &PredictArgs) -> Result<Vec<Route>> {
    let has_hosts = args.hosts.ranks_per_host > 1;
    let asked = args.train.0.get(ALGORITHM).and_then(<[String]>::first);
    let asked = asked.map(|name| name.parse::<Algorithm>()).transpose();
    Ok(match asked.map_err(|e| Failure::Usage(format!("--{ALGORITHM}: {e}")))? {
        Some(Algorithm::Direct) => vec![Route::Direct],
        Some(Algorithm::Ring) => vec![Route::Ring],
        Some(Algorithm::Auto) if has_hosts => vec![Route::Hybrid, Route::Direct, Route::Ring],
        Some(Algorithm::Auto) => vec![Route::Direct, Route::Ring],
        None if has_hosts => vec![Route::Hybrid],
        None => vec![Route::Direct],
    })
}
