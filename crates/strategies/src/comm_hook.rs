//! Your own communication hook for the buckets of `ddp`.
//!
//! A hook decides what is sent. It may compress, sparsify or quantize, as long as the bucket ends with the
//! same mean on every rank. It knows nothing of layers or of when gradients become final. The interface
//! corresponds to PyTorch's `register_comm_hook`.
//!
//! ```
//! use paceline_collectives::{Purpose, ReduceOp, Work};
//! use paceline_kernels::elementwise;
//! use paceline_memory::Tensor;
//! use paceline_strategies::{BucketCaps, CommHook, Ddp, Exactness, Replica, Result, StepContext, span};
//!
//! /// Sums over the ranks; each rank then divides.
//! struct SumThenDivide;
//!
//! impl CommHook for SumThenDivide {
//!     fn name(&self) -> &'static str {
//!         "sum_then_divide"
//!     }
//!
//!     fn exactness(&self, _: BucketCaps) -> Exactness {
//!         Exactness::Exact
//!     }
//!
//!     fn send(&mut self, cx: &mut StepContext, at: usize, bucket: &Tensor) -> Result<Work> {
//!         let group = cx.replica.group.for_purpose(Purpose::Bucket(at));
//!         Ok(group.all_reduce_async(bucket, ReduceOp::Sum)?)
//!     }
//!
//!     fn receive(&mut self, cx: &mut StepContext, _: usize, bucket: &Tensor) -> Result<()> {
//!         let Replica { group, compute, .. } = cx.replica;
//!         let divide = || elementwise::divide(compute, bucket, group.world_size() as f64);
//!         Ok(cx.track.record(span::GRAD_SYNC, divide)?)
//!     }
//! }
//!
//! let strategy = Ddp::new(25 << 20).with_hook(SumThenDivide);
//! ```

use paceline_collectives::Work;
use paceline_memory::Tensor;
use paceline_model::Precision;

use crate::{BucketCaps, Exactness, Replica, Result, StepContext};

/// How a bucket of gradients becomes the mean over the ranks.
pub trait CommHook: Send {
    /// The hook's name in reports.
    fn name(&self) -> &'static str;

    /// The guarantee of the hook about the weights of the replicas, for buckets of these sizes.
    fn exactness(&self, caps: BucketCaps) -> Exactness;

    /// The tensors that the hook keeps from step to step on this rank, by name.
    fn state(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// Bytes that the hook takes on each rank of `world_size` ranks, for buckets of these numbers of elements.
    fn communication_bytes(
        &self,
        _bucket_lens: &[usize],
        _precision: Precision,
        _world_size: usize,
    ) -> usize {
        0
    }

    /// Whether a graph can have what the hook does: work of the device, and all-reduces that it starts in
    /// [`CommHook::send`] and does not wait for. See [`Strategy::is_capturable`](crate::Strategy::is_capturable).
    fn is_capturable(&self) -> bool {
        false
    }

    /// Called once, before the first step, with the number of elements of each bucket.
    fn prepare(&mut self, _replica: &Replica, _bucket_lens: &[usize]) -> Result<()> {
        Ok(())
    }

    /// Starts communication of bucket number `at`, which holds this rank's gradients, without waiting for the
    /// result. Called in the same order on every rank. The operation is submitted for the purpose
    /// `Purpose::Bucket(at)`, so that reports can name the bucket.
    fn send(&mut self, cx: &mut StepContext, at: usize, bucket: &Tensor) -> Result<Work>;

    /// Called after backward, when communication of the bucket has finished. Leaves the result in the bucket.
    fn receive(&mut self, _: &mut StepContext, _at: usize, _bucket: &Tensor) -> Result<()> {
        Ok(())
    }
}
