//! Flags about how ranks are started, which `paceline launch` and `paceline train` have in common. They have torchrun's
//! names. They are not settings of a run: a configuration file does not hold them.

use std::time::Duration;

use clap::Args;

/// How long ranks may take to end after a signal from the user, by default.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// A year.
const MAX_GRACE: Duration = Duration::from_secs(365 * 24 * 3600);

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
}

fn seconds(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    // A longer time could not be added to a moment.
    seconds.map(|time| time.min(MAX_GRACE)).ok_or("pass seconds, at least 0")
}
