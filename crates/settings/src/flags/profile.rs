//! Flags with which `paceline train` writes traces.

use std::path::PathBuf;

use clap::Args;
use paceline_failure::numbers::at_least;

use super::PLACES;

/// Flags of the profile.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Observation")]
pub struct ProfileArgs {
    /// Write a trace of some steps of each rank (for Perfetto, Holistic Trace Analysis and paceline analyze)
    #[arg(long)]
    pub profile: bool,
    /// Mark each step and its parts in the trace of the kernel (tracefs), for perf and Perfetto: scripts/perf_capture.sh
    #[arg(long, help_heading = "Host")]
    pub mark_ranges: bool,
    /// Number of steps that are skipped first [default: 1]
    #[arg(long, value_name = "N")]
    pub profile_wait: Option<u64>,
    /// Number of steps that are skipped after those [default: 2]
    #[arg(long, value_name = "N")]
    pub profile_warmup: Option<u64>,
    /// Number of steps that are recorded then [default: 10]
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(1))]
    pub profile_active: Option<u64>,
    /// Folder of the traces, which go to DIR/STRATEGY/rank_N/ [default: profile]
    #[arg(long, value_name = "DIR", help_heading = PLACES)]
    pub profile_dir: Option<PathBuf>,
}
