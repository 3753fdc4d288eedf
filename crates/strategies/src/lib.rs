//! Every way to keep the replicas of a model equal, one file each.
//!
//! In go a model, a batch's share and the group of ranks; after a training step all gradients are
//! the mean over the whole batch, on every rank. A strategy is where ranks and model meet: it
//! listens to the announcements of gradients and decides when and how they are communicated. It
//! knows nothing of the command line or of files.
//!
//! | strategy | communication per step | when |
//! |---|---|---|
//! | [`Single`] | none | one rank only |
//! | [`SimpleDdp`] | one blocking all-reduce per parameter | after backward |
//! | [`Ddp`] | one asynchronous all-reduce per bucket | during backward |
#![forbid(unsafe_code)]

mod ddp;
mod error;
mod replica;
mod simple_ddp;
mod single;
mod strategy;

pub use ddp::Ddp;
pub use error::StrategyError;
pub use replica::{MicroBatch, Replica};
pub use simple_ddp::SimpleDdp;
pub use single::Single;
pub use strategy::{StepLoss, Strategy, span};

/// The result of everything here that can fail.
pub type Result<T> = std::result::Result<T, StrategyError>;
