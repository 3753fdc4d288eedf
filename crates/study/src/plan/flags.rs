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
use crate::predict::flags::{HostArgs, MAX_RANKS, NOT_PLANNED, link};
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
#[command(before_help = EXAMPLES, allow_negative_numbers = true, next_help_heading = "Hardware")]
pub struct PlanArgs {
    /// How many ranks on which cards, as 8xL4, or on this host: 4xthis
    #[arg(long, value_name = "NxCARD", required = true)]
    pub on: On,
    /// Hosts of several ranks.
    #[command(flatten)]
    pub hosts: HostArgs,
    /// The memory of a rank in GB of 1e9 bytes [default: that of the card, or what this host has available, divided by the ranks]
    #[arg(long, value_name = "GB", value_parser = above_zero)]
    pub rank_gb: Option<f64>,
    /// Cards: the share of the published peak that products reach, in percent (model FLOP utilization)
    #[arg(long, value_name = "PCT", default_value_t = 40.0, value_parser = within(0.1, 100.0))]
    pub mfu: f64,
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
        let (count, name) = text.split_once('x').filter(is_count).unwrap_or(("1", text));
        let ranks = count.parse().ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks));
        let ranks = ranks.ok_or_else(|| format!("pass 1 to {MAX_RANKS} ranks, as 8xL4"))?;
        if name == "this" {
            return Ok(Self { ranks, card: None });
        }
        let unknown =
            |known| format!("no such card is known; pass N times this, or one of {known}");
        Ok(Self { ranks, card: Some(cards::named(name).map_err(unknown)?) })
    }
}

/// The hardware of the ranks.
#[derive(Clone, Debug)]
pub struct RankHardware {
    /// Number of ranks.
    pub ranks: usize,
    /// The card of each; `None` for this host.
    pub card: Option<Card>,
    /// The share of a card's peak that products reach.
    pub mfu: f64,
    /// The memory of a rank in bytes.
    pub rank_bytes: f64,
    /// The link between ranks, or between hosts, and its name; `None` for the transport as it is here.
    pub link: Option<(String, Link)>,
    /// Hosts of several ranks, and the name of their link.
    pub hosts: Option<(String, Hosts)>,
}

/// Flags that the layouts decide about.
const OF_LAYOUTS: [(&str, &str); 3] = [
    ("accumulate", "it follows from --global-batch-size and the layout; leave it out"),
    ("micro-batch-size", "pass --batch-size, the samples of a micro-batch"),
    ("device", "--on says where the ranks compute; leave it out"),
];

impl RankHardware {
    /// Checks how the flags fit together.
    pub fn of(args: &PlanArgs) -> Result<Self> {
        refuse_flags(&args.train.0, &OF_LAYOUTS)?;
        refuse_flags(&args.train.0, &NOT_PLANNED)?;
        let (On { ranks, card }, hosts) = (args.on.clone(), args.hosts.hosts()?);
        let (local, measure) = (args.hosts.ranks_per_host, args.measure.unwrap_or(0));
        let typed = args.train.0.get("link").and_then(<[String]>::first).cloned();
        let problem = if measure > 0 && card.is_some() {
            "--measure runs the layouts on this host; pass --on Nxthis, or leave it out".to_owned()
        } else if measure > args.top {
            format!("--measure {measure}: pass at most the {} layouts of --top", args.top)
        } else if typed.is_none() && card.is_some() && ranks > 1 {
            "--link is missing: pass the link between the ranks, as 25gbe (paceline predict --links lists them)"
                .to_owned()
        } else if hosts.is_some() && card.is_none() {
            "--link-in-host: --on this is one host; leave it out, with --ranks-per-host".to_owned()
        } else if !ranks.is_multiple_of(local) {
            format!("--ranks-per-host {local}: pass a divisor of the {ranks} ranks of --on")
        } else {
            String::new()
        };
        if !problem.is_empty() {
            return usage(problem);
        }
        let link_of = |name: String| Ok::<_, Failure>((name.clone(), link("--link", &name)?));
        let link = typed.map(link_of).transpose()?;
        let available = || {
            let words = "this system does not say how much memory is available; pass --rank-gb";
            let bytes = resources::available_bytes().ok_or_else(|| Failure::Usage(words.into()));
            bytes.map(|bytes| bytes as f64 / ranks as f64)
        };
        let stated = args.rank_gb.map(|gb| gb * 1e9).or(card.map(|card| card.memory_bytes));
        let rank_bytes = stated.map_or_else(available, Ok)?;
        Ok(Self { ranks, card, mfu: args.mfu / 100.0, rank_bytes, link, hosts })
    }

    /// The published FLOP per second of products of this type. `None` on this host, and if the card has no such products.
    pub fn peak(&self, precision: PrecisionName, tf32: bool) -> Option<f64> {
        let card = self.card?;
        match precision {
            PrecisionName::F32 if tf32 => card.tf32,
            PrecisionName::F32 => Some(card.single),
            PrecisionName::Bf16 | PrecisionName::Fp16 => card.half,
        }
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
