//! What `ddp` does with a bucket: by default an all-reduce, or a communication hook of one's own.
//!
//! A hook decides what travels: it may compress, sparsify or quantise, as long as the bucket ends as
//! the same mean on every rank. It knows nothing of layers or of when gradients become final. The
//! same seam as PyTorch's `register_comm_hook`.
//!
//! ```
//! use paceline_collectives::{ReduceOp, Work};
//! use paceline_kernels::elementwise;
//! use paceline_memory::Tensor;
//! use paceline_strategies::{BucketCaps, CommHook, Ddp, Exactness, Replica, Result, span};
//! use paceline_trace::SpanTrack;
//!
//! /// The sum on the way, the division at home.
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
//!     fn send(&mut self, replica: &Replica, _: &mut SpanTrack, _: usize, bucket: &Tensor) -> Result<Work> {
//!         Ok(replica.group.all_reduce_async(bucket, ReduceOp::Sum)?)
//!     }
//!
//!     fn receive(
//!         &mut self,
//!         replica: &Replica,
//!         track: &mut SpanTrack,
//!         _: usize,
//!         bucket: &Tensor,
//!     ) -> Result<()> {
//!         let world_size = replica.group.world_size() as f64;
//!         let divide = || elementwise::divide(&replica.compute, bucket, world_size);
//!         Ok(track.record(span::GRAD_SYNC, divide)?)
//!     }
//! }
//!
//! let strategy = Ddp::new(25 << 20).with_hook(SumThenDivide);
//! ```

use paceline_collectives::{ReduceOp, Work};
use paceline_memory::Tensor;
use paceline_trace::SpanTrack;

use crate::{BucketCaps, Exactness, Replica, Result};

/// How a bucket of gradients becomes the mean over the ranks.
pub trait CommHook: Send {
    /// Its name in reports.
    fn name(&self) -> &'static str;

    /// What it promises about the weights of the replicas, where buckets are of these sizes.
    fn exactness(&self, caps: BucketCaps) -> Exactness;

    /// Called once, before the first step, with the elements of each bucket.
    fn prepare(&mut self, _replica: &Replica, _bucket_lens: &[usize]) -> Result<()> {
        Ok(())
    }

    /// Starts communication of bucket number `at`, which holds this rank's gradients, and does not wait
    /// for it. Called in the same order on every rank.
    fn send(
        &mut self,
        replica: &Replica,
        track: &mut SpanTrack,
        at: usize,
        bucket: &Tensor,
    ) -> Result<Work>;

    /// Called after backward, when communication of the bucket is over; leaves the result in it.
    fn receive(
        &mut self,
        _: &Replica,
        _: &mut SpanTrack,
        _at: usize,
        _bucket: &Tensor,
    ) -> Result<()> {
        Ok(())
    }
}

/// An all-reduce in place.
#[derive(Debug, Default)]
pub(crate) struct AllReduce;

impl CommHook for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn exactness(&self, _: BucketCaps) -> Exactness {
        Exactness::Exact
    }

    fn send(
        &mut self,
        replica: &Replica,
        _: &mut SpanTrack,
        _: usize,
        bucket: &Tensor,
    ) -> Result<Work> {
        Ok(replica.group.all_reduce_async(bucket, ReduceOp::Mean)?)
    }
}
