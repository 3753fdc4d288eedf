//! Flags of `paceline bench`: the letters of nccl-tests, and more.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use paceline_collectives::{OpKind, ReduceOp};

use super::{CommArgs, TransportName};

const EXAMPLES: &str = "\
Examples:
  paceline bench all_reduce                           1 KB to 64 MB, 2 ranks in shared memory
  paceline bench all-gather -b 8 -e 128M -f 2 -n 50   sizes and iterations as in nccl-tests
  paceline bench all_reduce --sweep --nproc 2,4,6 --transport thread,shm,tcp --style lines
  paceline bench all_reduce --size-mb 1,10 --transport tcp --link 10gbit,50us --columns extended
  paceline bench all_reduce -J run.json --charts charts --compare earlier.json
  paceline bench scaling --nproc 1,2,4                how training speeds up with ranks
  paceline bench buckets --link 10gbit,50us           which bucket size hides most
";

/// Which operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum OpName {
    /// Every rank gets the reduction of all inputs
    #[value(alias = "all-reduce")]
    AllReduce,
    /// Every rank gets its share of the reduction
    #[value(alias = "reduce-scatter")]
    ReduceScatter,
    /// Every rank gets everybody's share
    #[value(alias = "all-gather")]
    AllGather,
    /// Every rank gets the root's data
    Broadcast,
    /// The root gets the reduction of all inputs
    Reduce,
    /// The root gets everybody's share
    Gather,
    /// Every rank gets its share of the root's data
    Scatter,
    /// Every rank gets a block from every rank
    #[value(alias = "all-to-all", alias = "alltoall")]
    AllToAll,
    /// Every rank sends to the next one and receives from the one before
    #[value(alias = "send-recv", alias = "sendrecv")]
    SendRecv,
    /// Nobody goes on before all have arrived
    Barrier,
}

impl OpName {
    /// The operation.
    pub fn kind(self) -> OpKind {
        match self {
            OpName::AllReduce => OpKind::AllReduce,
            OpName::ReduceScatter => OpKind::ReduceScatter,
            OpName::AllGather => OpKind::AllGather,
            OpName::Broadcast => OpKind::Broadcast,
            OpName::Reduce => OpKind::Reduce,
            OpName::Gather => OpKind::Gather,
            OpName::Scatter => OpKind::Scatter,
            OpName::AllToAll => OpKind::AllToAll,
            OpName::SendRecv => OpKind::SendRecv,
            OpName::Barrier => OpKind::Barrier,
        }
    }
}

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RedopName {
    /// Sum
    Sum,
    /// Product
    #[value(alias = "product")]
    Prod,
    /// Smallest
    Min,
    /// Largest
    Max,
    /// Mean
    #[value(alias = "mean")]
    Avg,
}

impl RedopName {
    /// The operation.
    pub fn op(self) -> ReduceOp {
        match self {
            RedopName::Sum => ReduceOp::Sum,
            RedopName::Prod => ReduceOp::Product,
            RedopName::Min => ReduceOp::Min,
            RedopName::Max => ReduceOp::Max,
            RedopName::Avg => ReduceOp::Mean,
        }
    }
}

/// What is printed for each size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StyleName {
    /// The table of nccl-tests
    Table,
    /// Two lines per configuration, and a closing table
    Lines,
}

/// Which columns the table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColumnsName {
    /// Those of nccl-tests
    Standard,
    /// And p99, maximum, effective bandwidth, prediction, part of the memory bandwidth
    Extended,
}

