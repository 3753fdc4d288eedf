//! Data parallelism with buckets that are reduced while the backward pass still runs.
//!
//! Gradients live in the buckets ([`crate::plan_buckets`]), so nothing is copied. A bucket is sent when all
//! its gradients are final, in order, because all ranks must call the same operations in the
//! same order. The backward pass goes on meanwhile. After it, the strategy waits for the remaining
//! communication, if it may ([`ReplicaOptions::steps_by_bucket`](crate::ReplicaOptions::steps_by_bucket)) bucket by bucket, and lets the
//! optimizer work on each while the next ones travel.
//!
//! Operations per step: one per bucket. Bytes: the gradients. Memory: nothing beyond the gradients, or a copy
//! of them with [`Ddp::without_view`]. It is the fastest whenever communication can overlap with computation.

use paceline_collectives::{Mesh, MeshShape, Purpose, Work};
use paceline_kernels::Compute;
use paceline_memory::{Category, Tensor};
use paceline_model::{Model, Optimizer, ParamId, Precision, Storage};

use crate::{
    Bucket, BucketCaps, CommHook, Exactness, Footprint, Replica, Result, StepContext, Strategy,
    StrategyError, plan_buckets, span,
};

/// Bucketed data parallelism that overlaps communication with the backward pass.
///
/// ```
/// use paceline_strategies::{Ddp, Strategy};
///
/// assert_eq!(Ddp::new(1 << 20).name(), "ddp"); // buckets of 1 MiB
/// ```
pub struct Ddp {
    caps: BucketCaps,
    hook: Box<dyn CommHook>,
    has_view: bool,
    /// The memory of the buckets, if gradients are copied there.
    copy: Option<Tensor>,
    buckets: Vec<Bucket>,
    /// The gradients of each bucket that are not final yet in this step.
    pending: Vec<usize>,
    /// The bucket of each parameter, by the parameter's number.
    bucket_of: Vec<usize>,
    /// The next bucket to send.
    next: usize,
    in_flight: Vec<Work>,
}

/// With buckets of 25 MB, as in PyTorch.
impl Default for Ddp {
    fn default() -> Self {
        Self::new(25 << 20)
    }
}

impl Ddp {
    /// With buckets of `cap_bytes` bytes; see [`BucketCaps::new`].
    pub fn new(cap_bytes: usize) -> Self {
        Self::with_caps(BucketCaps::new(cap_bytes))
    }

    /// With buckets of these sizes.
    pub fn with_caps(caps: BucketCaps) -> Self {
        Self {
            caps,
            hook: Box::new(AllReduce),
            has_view: true,
            copy: None,
            buckets: Vec::new(),
            pending: Vec::new(),
            bucket_of: Vec::new(),
            next: 0,
            in_flight: Vec::new(),
        }
    }

    /// Lets `hook` communicate the buckets. The strategy then has the hook's name.
    pub fn with_hook(mut self, hook: impl CommHook + 'static) -> Self {
        self.hook = Box::new(hook);
        self
    }

    /// Keeps gradients outside of the buckets, and copies them to the buckets and back.
    pub fn without_view(mut self) -> Self {
        self.has_view = false;
        self
    }

    /// Waits for a bucket.
    fn receive(&mut self, cx: &mut StepContext, at: usize) -> Result<()> {
        cx.wait(&self.in_flight[at])?;
        let bucket = self.bucket(cx.replica, at)?;
        self.hook.receive(cx, at, &bucket)?;
        if self.copy.is_some() {
            let Replica { storage, compute, .. } = cx.replica;
            let grads = storage.grads().slice(self.buckets[at].range.clone())?;
            cx.track.record(span::GRAD_SYNC, || compute.copy(&bucket, &grads))?;
        }
        Ok(())
    }

    /// Waits for all buckets that are on their way.
    fn receive_all(&mut self, cx: &mut StepContext) -> Result<()> {
        (0..self.in_flight.len()).try_for_each(|at| self.receive(cx, at))?;
        self.in_flight.clear();
        Ok(())
    }

    fn bucket(&self, replica: &Replica, at: usize) -> Result<Tensor> {
        let all = self.copy.as_ref().unwrap_or(replica.storage.grads().tensor());
        Ok(all.slice(self.buckets[at].range.clone())?)
    }
}

