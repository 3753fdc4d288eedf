//! Flags of `paceline compare`.

use std::path::PathBuf;

use clap::Args;
use paceline_failure::numbers::within;
use paceline_settings::flags::MAX_PRICE;

const EXAMPLES: &str = "\
Examples:
  paceline compare runs/20260131-120000-cnn-ddp runs/20260131-121000-cnn-simple_ddp
  paceline compare runs/20260131-120000-cnn-all --price-per-hour 0.79
  paceline compare --numerics before after        the first tensor that differs, of PyTorch or paceline
";

/// Flags of `paceline compare`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct CompareRunsArgs {
    /// Run folders, or folders of run folders as --ddp-choice all makes them
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// Price of the machine per hour, which adds a column with the cost of each run
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = within(0.0, MAX_PRICE))]
    pub price_per_hour: Option<f64>,
    /// Name the first tensor that differs between two folders, with .safetensors files or digests of each step
    #[arg(long, conflicts_with_all = ["price_per_hour", "output"])]
    pub numerics: bool,
    /// Print all figures and settings, in several tables if they do not fit; with --numerics all modules
    #[arg(long)]
    pub verbose: bool,
    /// Where compare.csv, .html, .json and .md are written
    #[arg(long, value_name = "DIR", default_value = "reports/compare")]
    pub output: PathBuf,
}