/// Flags of `paceline bench`.
#[derive(Debug, Args)]
// With negative numbers allowed, "-b -1" is answered as a value, not as an unknown flag.
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct BenchArgs {
    /// The operation
    #[arg(value_name = "OP")]
    pub op: OpName,

    /// First size, in bytes, or with K, M or G (powers of 1024) [default: 1K]
    #[arg(short = 'b', long, value_name = "SIZE", help_heading = "Sizes")]
    pub minbytes: Option<String>,
    /// Last size [default: 64M, or the first one if that is larger]
    #[arg(short = 'e', long, value_name = "SIZE", help_heading = "Sizes")]
    pub maxbytes: Option<String>,
    /// From one size to the next, in bytes
    #[arg(
        short = 'i',
        long,
        value_name = "SIZE",
        conflicts_with = "stepfactor",
        help_heading = "Sizes"
    )]
    pub stepbytes: Option<String>,
    /// From one size to the next, as a factor [default: 2]
    #[arg(short = 'f', long, value_name = "N", help_heading = "Sizes")]
    pub stepfactor: Option<u64>,
    /// These sizes, in MB of 1e6 bytes, separated by commas
    #[arg(
        long,
        value_name = "MB",
        value_delimiter = ',',
        conflicts_with_all = ["minbytes", "maxbytes", "stepbytes", "stepfactor"],
        help_heading = "Sizes"
    )]
    pub size_mb: Vec<String>,
    /// The sizes 1, 10, 100 and 1024 MB
    #[arg(
        long,
        conflicts_with_all = ["size_mb", "minbytes", "maxbytes", "stepbytes", "stepfactor"],
        help_heading = "Sizes"
    )]
    pub sweep: bool,

    /// Iterations that are timed
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, help_heading = "Measuring")]
    pub iters: usize,
    /// Iterations before those
    #[arg(
        short = 'w',
        long,
        alias = "warmup_iters",
        value_name = "N",
        default_value_t = 5,
        help_heading = "Measuring"
    )]
    pub warmup_iters: usize,
    /// Whether to compare every element of one more result: 1 or 0
    #[arg(
        short = 'c',
        long,
        value_name = "0|1",
        default_value_t = 1,
        value_parser = clap::value_parser!(u8).range(..=1),
        help_heading = "Measuring"
    )]
    pub check: u8,
    /// How elements are combined
    #[arg(
        short = 'o',
        long = "op",
        value_enum,
        default_value_t = RedopName::Sum,
        help_heading = "Measuring"
    )]
    pub redop: RedopName,
    /// Type of the elements: float, double, half, bfloat16, int32, int64, uint8, or as in Rust
    #[arg(
        short = 'd',
        long,
        value_name = "TYPE",
        default_value = "float",
        help_heading = "Measuring"
    )]
    pub datatype: String,
    /// The root of operations that have one
    #[arg(short = 'r', long, value_name = "RANK", default_value_t = 0, help_heading = "Measuring")]
    pub root: usize,

    /// Numbers of ranks, separated by commas [default: 2, or the number of cores if smaller]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "Ranks")]
    pub nproc: Vec<usize>,
    /// How the ranks reach each other, separated by commas [default: shm; tcp on several hosts]
    #[arg(long, value_enum, value_delimiter = ',', help_heading = "Ranks")]
    pub transport: Vec<TransportName>,
    /// Buffers in ordinary memory, which other processes cannot reach
    #[arg(long, help_heading = "Ranks")]
    pub private: bool,
    /// Give each rank a core of its own
    #[arg(long, help_heading = "Ranks")]
    pub pin_cores: bool,
    /// How the ranks talk to each other.
    #[command(flatten)]
    pub comm: CommArgs,

    /// What is printed
    #[arg(long, value_enum, default_value_t = StyleName::Table, help_heading = "Output")]
    pub style: StyleName,
    /// Which columns the table has
    #[arg(long, value_enum, default_value_t = ColumnsName::Standard, help_heading = "Output")]
    pub columns: ColumnsName,
    /// Write the report to this file, as JSON with the keys of nccl-tests
    #[arg(short = 'J', long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
    /// Write the rows to this file, as CSV
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub csv: Option<PathBuf>,
    /// Write charts of time and bandwidth into this folder, as PNG and SVG
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub charts: Option<PathBuf>,
    /// Lay an earlier report, or another program's lines of JSON, beside this one; repeatable
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub compare: Vec<PathBuf>,
}