impl Strategy for Ddp {
    fn name(&self) -> &'static str {
        self.hook.name()
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        self.hook.exactness(self.caps)
    }

    fn is_capturable(&self) -> bool {
        self.hook.is_capturable()
    }

    fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        mesh: &MeshShape,
        _: usize,
    ) -> Footprint {
        let buckets = plan_buckets(&model.layout, precision.grads.size_bytes(), self.caps);
        let lens: Vec<usize> = buckets.iter().map(|bucket| bucket.range.len()).collect();
        let world_size = mesh.num_ranks().unwrap_or(usize::MAX);
        let copy = if self.has_view { 0 } else { model.layout.trained_bytes(precision.grads) };
        Footprint {
            communication: copy + self.hook.communication_bytes(&lens, precision, world_size),
            ..Footprint::of_replica(&model.layout, precision)
        }
    }

    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        mesh: &Mesh,
    ) -> Result<Storage> {
        let (layout, allocator) = (&model.layout, &compute.allocator);
        let category = if self.has_view { Category::Gradients } else { Category::Communication };
        let shared = layout.trained_bytes(precision.grads);
        let shared = mesh.allocate(allocator, shared, category)?;
        if self.has_view {
            let values = layout.num_bytes(precision.master);
            let values = allocator.allocate(values, Category::Parameters)?;
            return Ok(Storage::new(layout.clone(), precision, values, shared, allocator)?);
        }
        self.copy = Some(Tensor::new(shared, 0, precision.grads, [layout.trained_len()])?);
        Ok(Storage::private(layout.clone(), precision, allocator)?)
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        let layout = &replica.model.layout;
        let elem_bytes = replica.storage.grads().dtype().size_bytes();
        self.buckets = plan_buckets(layout, elem_bytes, self.caps);
        self.bucket_of = vec![usize::MAX; layout.params().len()];
        for (at, bucket) in self.buckets.iter().enumerate() {
            bucket.params.iter().for_each(|id| self.bucket_of[id.0] = at);
        }
        self.pending = self.buckets.iter().map(|bucket| bucket.params.len()).collect();
        let lens: Vec<usize> = self.buckets.iter().map(|bucket| bucket.range.len()).collect();
        self.hook.prepare(replica, &lens)
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        self.hook.state()
    }

    /// Receives the gradients of an earlier step first, which may still be on their way to the same memory.
    fn begin_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        self.receive_all(cx)?;
        self.next = 0;
        for (pending, bucket) in self.pending.iter_mut().zip(&self.buckets) {
            *pending = bucket.params.len();
        }
        Ok(())
    }

    /// Sends the buckets whose gradients are all final, in order.
    fn gradient_ready(&mut self, cx: &mut StepContext, id: ParamId) -> Result<()> {
        let Replica { model, storage, compute, .. } = cx.replica;
        let pending = &mut self.pending[self.bucket_of[id.0]];
        *pending = pending.checked_sub(1).ok_or_else(|| {
            let name = model.layout.param(id).name.clone();
            StrategyError::Announcement { name, problem: "more than once" }
        })?;
        while self.pending.get(self.next) == Some(&0) {
            let bucket = self.bucket(cx.replica, self.next)?;
            if self.copy.is_some() {
                let grads = storage.grads().slice(self.buckets[self.next].range.clone())?;
                cx.track.record(span::GRAD_SYNC, || compute.copy(&grads, &bucket))?;
            }
            self.in_flight.push(self.hook.send(cx, self.next, &bucket)?);
            self.next += 1;
        }
        Ok(())
    }

    fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        if self.next < self.buckets.len() {
            // If training went on, the replicas would silently diverge.
            let params = self.buckets[self.next].params.iter();
            let names = params.map(|id| &*cx.replica.model.layout.param(*id).name);
            let name = names.collect::<Vec<_>>().join(" or ");
            return Err(StrategyError::Announcement { name, problem: "never" });
        }
        if cx.replica.steps_by_bucket() { Ok(()) } else { self.receive_all(cx) }
    }

    fn optimizer_step(&mut self, cx: &mut StepContext, optimizer: &mut Optimizer) -> Result<()> {
        let Replica { compute, storage, .. } = cx.replica;
        if self.in_flight.is_empty() {
            return Ok(cx.track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?);
        }
        optimizer.begin_step();
        for at in 0..self.in_flight.len() {
            let start_ns = cx.track.begin(span::GRAD_SYNC);
            self.receive(cx, at)?;
            cx.track.end(span::GRAD_SYNC, start_ns);
            let range = self.buckets[at].range.clone();
            cx.track.record(span::OPTIMIZER, || optimizer.update(compute, storage, range))?;
        }
        self.in_flight.clear();
        Ok(())
    }
}

/// The hook of `ddp` itself: an all-reduce in place.
#[derive(Debug, Default)]
struct AllReduce;

impl CommHook for AllReduce {
    fn name(&self) -> &'static str {
        "ddp"
    }

    fn exactness(&self, _: BucketCaps) -> Exactness {
        Exactness::Exact
    }

    fn is_capturable(&self) -> bool {
        true
    }

    fn send(&mut self, cx: &mut StepContext, at: usize, bucket: &Tensor) -> Result<Work> {
        let group = cx.replica.group.for_purpose(Purpose::Bucket(at));
        Ok(group.all_reduce_async(bucket, cx.replica.reduce_op())?)
    }
}
