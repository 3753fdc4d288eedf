//! Uneven inputs: ranks that have different numbers of batches, or batches of different sizes.
//!
//! A strategy's operations need all ranks, so a rank that has run out of data
//! takes part with an empty batch, which every strategy handles. All ranks stop together when no rank has a
//! sample left. In PyTorch's `Join`, such a rank shadows the operations of the others, which every strategy
//! has to support; here strategies need no support. The ranks agree on the number of samples of each step, so
//! every sample has the same weight.
//!
//! Operations per batch: one blocking all-reduce of 8 bytes.

use paceline_collectives::ReduceOp;
use paceline_model::Batch;
use paceline_trace::SpanTrack;

use crate::{MicroBatch, Replica, Result, span};

/// Lets a rank train together with ranks that have more or less data.
#[derive(Debug)]
pub struct Join {
    empty: Batch,
}

impl Join {
    /// `empty` is a batch without samples, for when this rank has no batch left.
    pub fn new(empty: Batch) -> Self {
        Self { empty }
    }

    /// This rank's share of the next micro-batch. `own` is `None` if it has no batch left. Returns `None`, on every rank, once no
    /// rank has samples. All ranks call this.
    ///
    /// Records the time spent waiting for the others as [`span::EXPOSED`].
    pub fn next(
        &self,
        replica: &Replica,
        own: Option<Batch>,
        track: &mut SpanTrack,
    ) -> Result<Option<MicroBatch>> {
        let batch = own.unwrap_or_else(|| self.empty.clone());
        let mut count = [batch.num_samples() as i64];
        track
            .record(span::EXPOSED, || replica.group.all_reduce_slice(&mut count, ReduceOp::Sum))?;
        let global_count = count[0] as usize;
        Ok((global_count > 0).then_some(MicroBatch { batch, global_count }))
    }
}
