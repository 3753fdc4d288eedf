//! Gradients are copied into a bucket; a full bucket is reduced asynchronously.
//!
//! This is the textbook form of bucketing. Hooks copy each final gradient to the end of the open bucket. A
//! bucket that has no room for the next gradient is sent. After backward, the last, partly filled bucket is
//! sent; then all buckets are awaited, divided and copied back. `ddp` does the same without the copies,
//! because its gradients live in the buckets, and starts earlier, with a small bucket.
//!
//! Operations per step: at least bytes / bucket size. Bytes: the gradients. Memory: a second copy of the gradients. It is
//! faster than `simple_ddp_async` for models with many small parameters.

use std::ops::Range;

use paceline_collectives::{Mesh, MeshShape, ReduceOp, Work};
use paceline_kernels::Compute;
use paceline_memory::Tensor;
use paceline_model::{Layout, Model, ParamId, Precision, Storage};

use crate::in_order::InOrder;
use crate::replica::shared_tensor;
use crate::{Exactness, Footprint, Replica, Result, StepContext, Strategy, span};

/// Sums buckets of copied gradients over the ranks, then divides and copies back.
#[derive(Debug)]
pub struct BucketDdpAsync {
    cap_bytes: usize,
    order: InOrder,
    /// All buckets, one after the other, in order of sending.
    buckets: Option<Tensor>,
    /// The filled part of the open bucket, in elements of `buckets`.
    open: Range<usize>,
    /// The place of each gradient in `buckets`.
    copies: Vec<(ParamId, Range<usize>)>,
    in_flight: Vec<(Range<usize>, Work)>,
}

impl BucketDdpAsync {
    /// A bucket is sent when the next gradient would make it larger than `cap_bytes`, or at the end of the
    /// step. A larger gradient has its own bucket.
    pub fn new(cap_bytes: usize) -> Self {
        Self {
            cap_bytes,
            order: InOrder::default(),
            buckets: None,
            open: 0..0,
            copies: Vec::new(),
            in_flight: Vec::new(),
        }
    }

    fn send(&mut self, cx: &mut StepContext) -> Result<()> {
        let group = &cx.replica.group;
        let range = self.open.clone();
        self.open.start = self.open.end;
        if let Some(buckets) = self.buckets.as_ref().filter(|_| !range.is_empty()) {
            let bucket = buckets.slice(range.clone())?;
            let work = group.all_reduce_async(&bucket, ReduceOp::Sum)?;
            self.in_flight.push((range, work));
        }
        Ok(())
    }

    fn add(&mut self, cx: &mut StepContext, id: ParamId) -> Result<()> {
        let Replica { storage, compute, .. } = cx.replica;
        let grad = storage.grad(id)?;
        let elem_bytes = grad.dtype().size_bytes();
        if (self.open.len() + grad.num_elems()) * elem_bytes > self.cap_bytes {
            self.send(cx)?;
        }
        let Some(buckets) = &self.buckets else { return Ok(()) };
        let place = self.open.end..self.open.end + grad.num_elems();
        let copy = buckets.slice(place.clone())?;
        cx.track.record(span::GRAD_SYNC, || compute.copy(&grad, &copy))?;
        self.open.end = place.end;
        self.copies.push((id, place));
        Ok(())
    }
}

/// Elements of all buckets: the gradients without padding.
fn buckets_len(layout: &Layout) -> usize {
    layout.trained().map(|(_, param)| param.range().len()).sum()
}

impl Strategy for BucketDdpAsync {
    fn name(&self) -> &'static str {
        "bucket_ddp_async"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact
    }

    fn footprint(&self, model: &Model, precision: Precision, _: &MeshShape, _: usize) -> Footprint {
        Footprint {
            communication: buckets_len(&model.layout) * precision.grads.size_bytes(),
            ..Footprint::of_replica(&model.layout, precision)
        }
    }

    /// Gradients stay in private memory, since peers access only the buckets.
    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        _: &Mesh,
    ) -> Result<Storage> {
        Ok(Storage::private(model.layout.clone(), precision, &compute.allocator)?)
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        let Replica { model, storage, compute, group, .. } = replica;
        self.order = InOrder::new(&model.layout);
        let dtype = storage.grads().dtype();
        let len = buckets_len(&model.layout);
        self.buckets = Some(shared_tensor(group, &compute.allocator, dtype, len)?);
        Ok(())
    }

    fn begin_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        self.order.restart();
        self.open = 0..0;
        self.copies.clear();
        self.in_flight.drain(..).try_for_each(|(_, work)| cx.wait(&work).map(drop))
    }

    fn gradient_ready(&mut self, cx: &mut StepContext, id: ParamId) -> Result<()> {
        self.order.ready(id);
        while let Some(id) = self.order.pop() {
            self.add(cx, id)?;
        }
        Ok(())
    }

    fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        self.order.finish();
        self.send(cx)?;
        let Some(buckets) = &self.buckets else { return Ok(()) };
        let Replica { storage, compute, .. } = cx.replica;
        for (range, work) in self.in_flight.drain(..) {
            cx.wait(&work)?;
            let bucket = buckets.slice(range)?;
            cx.track.record(span::GRAD_SYNC, || cx.replica.average(&bucket))?;
        }
        for (id, place) in self.copies.drain(..) {
            let (copy, grad) = (buckets.slice(place)?, storage.grad(id)?);
            cx.track.record(span::GRAD_SYNC, || compute.copy(&copy, &grad))?;
        }
        Ok(())
    }
}
