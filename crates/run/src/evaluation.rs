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
use paceline_memory::{Category, DType, Tensor};
use paceline_settings::flags::CopyFlags;
use paceline_settings::micro_batches::MicroBatches;
use paceline_strategies::{Replica, StepContext, Strategy, add_rows};

use crate::predictions::Predictions;
use crate::to_device::{Loaded, ToDevice};

/// Evaluates the whole data set in batches of `global_batch` samples. All ranks call this together. Each
/// takes its share of every batch, so each sample is counted once. No parameter changes. Each sample gets its row of
/// `predictions`, if there are any, on all ranks. With `micro_batches`, batches are cut into these, and no sum depends on
/// the number of ranks.
pub fn evaluate(
    strategy: &mut dyn Strategy,
    cx: &mut StepContext,
    dataset: Arc<dyn Dataset>,
    (global_batch, micro_batches): (usize, Option<&MicroBatches>),
    mut predictions: Option<&mut Predictions>,
) -> Result<TestResult> {
    let Replica { compute, world: all, group, model, .. } = cx.replica;
    let (rank, world) = (group.rank(), group.world_size());
    let samples = dataset.len();
    let mut sampler = Sampler::new(samples, global_batch, rank, world, SampleOrder::Sequential)?;
    let (mut num_batches, mut num_empty) = (1, 0);
    if let Some(of) = micro_batches {
        sampler = sampler.with_micro_batches(&of.shares)?;
        num_batches = sampler.batches_per_epoch();
        num_empty = of.most() - of.shares[rank].len();
    }
    // Each micro-batch has a row, or all have one.
    let per_batch = sampler.shares_per_batch();
    let shares = || ShareIter::new(sampler.clone(), Position::default(), 1);
    let mut shares = predictions.is_some().then(shares).transpose()?;
    let settings = LoaderConfig { end_epoch: 1, ..LoaderConfig::default() };
    let len = num_batches * per_batch * SUMS_LEN;
    let sums = compute.allocator.tensor(DType::F64, [len], Category::Workspace)?;
    sums.fill_zero()?;
    let row = |at: usize| sums.slice(at * SUMS_LEN..(at + 1) * SUMS_LEN);
    let mut to_device = ToDevice::new(&compute.allocator, CopyFlags::default())?;
    let batches = Loader::new(dataset, sampler, compute.host.clone(), settings)?;
    for (at, batch) in batches.enumerate() {
        let own = row(if micro_batches.is_some() { at } else { 0 })?;
        let now = Some(vec![Some(batch?)]);
        for share in to_device.bring(Loaded { now, next: None })?.batches.into_iter().flatten() {
            let mut logits = None;
            paceline_strategies::evaluate(strategy, cx, &share.batch, |cx, output| {
                if predictions.is_some() {
                    logits = model.logits(cx, output)?;
                }
                model.evaluate(cx, output, &own)
            })?;
            if let (Some(predictions), Some(shares)) = (&mut predictions, &mut shares) {
                predictions.add(shares, &share.batch, logits)?;
            }
        }
    }
    for batch in 0..num_batches {
        let rows = sums.slice(batch * per_batch * SUMS_LEN..(batch + 1) * per_batch * SUMS_LEN)?;
        add_rows(compute, &rows, num_empty..per_batch, SUMS_LEN)?;
    }
    if !cx.replica.counts_samples() {
        // Others have the same.
        sums.fill_zero()?;
    }
    all.all_reduce(&sums, ReduceOp::Sum)?;
    predictions.map_or(Ok(()), |of| of.share(cx.replica))?;
    let sums = total(&sums, per_batch)?;
    check_finite(sums.loss, rank)?;
    let has_classes = model.objective.classifies();
    Ok(TestResult { samples, sums, has_classes })
}

/// The sums over all batches, whose own are each in the first of `per_batch` rows.
fn total(rows: &Tensor, per_batch: usize) -> Result<EpochSums> {
    let rows = rows.to_host()?;
    let rows = rows.read::<f64>()?;
    let firsts = rows.chunks_exact(SUMS_LEN).step_by(per_batch);
    Ok(firsts.fold(EpochSums::default(), |sums, of| EpochSums {
        loss: sums.loss + of[0],
        correct: sums.correct + of[1],
        count: sums.count + of[2],
    }))
}

fn check_finite(loss: f64, rank: usize) -> Result<()> {
    if loss.is_finite() {
        return Ok(());
    }
    // All ranks have the same sums, so all end together, and rank 0 says why.
    let problem = format!("the loss over the test set is not finite ({loss})");
    Err(match rank {
        0 => Failure::Run(format!(
            "{problem}, so these weights are of no use: go on from an earlier checkpoint, with a lower --lr"
        )),
        _ => Failure::Consequence(problem),
    })
}
