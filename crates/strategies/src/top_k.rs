//! Sends only the largest gradients. The others are added to the gradients of the next step.
//!
//! A communication hook of `ddp`, after Stich et al., "Sparsified SGD with Memory" (2018). Each rank adds its
//! gradients to its residual. From each bucket it sends the fraction `k` that is largest in
//! magnitude, as pairs of index and value, and keeps the rest as its residual (error feedback: nothing is lost, only
//! delayed). All ranks sum all pairs as the tree of an all-reduce, so with `k` = 1 the result has the same bits.
//!
//! Operations per step: one all-gather per bucket. Bytes: every rank receives `2 k (N - 1)` times the
//! gradients, and with an all-reduce `2 (N - 1) / N` times. So this hook can be faster only for
//! `k` below `1 / N`, on a slow link, and if finding the largest gradients takes less time than it saves. Memory: the
//! residual (a copy of the gradients) and the pairs of all ranks.

use paceline_collectives::{Purpose, Work};
use paceline_kernels::top_k;
use paceline_memory::{Category, DType, Tensor};
use paceline_model::Precision;

use crate::replica::shared_tensor;
use crate::{BucketCaps, CommHook, Exactness, Replica, Result, StepContext, StrategyError, span};

/// Sends the largest fraction `k` of the elements of each bucket.
#[derive(Debug)]
pub struct TopK {
    k: f64,
    buckets: Vec<Sparse>,
}

#[derive(Debug)]
struct Sparse {
    /// The gradients that have not been sent: f32, as long as the bucket.
    residual: Tensor,
    /// This rank's indices, then the bits of their values: i32 (2 * count).
    pairs: Tensor,
    /// The pairs of all ranks: i32 (ranks * 2 * count).
    gathered: Tensor,
}

impl TopK {
    /// The default fraction.
    pub const DEFAULT_K: f64 = 0.1;

    /// Sends the fraction `k` of the elements of each bucket, rounded up. Errors if `k` is not above 0 and at
    /// most 1.
    pub fn new(k: f64) -> Result<Self> {
        if !(k > 0.0 && k <= 1.0) {
            let reason =
                format!("top_k sends a part of the gradients above 0 and up to 1, not {k}");
            return Err(StrategyError::Setting(reason));
        }
        Ok(Self { k, buckets: Vec::new() })
    }

    /// The number of elements of a bucket that are sent.
    fn count(&self, bucket_len: usize) -> usize {
        ((bucket_len as f64 * self.k).ceil() as usize).min(bucket_len)
    }
}

impl CommHook for TopK {
    fn name(&self) -> &'static str {
        "top_k"
    }

    fn exactness(&self, caps: BucketCaps) -> Exactness {
        match self.k {
            1.0 => Exactness::Exact,
            k => Exactness::Lossy(format!("top_k, with a part of {k} in buckets of {caps:?}")),
        }
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        // Everything is sent, so nothing is kept, and any exact strategy can go on.
        if self.k == 1.0 {
            return Vec::new();
        }
        let buckets = self.buckets.iter().enumerate();
        buckets.map(|(at, bucket)| (format!("residual {at}"), bucket.residual.clone())).collect()
    }

    fn communication_bytes(
        &self,
        bucket_lens: &[usize],
        precision: Precision,
        world_size: usize,
    ) -> usize {
        let of_bucket = |&len: &usize| {
            let pairs = 2 * self.count(len) * DType::I32.size_bytes();
            len * precision.grads.size_bytes() + pairs * (1 + world_size)
        };
        bucket_lens.iter().map(of_bucket).sum()
    }

    fn prepare(&mut self, replica: &Replica, bucket_lens: &[usize]) -> Result<()> {
        let (group, allocator) = (&replica.group, &replica.compute.allocator);
        let grads = replica.storage.precision().grads;
        let sparse = |&len: &usize| -> Result<Sparse> {
            let count = self.count(len);
            let shared = |elems: usize| shared_tensor(group, allocator, DType::I32, elems);
            let residual = allocator.tensor(grads, [len], Category::Communication)?;
            // -0, because adding +0 would turn a gradient of -0 into +0.
            residual.overwrite::<f32, _>(|residual| residual.fill(-0.0))?;
            let (pairs, gathered) = (shared(2 * count)?, shared(2 * count * group.world_size())?);
            Ok(Sparse { residual, pairs, gathered })
        };
        self.buckets = bucket_lens.iter().map(sparse).collect::<Result<_>>()?;
        Ok(())
    }

    fn send(&mut self, cx: &mut StepContext, at: usize, bucket: &Tensor) -> Result<Work> {
        let Sparse { residual, pairs, gathered } = &self.buckets[at];
        cx.track.record(span::GRAD_SYNC, || {
            top_k::select(&cx.replica.compute, bucket, residual, pairs)
        })?;
        let group = cx.replica.group.for_purpose(Purpose::Bucket(at));
        Ok(group.all_gather_async(pairs, gathered)?)
    }

    fn receive(&mut self, cx: &mut StepContext, at: usize, bucket: &Tensor) -> Result<()> {
        let world_size = cx.replica.group.world_size();
        let gathered = &self.buckets[at].gathered;
        let mean = || top_k::scatter_mean(&cx.replica.compute, gathered, world_size, bucket);
        Ok(cx.track.record(span::GRAD_SYNC, mean)?)
    }
}
