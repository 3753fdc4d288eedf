//! Studies of training with reports of their own. A new one is a file of its own and a line in [`STUDIES`].

pub mod bucket_cost;
pub mod buckets;
pub mod naive_ddp;
pub mod scaling;
pub mod sharded_optimizer;
pub mod strategies;

use crate::study::Study;

/// The studies of `paceline bench`.
pub const STUDIES: &[Study] =
    &[scaling::STUDY, buckets::STUDY, naive_ddp::STUDY, sharded_optimizer::STUDY];
