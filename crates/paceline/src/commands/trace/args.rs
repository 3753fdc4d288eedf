//! Flags of `paceline trace`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The actions on trace files.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Write one file with all ranks on one time line
    Merge(MergeArgs),
}

/// Flags of `paceline trace merge`.
#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Traces of the ranks, or folders with them. If a folder has several traces of a rank, the newest is
    /// taken
    #[arg(required = true, value_name = "DIR|FILE")]
    pub places: Vec<PathBuf>,
    /// The merged file; compressed if its name ends in .gz
    #[arg(short, long, value_name = "FILE", default_value = "merged.json.gz")]
    pub output: PathBuf,
    /// Replace the merged file if there is one
    #[arg(long)]
    pub force: bool,
}
