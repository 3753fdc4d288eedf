//! Flags of `paceline bench`. Flags that nccl-tests has, too, have the same letters: -n is the number of iterations here, and that
//! of ranks elsewhere.

use std::path::PathBuf;

use clap::Args;
use paceline_collectives::{MAX_RANKS, OpKind, ReduceOp};
use paceline_failure::numbers::{part, within};
use paceline_launch::device::Device;
use paceline_launch::{CommArgs, TransportName};

use super::named::parser;
use crate::operation::{OPS, REDOPS};
use crate::screen::Screen;

/// The largest number of iterations. There is a limit because the times of all iterations are kept, for every rank.
pub(super) const MAX_ITERS: usize = 1_000_000;

const EXAMPLES: &str = "\
Examples:
  paceline bench all_reduce                           1 KiB to 64 MiB, 2 ranks in shared memory
  paceline bench all-gather -b 8 -e 128M -f 2 -w 9    sizes and warm-up as in nccl-tests
  paceline bench all_reduce --sweep --nproc 2,4,6 --transport thread,shm,tcp --style lines
  paceline bench all_reduce --size-mb 1,10 --transport tcp --link 10gbit,50us --columns extended
  paceline bench all_reduce -J run.json --charts charts --compare earlier.json
  paceline bench all_reduce --against torch           PyTorch's collectives, in turns with ours
  paceline bench scaling --nproc 1,2,4                how training speeds up with ranks
  paceline bench sharded-optimizer                    what a sharded optimizer costs and saves
";

/// Flags of `paceline bench`.
#[derive(Debug, Args)]
// With negative numbers allowed, "-b -1" is rejected as a value, not as an unknown flag.
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct BenchArgs {
    /// The operation
    #[arg(value_name = "OP", value_parser = parser(&OPS, OpKind::name))]
    pub op: OpKind,
    /// Which sizes.
    #[command(flatten)]
    pub sizes: SizeArgs,
    /// How each size is measured.
    #[command(flatten)]
    pub measuring: MeasuringArgs,
    /// Between which ranks.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// How the ranks talk to each other.
    #[command(flatten)]
    pub comm: CommArgs,
    /// The output: the screen, the files and the comparison.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Flags about sizes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sizes")]
pub struct SizeArgs {
    /// First size, in bytes, or with K, M or G (powers of 1024) [default: 1K]
    #[arg(short = 'b', long, value_name = "SIZE")]
    pub minbytes: Option<String>,
    /// Last size [default: 64M, or the first one if that is larger]
    #[arg(short = 'e', long, value_name = "SIZE")]
    pub maxbytes: Option<String>,
    /// Increment from one size to the next, in bytes
    #[arg(short = 'i', long, value_name = "SIZE", conflicts_with = "stepfactor")]
    pub stepbytes: Option<String>,
    /// Factor from one size to the next [default: 2]
    #[arg(short = 'f', long, value_name = "N")]
    pub stepfactor: Option<u64>,
    /// These sizes, in MB of 1e6 bytes, separated by commas
    #[arg(long, value_name = "MB", value_delimiter = ',')]
    #[arg(conflicts_with_all = ["minbytes", "maxbytes", "stepbytes", "stepfactor"])]
    pub size_mb: Vec<String>,
    /// The sizes 1, 10, 100 and 1024 MB
    #[arg(long)]
    #[arg(conflicts_with_all = ["size_mb", "minbytes", "maxbytes", "stepbytes", "stepfactor"])]
    pub sweep: bool,
}

/// Flags about measuring.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Measuring")]
pub struct MeasuringArgs {
    /// Number of iterations that are timed
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
    pub iters: usize,
    /// Calls in each iteration, one after the other; times are those of one call
    #[arg(short = 'm', long, alias = "agg_iters", value_name = "N", default_value_t = 1)]
    #[arg(value_parser = within(1, MAX_ITERS))]
    pub agg_iters: usize,
    /// How often all sizes are measured, one cycle after the other [default: 1]
    #[arg(short = 'N', long, alias = "run_cycles", value_name = "N", value_parser = within(1_usize, 1000))]
    pub run_cycles: Option<usize>,
    /// Whether to write the time of each iteration into the report of -J: 1 or 0
    #[arg(short = 'I', long, alias = "per_iter_timing", value_name = "0|1", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u8).range(..=1), requires_if("1", "json"))]
    pub per_iter_timing: u8,
    /// Number of warm-up iterations before those
    #[arg(short = 'w', long, alias = "warmup_iters", value_name = "N", default_value_t = 5)]
    pub warmup_iters: usize,
    /// Whether to check every element of the result of one more iteration: 1 or 0
    #[arg(short = 'c', long, value_name = "0|1", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u8).range(..=1))]
    pub check: u8,
    /// How elements are combined
    #[arg(short = 'o', long = "op", default_value = "sum")]
    #[arg(value_parser = parser(&REDOPS, ReduceOp::nccl_name))]
    pub redop: ReduceOp,
    /// Type of the elements: float, double, half, bfloat16, int32, int64, uint8, or as in Rust
    #[arg(short = 'd', long, value_name = "TYPE", default_value = "float")]
    pub datatype: String,
    /// The root of operations that have one
    #[arg(short = 'r', long, value_name = "RANK", default_value_t = 0)]
    pub root: usize,
}

/// Flags about ranks.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Ranks")]
pub struct RankArgs {
    /// Numbers of ranks, separated by commas [default: 2, or the number of cores if smaller]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = within(1, MAX_RANKS))]
    pub nproc: Vec<usize>,
    /// How the ranks reach each other, separated by commas [default: shm; tcp on several hosts]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub transport: Vec<TransportName>,
    /// Where the buffers lie: cpu, cuda, auto, or sim, a device emulated on the processor (see paceline train)
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Device,
    /// Buffers in ordinary memory, which other processes cannot reach
    #[arg(long)]
    pub private: bool,
    /// Give each rank a core of its own
    #[arg(long)]
    pub pin_cores: bool,
}

/// Flags about output.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// The screen.
    #[command(flatten)]
    pub screen: Screen,
    /// Write the report to this file, as JSON with the keys of nccl-tests
    #[arg(short = 'J', long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the rows to this file, as CSV
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write charts of time and bandwidth into this folder, as SVG
    #[arg(long, value_name = "DIR")]
    pub charts: Option<PathBuf>,
    /// Compare with an earlier report, with what nccl-tests wrote, or with another program's lines of JSON; repeatable
    #[arg(long, value_name = "FILE")]
    pub compare: Vec<PathBuf>,
    /// Measure torch.distributed too, in turns with paceline: over Gloo, or over NCCL on cards. -N is then the number of
    /// rounds [default: 3]
    #[arg(long, value_name = "PROGRAM", value_parser = ["torch"])]
    pub against: Option<String>,
    /// The Python of --against [default: $VIRTUAL_ENV/bin/python, python3 or python, the first that has torch]
    #[arg(long, value_name = "PATH", requires = "against")]
    pub python: Option<PathBuf>,
    /// Exit with 4 if a bus bandwidth is below this part of what --link allows, or of what --compare FILE has, at a size
    /// at which latency does not decide
    #[arg(long, value_name = "PART", value_parser = part)]
    pub expect: Option<f64>,
}
