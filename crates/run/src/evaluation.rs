//! Computes loss and accuracy over a test set.
//!
//! Takes a data set and a replica, and returns sums over all ranks. This file knows neither when a run
//! evaluates nor how the result is used.

use std::sync::Arc;

use paceline_checkpoint::progress::{EpochSums, TestResult};
use paceline_collectives::ReduceOp;
use paceline_data::{Dataset, Loader, LoaderConfig, Position, SampleOrder, Sampler, ShareIter};
use paceline_failure::{Failure, Result};
use paceline_kernels::loss::SUMS_LEN;
use paceline_memory::{Category, DType};
use paceline_settings::flags::CopyFlags;
use paceline_strategies::{Replica, StepContext, Strategy};

use crate::predictions::Predictions;
use crate::to_device::{Loaded, ToDevice};

/// Evaluates the whole data set in batches of `global_batch` samples. All ranks call this together. Each
/// takes its share of every batch, so each sample is counted once. No parameter changes. Each sample gets its row of
/// `predictions`, if there are any, on all ranks.
pub fn evaluate(
    strategy: &mut dyn Strategy,
    cx: &mut StepContext,
    dataset: Arc<dyn Dataset>,
    global_batch: usize,
    mut predictions: Option<&mut Predictions>,
) -> Result<TestResult> {
    let Replica { compute, world: all, group, model, .. } = cx.replica;
    let (rank, world) = (group.rank(), group.world_size());
    let samples = dataset.len();
    let sampler = Sampler::new(samples, global_batch, rank, world, SampleOrder::Sequential)?;
    let shares = || ShareIter::new(sampler.clone(), Position::default(), 1);
    let mut shares = predictions.is_some().then(shares).transpose()?;
    let settings = LoaderConfig { end_epoch: 1, ..LoaderConfig::default() };
    let sums = compute.allocator.tensor(DType::F64, [SUMS_LEN], Category::Workspace)?;
    sums.fill_zero()?;
    let mut to_device = ToDevice::new(&compute.allocator, CopyFlags::default())?;
    for batch in Loader::new(dataset, sampler, compute.host.clone(), settings)? {
        let now = Some(vec![Some(batch?)]);
        for share in to_device.bring(Loaded { now, next: None })?.batches.into_iter().flatten() {
            let mut logits = None;
            paceline_strategies::evaluate(strategy, cx, &share.batch, |cx, output| {
                if predictions.is_some() {
                    logits = model.logits(cx, output)?;
                }
                model.evaluate(cx, output, &sums)
            })?;
            if let (Some(predictions), Some(shares)) = (&mut predictions, &mut shares) {
                predictions.add(shares, &share.batch, logits)?;
            }
        }
    }
    all.all_reduce(&sums, ReduceOp::Sum)?;
    if let Some(predictions) = predictions {
        all.all_reduce(&predictions.rows, ReduceOp::Sum)?;
    }
    let sums = sums.to_host()?;
    let sums = sums.read::<f64>()?;
    let (loss, correct, count) = (sums[0], sums[1], sums[2]);
    if !loss.is_finite() {
        // All ranks have the same sums, so all end together, and rank 0 says why.
        let problem = format!("the loss over the test set is not finite ({loss})");
        return Err(match rank {
            0 => Failure::Run(format!(
                "{problem}, so these weights are of no use: go on from an earlier checkpoint, with a lower --lr"
            )),
            _ => Failure::Consequence(problem),
        });
    }
    let has_classes = model.objective.classifies();
    Ok(TestResult { samples, sums: EpochSums { loss, correct, count }, has_classes })
}
