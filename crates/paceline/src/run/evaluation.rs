//! Computes loss and accuracy over a test set.
//!
//! Takes a data set and a replica, and returns sums over all ranks. This file knows neither when a run
//! evaluates nor what is done with the result.

use std::sync::Arc;

use paceline_collectives::ReduceOp;
use paceline_data::{Dataset, Loader, LoaderConfig, Order, Sampler};
use paceline_strategies::{Replica, Strategy};

use crate::run::batches::share_of;
use crate::run::progress::EpochSums;
use crate::{Failure, Result};

/// Evaluates the whole data set in batches of `global_batch` samples. All ranks call this together. Each
/// takes its share of every batch, so each sample is counted once. No parameter changes.
pub fn evaluate(
    strategy: &mut dyn Strategy,
    replica: &Replica,
    dataset: Arc<dyn Dataset>,
    global_batch: usize,
) -> Result<EpochSums> {
    let Replica { compute, group, .. } = replica;
    let (rank, world) = (group.rank(), group.world_size());
    let sampler = Sampler::new(dataset.len(), global_batch, rank, world, Order::Sequential)?;
    let settings = LoaderConfig { end_epoch: 1, ..LoaderConfig::default() };
    let mut sums = [0.0; 3];
    for batch in Loader::new(dataset, sampler, compute.allocator.clone(), settings)? {
        let share = share_of(batch?);
        let loss = strategy.evaluate(replica, &share)?;
        sums[0] += loss.loss;
        sums[1] += loss.correct as f64;
        sums[2] += share.targets.dims()[0] as f64;
    }
    group.all_reduce_slice(&mut sums, ReduceOp::Sum)?;
    if !sums[0].is_finite() {
        // All ranks have the same sums, so all end together, and rank 0 says why.
        let problem = format!("the loss over the test set is not finite ({})", sums[0]);
        return Err(match rank {
            0 => Failure::Run(format!(
                "{problem}, so these weights are of no use: go on from an earlier checkpoint, with a lower --lr"
            )),
            _ => Failure::Consequence(problem),
        });
    }
    let [loss, correct, count] = sums;
    Ok(EpochSums { loss, correct, count })
}
