//! Flags about how ranks are started, which `paceline launch` and `paceline train` have in common. They have torchrun's
//! names. They are not settings of a run: a configuration file does not hold them.

use std::ops::RangeInclusive;
use std::time::Duration;

use clap::Args;
use paceline_collectives::MAX_RANKS;
use paceline_failure::{Result, usage};

/// How long ranks may take to end after a signal from the user, by default.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// A year.
const MAX_GRACE: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long others wait for a rank that does not answer, by default.
const DEFAULT_EVICT_AFTER: Duration = Duration::from_secs(10);
/// The shortest and the longest such time, in seconds.
const PATIENCE_S: RangeInclusive<f64> = 0.1..=86_400.0;

/// Flags about restarts and hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Restarts and hosts")]
pub struct StartFlags {
    /// After a rank has failed, start all ranks again, at most N times. Not after Ctrl-C or SIGTERM, and not after
    /// exit code 2, which means a mistake in the command line. paceline train goes on from the last checkpoint in
    /// the folder of --save
    #[arg(long, value_name = "N", default_value_t = 0, alias = "max_restarts")]
    pub max_restarts: usize,
    /// How long the ranks may take to end after Ctrl-C or SIGTERM; a second one ends them at once. paceline train ends
    /// its step, evaluates if --early-stop or --save-best is due, and saves a checkpoint in that time, if there is --save. What ranks have started and left may take as
    /// long after they have ended with 0 [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub grace: Option<Duration>,
    /// A rank that dies leaves, and the others go on without a restart, as long as MIN ranks are left. Ranks that come later
    /// (--join, or replacements, at most as many as --max-restarts) make them up to MAX. The bits of the result do not change
    #[arg(long, value_name = "MIN:MAX", value_parser = sizes)]
    pub elastic: Option<RangeInclusive<usize>>,
    /// With --elastic: how long the others wait for a rank that does not answer before they go on without it. Pass more
    /// than the longest step takes [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = patience, alias = "evict_after")]
    pub evict_after: Option<Duration>,
    /// Become one more rank of a run with --elastic whose first launcher listens there (its --master-addr and
    /// --master-port). Pass the run's flags too, and set PACELINE_SECRET to its secret
    #[arg(long, value_name = "HOST:PORT", value_parser = address)]
    pub join: Option<(String, u16)>,
    /// Number of hosts. Start the same command on each, with its own --node-rank. Set PACELINE_SECRET to the same
    /// random text on all of them, so that nobody else can join [default: 1]
    #[arg(long, value_name = "N")]
    pub nnodes: Option<usize>,
    /// Which of the hosts this is: 0 to the number of hosts minus 1
    #[arg(long, value_name = "I", alias = "node_rank")]
    pub node_rank: Option<usize>,
    /// Name or address of host 0, as the other hosts reach it
    #[arg(long, value_name = "HOST", alias = "master_addr")]
    pub master_addr: Option<String>,
    /// A free port of host 0, where the ranks meet
    #[arg(long, value_name = "PORT", alias = "master_port")]
    pub master_port: Option<usize>,
}

impl StartFlags {
    /// How long ranks may take to end after a signal from the user.
    pub fn grace(&self) -> Duration {
        self.grace.unwrap_or(DEFAULT_GRACE)
    }

    /// Whether ranks have to be processes, so that others can take their places.
    pub fn needs_processes(&self) -> bool {
        self.max_restarts > 0 || self.elastic.is_some()
    }

    /// How long the others wait for a rank that does not answer.
    pub fn evict_after(&self) -> Duration {
        self.evict_after.unwrap_or(DEFAULT_EVICT_AFTER)
    }

    /// Checks the flags about ranks that come and go. `nproc` is the number of ranks of each host.
    ///
    /// # Errors
    ///
    /// If flags contradict each other.
    pub fn check_elastic(&self, nproc: usize) -> Result<()> {
        let alone = [
            ("--elastic", self.elastic.is_some()),
            ("--max-restarts", self.max_restarts > 0),
            ("--nnodes", self.nnodes.is_some()),
        ];
        let other = alone.iter().find(|(_, is_given)| *is_given).map(|(flag, _)| *flag);
        if let (Some((host, port)), Some(flag)) = (&self.join, other) {
            return usage(format!(
                "--join {host}:{port} adds this process to a run that another command has started, and {flag} is about a \
                 run that this one starts; leave one of them out"
            ));
        }
        let Some(sizes) = &self.elastic else {
            return match self.evict_after {
                Some(_) => usage(
                    "--evict-after is about ranks that come and go; pass --elastic MIN:MAX too, or leave it out",
                ),
                None => Ok(()),
            };
        };
        let started = nproc.saturating_mul(self.nnodes.unwrap_or(1));
        if *sizes.end() < started {
            return usage(format!(
                "--elastic {}:{}: the run starts with {started} ranks, which is more than its largest number; pass a \
                 larger MAX, or a lower --nproc or --nnodes",
                sizes.start(),
                sizes.end()
            ));
        }
        Ok(())
    }
}

fn seconds(text: &str) -> std::result::Result<Duration, &'static str> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    // A longer time could not be added to a moment.
    seconds.map(|time| time.min(MAX_GRACE)).ok_or("pass seconds, at least 0")
}

fn patience(text: &str) -> std::result::Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|seconds| PATIENCE_S.contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or("pass seconds, from 0.1 to 86400")
}

fn sizes(text: &str) -> std::result::Result<RangeInclusive<usize>, String> {
    let parsed = text.split_once(':');
    let parsed = parsed.and_then(|(min, max)| Some(min.parse().ok()?..=max.parse().ok()?));
    parsed.filter(|of| !of.is_empty() && *of.start() > 0 && *of.end() <= MAX_RANKS).ok_or_else(|| {
        format!("pass the fewest and the most ranks, as in 2:4; the first is at least 1, the second at most {MAX_RANKS}")
    })
}

fn address(text: &str) -> std::result::Result<(String, u16), &'static str> {
    let parsed = text.rsplit_once(':');
    let parsed = parsed.and_then(|(host, port)| Some((host.to_owned(), port.parse().ok()?)));
    parsed
        .filter(|(host, port)| !host.is_empty() && *port > 0)
        .ok_or("pass the host and the port of the run's first launcher, as in node0:29400")
}
