//! Flags of `paceline check`.

use std::path::PathBuf;

use clap::Args;
use paceline_collectives::MAX_RANKS;
use paceline_failure::numbers::{self, at_least};
use paceline_launch::device::Device;
use paceline_settings::flags::CommArgs;
use paceline_settings::named::TransportName;

const EXAMPLES: &str = "\
Prints one line per question, and ends with code 0 if no answer is FAIL. For example:

  paceline check --nproc 2
    ok    group: 2 ranks met over shm in 3.1 ms
    ok    device: [Rank 0] CUDA_VISIBLE_DEVICES=<not set>, LOCAL_RANK=0, device=cpu, cores 0-1
    ok    device: [Rank 1] CUDA_VISIBLE_DEVICES=<not set>, LOCAL_RANK=1, device=cpu, cores 0-1
    ok    memory: 24.4 GB available; no limit by a control group; /dev/shm is not needed
    ok    locked memory: 8.4 MB; none is needed on device=cpu
    ok    open files: 20000 at once; 72 are needed
    ok    clock: at most 0.1 us from rank 0 (rank 1), by a round trip of 2.8 us
    ok    links: latency 1.5 us at most, 12.61 to 13.03 GB/s between all pairs
          (and two tables, of every rank with every other one)
    ok    all-reduce: 3 sizes, every element right on every rank

  paceline check --numerics a.toml b.toml    the first tensor in which two layouts differ
";

/// Flags of `paceline check`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct CheckArgs {
    /// Number of ranks on this host [default: 2, or the number of cores if smaller]
    #[arg(short = 'n', long, value_name = "N", value_parser = numbers::within(1, MAX_RANKS))]
    pub nproc: Option<usize>,
    /// How the ranks reach each other [default: shm; tcp on several hosts]
    #[arg(long, value_enum)]
    pub transport: Option<TransportName>,
    /// Where ranks compute: cpu, cuda, auto, or an emulated accelerator such as sim:copy=16gbit,10us,launch=5us
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Device,
    /// Instead, run two layouts of one training, as --config of train takes them, and name the first tensor that differs
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["nproc", "transport", "device", "CommArgs"])]
    pub numerics: Option<Vec<PathBuf>>,
    /// Steps of each layout, with --numerics
    #[arg(long, value_name = "N", requires = "numerics", default_value_t = 3, value_parser = at_least::<u64>(1))]
    pub steps: u64,
    /// How the ranks talk to each other.
    #[command(flatten)]
    pub comm: CommArgs,
}
