//! Uneven inputs: ranks that have different numbers of batches, or batches of different sizes.
//!
//! A strategy's operations need all ranks, so a rank whose data are at an end cannot just stop. It
//! takes part with an empty batch instead, which every strategy handles, and all stop together when
//! nobody has a sample left. PyTorch's `Join` lets such a rank shadow the others' operations, which
//! each strategy has to know; here there is nothing to know. And since the ranks agree on the number
//! of samples of each step, every sample still counts the same, whichever rank has it.
//!
//! Operations per batch: one blocking all-reduce of 8 bytes.

use paceline_collectives::ReduceOp;
use paceline_memory::Tensor;
use paceline_trace::SpanTrack;

use crate::strategy::span;
use crate::{MicroBatch, Replica, Result};

/// What a rank needs to train together with others that have more data, or less.
#[derive(Debug)]
pub struct Join {
    inputs: Tensor,  // (0, input extents...)
    targets: Tensor, // (0) or (0, columns)
}

impl Join {
    /// `inputs` and `targets` are a batch of no samples, which stands in when there is none left.
    pub fn new(inputs: Tensor, targets: Tensor) -> Self {
        Self { inputs, targets }
    }

    /// This rank's share of the next micro-batch, given its own inputs and targets, if it has any
    /// left; nothing once no rank has. All ranks call it, and all get a share or none does.
    ///
    /// Records the time it waits for the others as [`span::EXPOSED`].
    pub fn next(
        &self,
        replica: &Replica,
        own: Option<(Tensor, Tensor)>,
        track: &mut SpanTrack,
    ) -> Result<Option<MicroBatch>> {
        let empty = || (self.inputs.clone(), self.targets.clone());
        let (inputs, targets) = own.unwrap_or_else(empty);
        let mut count = [inputs.dims()[0] as i64];
        track
            .record(span::EXPOSED, || replica.group.all_reduce_slice(&mut count, ReduceOp::Sum))?;
        let global_count = count[0] as usize;
        Ok((global_count > 0).then_some(MicroBatch { inputs, targets, global_count }))
    }
}
