//! Strategies to keep the replicas of a model equal, one file each.
//!
//! Input: a model, a rank's share of a batch, and the group of ranks. Output: gradients that are, after a
//! training step, the mean over the whole batch on every rank. The model
//! announces each gradient when it is final, and the strategy decides when and how gradients are
//! communicated. This crate knows nothing of the command line or of files.
//!
//! | strategy | communication per step | when |
//! |---|---|---|
//! | [`Single`] | nothing | one rank only |
//! | [`SimpleDdp`] | one blocking all-reduce per parameter | after backward |
//! | [`SimpleDdpGa`] | the same, once for several batches | after backward |
//! | [`SimpleDdpHook`] | one blocking all-reduce per parameter | during backward, which waits |
//! | [`SimpleDdpAsync`] | one asynchronous all-reduce per parameter | during backward |
//! | [`BucketDdpAsync`] | one asynchronous all-reduce per bucket of copies | during backward |
//! | [`Ddp`] | one asynchronous all-reduce per bucket, in place | during backward |
//! | [`FlatDdp`] | one blocking all-reduce of everything | after backward |
//! | [`Ddp`] with [`HalfPrecision`] | one all-reduce per bucket, in 16 bits | during backward |
//! | [`Ddp`] with [`TopK`] | one all-gather per bucket, of the largest gradients | during backward |
//! | [`LocalSgd`] | one all-reduce of the parameters every few steps | after the optimizer |
//! | [`NoSync`] | nothing: for measuring what the others add | |
//! | [`Zero`] | one per parameter and gradient, blocking, to or from its owner | within the passes |
//! | [`Sharded`] | one per unit, reduced to and gathered from even shards | while the passes go on |
//!
//! All strategies up to `FlatDdp` give the same bits. Your own communication hook implements [`CommHook`].
//! [`Join`] works with every strategy, for ranks with different numbers of batches. [`clip_factor`] works
//! with the strategies whose ranks have the same gradients.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod grad_norm;
pub mod span;

mod accumulation;
mod bucket_ddp_async;
mod buckets;
mod clip;
mod comm_hook;
mod commit;
mod ddp;
mod error;
mod evaluate;
mod exactness;
mod executor;
mod flat_ddp;
mod footprint;
mod graphs;
mod half;
mod hooks;
mod in_order;
mod join;
mod local_sgd;
mod no_sync;
mod observer;
mod pipeline;
mod rehearsal;
mod replica;
mod setup;
mod sharded;
mod sharding;
mod simple_ddp;
mod simple_ddp_async;
mod simple_ddp_ga;
mod simple_ddp_hook;
mod single;
mod state;
mod step;
mod strategy;
mod tied;
mod top_k;
mod trainer;
mod zero;

pub use accumulation::{AccumulationOrder, add_rows};
pub use bucket_ddp_async::BucketDdpAsync;
pub use buckets::{Bucket, BucketCaps, plan_buckets};
pub use clip::clip_factor;
pub use comm_hook::CommHook;
pub use commit::{Commit, InterruptedStep, LeftTrainer, PeerShard};
pub use ddp::Ddp;
pub use error::StrategyError;
pub use evaluate::evaluate;
pub use exactness::Exactness;
pub use flat_ddp::FlatDdp;
pub use footprint::Footprint;
pub use graphs::GraphObstacle;
pub use half::HalfPrecision;
pub use join::Join;
pub use local_sgd::LocalSgd;
pub use no_sync::{NoSync, SyncBlocks};
pub use observer::{Digested, Observer, Phase};
pub use paceline_schedule as schedule;
pub use pipeline::Stages;
pub use rehearsal::rehearse_stages;
pub use replica::{MicroBatch, Replica, ReplicaOptions, SHARED_SUMS_BYTES};
pub use sharded::Sharded;
pub use sharding::{ShardAccumulation, ShardOptions, ZeroStage};
pub use simple_ddp::SimpleDdp;
pub use simple_ddp_async::SimpleDdpAsync;
pub use simple_ddp_ga::SimpleDdpGa;
pub use simple_ddp_hook::SimpleDdpHook;
pub use single::Single;
pub use state::{ActionTimes, Asks, StepContext, StepState};
pub use step::{StepLoss, Stepped, train_step};
pub use strategy::Strategy;
pub use top_k::TopK;
pub use trainer::{Evaluated, Trainer};
pub use zero::Zero;

/// The result of all functions of this crate that can fail.
pub type Result<T> = std::result::Result<T, StrategyError>;
