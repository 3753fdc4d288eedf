//! The flags of `paceline plan`, and the hardware that they name.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use paceline_analysis::doctor::cards::{self, Card};
use paceline_collectives::Link;
use paceline_failure::numbers::{above_zero, at_least, within};
use paceline_failure::{Failure, Result};
use paceline_host::resources;
use paceline_settings::named::PrecisionName;
use paceline_settings::part::Part;

use crate::flags::Planned;
use crate::predict::flags::{MAX_RANKS, link};
use crate::predict::network::{Hosts, Network, Route};
use crate::study::{StudyArgs, refuse_flags};
use crate::usage;

const EXAMPLES: &str = "\
Examples:
  paceline plan --config config.json --on 8xL4 --link 25gbe --global-batch-size 64 --seq-len 2048
  paceline plan --model llama --llama-size xl --on 16xH100 --ranks-per-host 8 --link-in-host nvlink4 --link ndr
  paceline plan --model mlp --hidden-dim 16384 --on 64xA100 --link hdr --optimizer adamw --rank-gb 16
  paceline plan --model llama --on 2xthis --link 1gbe --global-batch-size 16 --measure 3
";

/// Flags of `paceline plan`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct PlanArgs {
    /// The hardware.
    #[command(flatten)]
    pub hardware: HardwareArgs,
    /// The config.json of a model as Hugging Face publishes it, in place of --model and its sizes
    #[arg(long, value_name = "FILE", help_heading = "Study")]
    pub config: Option<PathBuf>,
    /// How many of the fastest layouts that fit are shown
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "Study", value_parser = within::<usize>(1, 100_000))]
    pub top: usize,
    /// Also run the first N layouts here, on emulated links, and print the measured times beside the predicted ones
    #[arg(long, value_name = "N", help_heading = "Study", value_parser = at_least::<usize>(1))]
    pub measure: Option<usize>,
    /// The flags of all studies.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs. Those that the user states are the same in all layouts.
    #[command(flatten)]
    pub train: Part<Planned>,
}

/// Flags about hardware.
#[derive(Debug, Args)]
#[command(next_help_heading = "Hardware")]
pub struct HardwareArgs {
    /// How many ranks on which cards, as 8xL4, or on this host: 4xthis
    #[arg(long, value_name = "NxCARD", required = true)]
    pub on: On,
    /// Ranks on each host, which share the host's link to other hosts. Then --link is the link between hosts
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = at_least::<usize>(1))]
    pub ranks_per_host: usize,
    /// The link between two ranks of a host, with --ranks-per-host: as in --link
    #[arg(long, value_name = "LINK")]
    pub link_in_host: Option<String>,
    /// The memory of a rank in GB of 1e9 bytes [default: that of the card, or what this host has available, divided by the ranks]
    #[arg(long, value_name = "GB", value_parser = above_zero)]
    pub rank_gb: Option<f64>,
    /// Cards: the share of the published peak that products reach, in percent (model FLOP utilization)
    #[arg(long, value_name = "PCT", default_value_t = 40.0, value_parser = within(0.1, 100.0))]
    pub mfu: f64,
}

/// Ranks, each on a card of its own; or all of them on this host.
#[derive(Clone, Debug)]
pub struct On {
    /// Number of ranks.
    pub ranks: usize,
    /// The card; `None` for this host.
    pub card: Option<Card>,
}

impl FromStr for On {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let is_count = |(count, _): &(&str, &str)| count.bytes().all(|byte| byte.is_ascii_digit());
        let split = text.split_once('x').filter(is_count);
        let (count, name) = split.unwrap_or(("1", text));
        let ranks = count.parse().ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks));
        let ranks = ranks.ok_or_else(|| format!("pass 1 to {MAX_RANKS} ranks, as 8xL4"))?;
        let card = match name {
            "this" => None,
            name => Some(cards::named(name).map_err(|known| {
                format!("no such card is known; pass N times this, or one of {known}")
            })?),
        };
        Ok(Self { ranks, card })
    }
}

/// The hardware of the ranks.
#[derive(Clone, Debug)]
pub struct RankHardware {
    /// The ranks, and their card.
    pub on: On,
    /// The share of a card's peak that products reach.
    pub mfu: f64,
    /// The memory of a rank in bytes.
    pub rank_bytes: f64,
    /// The link between ranks, or between hosts, and its name; `None` for the transport as it is here.
    pub link: Option<(String, Link)>,
    /// Hosts of several ranks, and the name of their link.
    pub hosts: Option<(String, Hosts)>,
}

