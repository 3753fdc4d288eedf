//! Flags of `paceline record`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use paceline_failure::numbers;

const EXAMPLES: &str = "\
Examples:
  paceline record -- torchrun --nproc-per-node 2 train.py
  paceline record --after 200 --stop -- python train.py        and no further
  paceline record --after 60 --seconds 2 -- python serve.py    no optimizer
  paceline record --watch-hang 60 -- torchrun --nproc-per-node 2 train.py    who hangs?
";

/// Flags of `paceline record`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct RecordArgs {
    /// Optimizer steps to let pass first; with --seconds, seconds after PyTorch is imported
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = numbers::within(0_u64, 1_000_000_000))]
    pub after: u64,
    /// Optimizer steps to record
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = numbers::within(1_u64, 1000))]
    pub steps: u64,
    /// Record this time instead of steps, for programs without an optimizer
    #[arg(long, value_name = "S", conflicts_with_all = ["steps", "stop"], value_parser = numbers::within(0.01, 600.0))]
    pub seconds: Option<f64>,
    /// More that is recorded.
    #[command(flatten)]
    pub more: More,
    /// End the program when all its ranks have recorded
    #[arg(long)]
    pub stop: bool,
    /// Record nothing; name the rank that the others wait for once no rank has made or ended a
    /// collective for S seconds, and the cause has stood still
    #[arg(long, value_name = "S", conflicts_with_all = ["after", "steps", "seconds", "stacks", "memory", "stop"], value_parser = numbers::within(1.0, 86_400.0))]
    pub watch_hang: Option<f64>,
    /// The folder of the traces, which must be new or empty [default: paceline-traces, or paceline-traces-2, ...];
    /// with --watch-hang, of the flight recorder's files [default: paceline-hang, ...]
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Print the Python file that records, for a program that starts it by itself
    #[arg(long, exclusive = true)]
    pub print_hook: bool,
    /// The program and its arguments
    #[arg(last = true, required_unless_present = "print_hook", value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Flags about more that is recorded.
#[derive(Debug, Args)]
pub struct More {
    /// Record the lines of Python that call each operator, which slows the recorded steps down
    #[arg(long)]
    pub stacks: bool,
    /// Record allocations of memory, about which PyTorch may warn on standard error
    #[arg(long)]
    pub memory: bool,
}
