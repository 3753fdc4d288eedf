//! Data parallelism with buckets that are reduced while the backward pass still runs.
//!
//! Gradients become final from the last layer to the first, so buckets are cut from the end of flat
//! storage backwards: each is a contiguous range, and reducing it copies nothing. A bucket is closed
//! by the parameter that fills it, as in PyTorch's DistributedDataParallel (Li et al., 2020), and
//! the first one is small, so that communication starts early. Buckets are sent in order, whatever
//! the order in which they fill, because all ranks must call the same operations in the same order.
//!
//! Operations per step: one per bucket. Bytes: the gradients. Memory: nothing beyond them, since
//! gradients live in the buckets. It wins whenever communication can hide behind computation.

use std::ops::Range;

use paceline_collectives::{ReduceOp, Work};
use paceline_model::{Layout, ParamId};
use paceline_trace::Lane;

use crate::strategy::span;
use crate::{Replica, Result, Strategy, StrategyError};

/// A bucket: gradients that are reduced together.
#[derive(Debug, PartialEq, Eq)]
struct Bucket {
    /// Elements of flat storage, padding included.
    range: Range<usize>,
    /// How many parameters lie in it.
    num_params: usize,
    /// How many of them are not final yet in this step.
    pending: usize,
}

/// The tuned data parallelism.
#[derive(Debug)]
pub struct Ddp {
    cap_bytes: usize,
    first_cap_bytes: usize,
    buckets: Vec<Bucket>,
    /// The bucket of each parameter.
    bucket_of: Vec<usize>,
    /// The next bucket to send.
    next: usize,
    in_flight: Vec<Work>,
}

/// PyTorch's size of the first bucket.
const FIRST_BUCKET_BYTES: usize = 1 << 20;

impl Ddp {
    /// A bucket is closed once it holds `cap_bytes`; the first one once it holds 1 MiB, or `cap_bytes`
    /// if that is less. The parameter that fills a bucket lies in it, however large it is.
    pub fn new(cap_bytes: usize) -> Self {
        Self {
            cap_bytes,
            first_cap_bytes: FIRST_BUCKET_BYTES.min(cap_bytes),
            buckets: Vec::new(),
            bucket_of: Vec::new(),
            next: 0,
            in_flight: Vec::new(),
        }
    }

    /// The buckets of a layout, first to be sent first, and the bucket of each parameter.
    fn plan(&self, layout: &Layout, elem_bytes: usize) -> (Vec<Bucket>, Vec<usize>) {
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut bucket_of = vec![0; layout.params().len()];
        let mut end = layout.len();
        let mut is_open = false;
        for (at, param) in layout.params().iter().enumerate().rev() {
            if !is_open {
                buckets.push(Bucket { range: end..end, num_params: 0, pending: 0 });
                is_open = true;
            }
            let cap = if buckets.len() == 1 { self.first_cap_bytes } else { self.cap_bytes };
            bucket_of[at] = buckets.len() - 1;
            if let Some(bucket) = buckets.last_mut() {
                bucket.range.start = param.start;
                bucket.num_params += 1;
                end = param.start;
                is_open = bucket.range.len() * elem_bytes < cap;
            }
        }
        (buckets, bucket_of)
    }
}

impl Strategy for Ddp {
    fn name(&self) -> &'static str {
        "ddp"
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        let elem_bytes = replica.storage.grads().dtype().size_bytes();
        (self.buckets, self.bucket_of) = self.plan(&replica.model.layout, elem_bytes);
        for bucket in &mut self.buckets {
            bucket.pending = bucket.num_params;
        }
        Ok(())
    }

    fn gradient_ready(&mut self, replica: &Replica, _: &mut Lane, id: ParamId) -> Result<()> {
        let bucket = &mut self.buckets[self.bucket_of[id.0]];
        bucket.pending = bucket.pending.checked_sub(1).ok_or_else(|| {
            let name = replica.model.layout.param(id).name.clone();
            StrategyError::Announcement { name, problem: "more than once" }
        })?;
        while let Some(bucket) = self.buckets.get(self.next)
            && bucket.pending == 0
        {
            let grads = replica.storage.grads().slice(bucket.range.clone())?;
            self.in_flight.push(replica.group.all_reduce_async(&grads, ReduceOp::Mean)?);
            self.next += 1;
        }
        Ok(())
    }

    fn finish(&mut self, replica: &Replica, lane: &mut Lane) -> Result<()> {
        if self.next < self.buckets.len() {
            // Training on would let the replicas drift apart without a word.
            let params = replica.model.layout.params().iter().zip(&self.bucket_of);
            let missing = params.filter(|(_, bucket)| **bucket == self.next).map(|(p, _)| &*p.name);
            let name = missing.collect::<Vec<_>>().join(" or ");
            return Err(StrategyError::Announcement { name, problem: "never" });
        }
        lane.record(span::EXPOSED, || {
            self.in_flight.drain(..).try_for_each(|work| work.wait().map(drop))
        })?;
        self.next = 0;
        for bucket in &mut self.buckets {
            bucket.pending = bucket.num_params;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use paceline_model::{Init, LayoutBuilder};

    use super::*;

    #[test]
    fn buckets_cover_everything_once_from_the_end() {
        let mut builder = LayoutBuilder::new();
        for size in [100, 3000, 50, 700, 8] {
            builder.unit(format!("u{size}"));
            builder.param("weight", [size], Init::Constant(0.0));
        }
        let layout = builder.finish(2);
        let ddp = Ddp { first_cap_bytes: 1000, ..Ddp::new(4000) };
        let (buckets, bucket_of) = ddp.plan(&layout, 4);
        assert_eq!(bucket_of, [2, 1, 1, 0, 0]);
        assert_eq!(buckets[0].range.end, layout.len());
        assert_eq!(buckets[2].range.start, 0);
        assert!(buckets.windows(2).all(|pair| pair[1].range.end == pair[0].range.start));
        assert_eq!(buckets.iter().map(|b| b.num_params).collect::<Vec<_>>(), [2, 2, 1]);
    }
}