/// The memory of a rank.
fn rank_bytes(args: &HardwareArgs) -> Result<f64> {
    match (args.rank_gb, &args.on.card) {
        (Some(gb), _) => Ok(gb * 1e9),
        (None, Some(card)) => Ok(card.memory_bytes),
        (None, None) => {
            let available = resources::available_bytes().ok_or_else(|| {
                Failure::Usage(
                    "this system does not say how much memory is available; pass --rank-gb".into(),
                )
            })?;
            Ok(available as f64 / args.on.ranks as f64)
        }
    }
}

/// Flags that the layouts decide about.
const OF_LAYOUTS: [(&str, &str); 7] = [
    (
        "accumulate",
        "it follows from --global-batch-size, the samples of a step, and the layout; leave it out",
    ),
    ("micro-batch-size", "pass --batch-size, the samples of a micro-batch"),
    ("device", "--on says where the ranks compute; leave it out"),
    ("rank-samples", "the same batch on every rank is planned; leave it out"),
    ("sync-batch-norm", "its blocking sums are not planned; leave it out"),
    ("broadcast-buffers", "its broadcasts are not planned; leave it out"),
    ("replicate-shards", "its messages are not planned; leave it out"),
];

impl RankHardware {
    /// Checks how the flags fit together.
    pub fn of(args: &PlanArgs) -> Result<Self> {
        refuse_flags(&args.train.0, &OF_LAYOUTS)?;
        let On { ranks, card } = &args.hardware.on;
        if args.measure.is_some() && card.is_some() {
            return usage(
                "--measure runs the layouts on this host; pass --on Nxthis, or leave it out",
            );
        }
        if let Some(count) = args.measure.filter(|count| *count > args.top) {
            let top = args.top;
            return usage(format!("--measure {count}: pass at most the {top} layouts of --top"));
        }
        let typed = args.train.0.get("link").and_then(<[String]>::first);
        let link_of = |name: &String| Ok::<_, Failure>((name.clone(), link("--link", name)?));
        let found = typed.map(link_of).transpose()?;
        if found.is_none() && card.is_some() && *ranks > 1 {
            return usage(
                "--link is missing: pass the link between the ranks, as 25gbe (paceline predict --links lists them)",
            );
        }
        let local = args.hardware.ranks_per_host;
        let hosts = match &args.hardware.link_in_host {
            None if local > 1 => {
                return usage(format!(
                    "--ranks-per-host {local} needs --link-in-host, the link between ranks of a host, as nvlink4"
                ));
            }
            Some(_) if local == 1 => {
                return usage("--link-in-host needs --ranks-per-host, of 2 ranks or more");
            }
            Some(_) if card.is_none() => {
                return usage(
                    "--link-in-host: --on this is one host; leave it out, with --ranks-per-host",
                );
            }
            Some(_) if !ranks.is_multiple_of(local) => {
                return usage(format!(
                    "--ranks-per-host {local}: pass a divisor of the {ranks} ranks of --on"
                ));
            }
            Some(name) => {
                let inside = link("--link-in-host", name)?;
                Some((name.clone(), Hosts { ranks_per_host: local, inside }))
            }
            None => None,
        };
        let rank_bytes = rank_bytes(&args.hardware)?;
        Ok(Self {
            on: args.hardware.on.clone(),
            mfu: args.hardware.mfu / 100.0,
            rank_bytes,
            link: found,
            hosts,
        })
    }

    /// The FLOP per second that products of this type reach on the card. `None` if it has no such products.
    pub fn flop_per_s(card: &Card, precision: PrecisionName, tf32: bool, mfu: f64) -> Option<f64> {
        let peak = match precision {
            PrecisionName::F32 if tf32 => card.tf32,
            PrecisionName::F32 => Some(card.single),
            PrecisionName::Bf16 | PrecisionName::Fp16 => card.half,
        };
        peak.map(|peak| peak * mfu)
    }

    /// The network of `ranks` ranks, each `stride` after the one before, while all such groups communicate. Also returns the name
    /// of the link that decides.
    pub fn network(&self, ranks: usize, stride: usize) -> (Network, &str) {
        let free = Link { bytes_per_s: f64::MAX, latency_s: 0.0 };
        let (name, link) = self.link.as_ref().map_or(("none", free), |(name, link)| (name, *link));
        let alone = |link| Network { ranks, link, hosts: None, way: Route::Direct };
        let Some((inside, hosts)) = &self.hosts else { return (alone(link), name) };
        let local = hosts.ranks_per_host;
        if ranks * stride <= local {
            return (alone(hosts.inside), inside);
        }
        // Groups share the link of a host.
        let share = |groups: usize| Link { bytes_per_s: link.bytes_per_s / groups as f64, ..link };
        let members = local / stride;
        if members < 2 || !ranks.is_multiple_of(members) {
            return (alone(share(local)), name);
        }
        let hosts = Some(Hosts { ranks_per_host: members, ..*hosts });
        (Network { ranks, link: share(stride), hosts, way: Route::Hybrid }, name)
    }
}
