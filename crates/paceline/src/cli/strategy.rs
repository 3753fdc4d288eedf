//! Flags that decide how ranks keep their models equal.

use clap::Args;

use super::StrategyName;

/// Flags of strategies.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Strategy")]
pub struct StrategyArgs {
    /// How the ranks keep their models equal [default: ddp, or single with one rank]
    #[arg(long = "strategy", value_enum, value_name = "NAME")]
    pub name: Option<StrategyName>,
    /// Batches whose gradients add up before each optimizer step [default: 1, or 4 for simple_ddp_ga]
    #[arg(long, value_name = "N")]
    pub accumulate: Option<usize>,
    /// Bucket size in MB [default: 25, or 50 for the MLP]
    #[arg(long, value_name = "MB")]
    pub bucket_cap_mb: Option<f64>,
    /// Size of the first bucket of ddp in MB [default: 1, or --bucket-cap-mb if smaller]
    #[arg(long, value_name = "MB")]
    pub first_bucket_mb: Option<f64>,
    /// ddp: copy gradients into the buckets and back, instead of having them live there
    #[arg(long)]
    pub no_gradient_view: bool,
    /// Parameters may be without a gradient in a step; it is zero then
    #[arg(long)]
    pub find_unused_parameters: bool,
    /// Other parameters may be without a gradient in each step than in the first one
    #[arg(long)]
    pub no_static_graph: bool,
    /// With --batch-norm: normalize by the samples of all ranks, not of each rank alone
    #[arg(long)]
    pub sync_batch_norm: bool,
    /// With --batch-norm: all ranks take rank 0's running statistics before each step
    #[arg(long)]
    pub broadcast_buffers: bool,
    /// top_k: the part of the gradients to send, above 0 and up to 1 [default: 0.1]
    #[arg(long, value_name = "K")]
    pub top_k: Option<f64>,
    /// local_sgd: steps between two averages [default: 8]
    #[arg(long, value_name = "K")]
    pub sync_every: Option<usize>,
    /// local_sgd: average every K-th step's gradients and never the parameters
    #[arg(long)]
    pub local_sgd_as_published: bool,
    /// Alternate blocks of N synchronised and N unsynchronised steps, and say what the synchronised ones
    /// take longer
    #[arg(long, value_name = "N")]
    pub sync_blocks: Option<usize>,
}
