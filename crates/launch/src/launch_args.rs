//! Flags of `paceline launch`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use paceline_collectives::MAX_RANKS;
use paceline_failure::numbers;

use super::StartFlags;

const EXAMPLES: &str = "\
Examples:
  paceline launch -n 2 -- ./my-program --its-flags    any program, with RANK, WORLD_SIZE, ...
  paceline launch -n 4 -- python train.py             PyTorch's env:// finds what it needs
  paceline launch -n 4 --max-restarts 3 -- ./train    again from the start if a rank fails
  paceline launch -n 4 --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29400 -- ./train
                                                      host 0 of 2; the other is --node-rank 1
";

/// Flags of `paceline launch`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct LaunchArgs {
    /// How many copies on this host
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        default_value_t = 2,
        aliases = ["nproc-per-node", "nproc_per_node"],
        value_parser = numbers::within(1, MAX_RANKS)
    )]
    pub nproc: usize,
    /// Write the output of each rank to DIR/rank_N.log instead of printing it. A restart continues the files, after a
    /// line that says so
    #[arg(long, value_name = "DIR", alias = "log_dir")]
    pub log_dir: Option<PathBuf>,
    /// Print what goes to --log-dir too
    #[arg(long)]
    pub tee: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
    /// How ranks are started. Last, because its heading in the help holds for all that follows.
    #[command(flatten)]
    pub start: StartFlags,
}
