//! A group of ranks, and the operations it offers.

use std::sync::Arc;
use std::time::Duration;

use paceline_memory::{Access, Allocator, Buffer, Category, Claim, DType, Element, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::control::{Control, Fate, MAX_RANKS};
use crate::record::{OpKind, OpRecord, OpTimes};
use crate::reduce::{ReduceElement, ReduceOp, is_reducible};
use crate::round::{Call, ControlMemory, Core, Region};
use crate::segment::Reach;
use crate::shm::{Links, Monitor};
use crate::worker::{Work, Worker};
use crate::{CollectiveError, Meeting};

/// How the ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Ranks are threads of one process.
    Thread,
    /// Ranks are processes of one host and share memory.
    Shm,
}

impl Transport {
    /// The name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Thread => "thread",
            Transport::Shm => "shm",
        }
    }
}

/// How a group waits.
#[derive(Clone, Copy, Debug)]
pub struct GroupOptions {
    /// The longest that any operation, or the meeting, may wait for other ranks.
    pub timeout: Duration,
    /// How long a blocking operation keeps its core busy before it sleeps. Zero is right where ranks
    /// share cores.
    pub spin: Duration,
}

impl GroupOptions {
    /// Sixty seconds of patience, and a short spin where each of `local_ranks` has a core.
    pub fn for_local_ranks(local_ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = if local_ranks <= cores { Duration::from_micros(50) } else { Duration::ZERO };
        Self { timeout: Duration::from_secs(60), spin }
    }
}

/// One rank's membership in a group.
///
/// Every rank of a group calls the same operations in the same order. Dropping the group leaves it;
/// peers that still need this rank then get an error and do not hang.
#[derive(Debug)]
pub struct Group {
    // Ends first, so that what was submitted is finished while the peers can still be reached.
    worker: Option<Worker>,
    core: Arc<Core>,
    transport: Transport,
    links: Option<Links>,
    monitor: Option<Monitor>,
}

impl Group {
    /// The groups of `world_size` ranks that are threads of this process, in rank order.
    ///
    /// Panics if `world_size` is zero or above [`MAX_RANKS`].
    pub fn threads(world_size: usize) -> Vec<Self> {
        Self::threads_with(world_size, GroupOptions::for_local_ranks(world_size))
    }

    /// As [`Group::threads`], with options.
    pub fn threads_with(world_size: usize, options: GroupOptions) -> Vec<Self> {
        assert!((1..=MAX_RANKS).contains(&world_size), "1 to {MAX_RANKS} ranks");
        let control = Arc::new(Control::default());
        (0..world_size)
            .map(|rank| {
                let control = ControlMemory::Threads(control.clone());
                let core = Arc::new(Core::new(rank, world_size, control, Reach::Threads));
                let worker = Some(Worker::start(core.clone(), options));
                Self { worker, core, transport: Transport::Thread, links: None, monitor: None }
            })
            .collect()
    }

    /// A group of one.
    pub fn single() -> Self {
        Self::threads(1).remove(0)
    }

    /// Meets the other processes of this host and forms the group with them.
    ///
    /// Blocks until all `world_size` ranks have come, at most `options.timeout`. Errors when they
    /// do not, when one presents another secret or world size, or when memory cannot be shared.
    pub fn shm(
        meeting: &Meeting,
        rank: usize,
        world_size: usize,
        options: GroupOptions,
    ) -> Result<Self, CollectiveError> {
        if rank >= world_size || world_size > MAX_RANKS {
            return Err(CollectiveError::NoSuchRank { rank, world_size });
        }
        let links = Links::connect(meeting, rank, world_size, options.timeout)?;
        let (control, reach) = links.share_control()?;
        let core = Arc::new(Core::new(rank, world_size, control, reach));
        let monitor = Some(Monitor::start(&links, core.clone())?);
        let worker = Some(Worker::start(core.clone(), options));
        let transport = Transport::Shm;
        let group = Self { worker, core, transport, links: Some(links), monitor };
        group.barrier()?;
        Ok(group)
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.core.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.core.world
    }

    /// How the ranks reach each other.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Allocates zeroed memory on every rank that all operations use in place, without staging. A
    /// collective call: every rank passes the same size. The memory lives as long as the group.
    pub fn allocate(
        &self,
        allocator: &Allocator,
        len_bytes: usize,
        category: Category,
    ) -> Result<Buffer, CollectiveError> {
        let Some(links) = &self.links else {
            let buffer = allocator.host(len_bytes, category)?;
            let whole = Tensor::new(buffer.clone(), 0, DType::U8, [len_bytes])?;
            whole.write::<u8>()?.fill(0);
            return Ok(buffer);
        };
        let segment = links.share_segment(len_bytes)?;
        let start = segment.start_bytes + self.rank() * segment.part_bytes;
        let mapping = segment.mapping.clone();
        // SAFETY: this is the only buffer made of this rank's part of a new segment; peers touch it
        // during collective operations only, in ranges that are claimed here for that time.
        let buffer =
            unsafe { Buffer::window(mapping, start..start + len_bytes, category, allocator)? };
        self.core.reach.add(segment);
        self.barrier()?;
        Ok(buffer)
    }

    /// Replaces `data` on every rank by the reduction of all ranks' data, in rank order.
    pub fn all_reduce(&self, data: &Tensor, op: ReduceOp) -> Result<OpTimes, CollectiveError> {
        let (call, claim) = self.tensor_call(OpKind::AllReduce, data, Access::Write, op, 0)?;
        self.worker().run(call, vec![claim])
    }

    /// As [`Group::all_reduce`], in the background. `data` stay claimed until it is finished.
    pub fn all_reduce_async(&self, data: &Tensor, op: ReduceOp) -> Result<Work, CollectiveError> {
        let (call, claim) = self.tensor_call(OpKind::AllReduce, data, Access::Write, op, 0)?;
        Ok(self.worker().submit(call, vec![claim]))
    }

    /// As [`Group::all_reduce`], for a slice in private memory: blocking, and staged between
    /// processes.
    pub fn all_reduce_slice<T: ReduceElement>(
        &self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<OpTimes, CollectiveError> {
        self.worker().run(slice_call(OpKind::AllReduce, data, op, 0), Vec::new())
    }

    /// Replaces `data` on every rank by the root's.
    pub fn broadcast(&self, data: &Tensor, root: usize) -> Result<OpTimes, CollectiveError> {
        let (call, claim) = self.broadcast_call(data, root)?;
        self.worker().run(call, vec![claim])
    }

    /// As [`Group::broadcast`], in the background. `data` stay claimed until it is finished.
    pub fn broadcast_async(&self, data: &Tensor, root: usize) -> Result<Work, CollectiveError> {
        let (call, claim) = self.broadcast_call(data, root)?;
        Ok(self.worker().submit(call, vec![claim]))
    }

    /// As [`Group::broadcast`], for a slice in private memory.
    pub fn broadcast_slice<T: Element>(
        &self,
        data: &mut [T],
        root: usize,
    ) -> Result<OpTimes, CollectiveError> {
        self.check_rank(root)?;
        self.worker().run(slice_call(OpKind::Broadcast, data, ReduceOp::Sum, root), Vec::new())
    }

    /// Returns when every rank has arrived.
    pub fn barrier(&self) -> Result<OpTimes, CollectiveError> {
        let call = slice_call::<u8>(OpKind::Barrier, &mut [], ReduceOp::Sum, 0);
        self.worker().run(call, Vec::new())
    }

    /// As [`Group::barrier`], in the background: finished when every rank has arrived.
    pub fn barrier_async(&self) -> Result<Work, CollectiveError> {
        let call = slice_call::<u8>(OpKind::Barrier, &mut [], ReduceOp::Sum, 0);
        Ok(self.worker().submit(call, Vec::new()))
    }

    /// Brings every rank's `data`, all of one length, to the root's `gathered`, which is `world_size`
    /// times as long, in rank order. Only the root passes `gathered`.
    pub fn gather(
        &self,
        data: &Tensor,
        gathered: Option<&Tensor>,
        root: usize,
    ) -> Result<OpTimes, CollectiveError> {
        let (call, claims) = self.gather_call(data, gathered, root)?;
        self.worker().run(call, claims)
    }

    /// As [`Group::gather`], in the background. Both tensors stay claimed until it is finished.
    pub fn gather_async(
        &self,
        data: &Tensor,
        gathered: Option<&Tensor>,
        root: usize,
    ) -> Result<Work, CollectiveError> {
        let (call, claims) = self.gather_call(data, gathered, root)?;
        Ok(self.worker().submit(call, claims))
    }

    /// Brings every rank's `data`, all of one length, to the root, in rank order. The root gets
    /// `Some` vector of `world_size * data.len()` elements, the others `None`.
    pub fn gather_slice<T: Element>(
        &self,
        data: &[T],
        root: usize,
    ) -> Result<Option<Vec<T>>, CollectiveError> {
        self.check_rank(root)?;
        let is_root = self.rank() == root;
        // The operation reads the data through the same kind of region that others write.
        let mut sent = data.to_vec();
        let mut received = Vec::new();
        if is_root && let Some(&first) = data.first() {
            received.resize(data.len() * self.world_size(), first);
        }
        let mut call = slice_call(OpKind::Gather, &mut sent, ReduceOp::Sum, root);
        call.recv = region_of(&mut received);
        self.worker().run(call, Vec::new())?;
        Ok(is_root.then_some(received))
    }

    /// Brings one object of each rank to the root, in rank order; objects may differ in size.
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>, CollectiveError> {
        let wrap = |e: postcard::Error| CollectiveError::Object(e.to_string());
        let bytes = postcard::to_stdvec(object).map_err(wrap)?;
        // Every rank needs to know the longest, since a gather's parts are of one length; f64 counts
        // exactly far beyond any memory.
        let mut longest = [bytes.len() as f64];
        self.all_reduce_slice(&mut longest, ReduceOp::Max)?;
        let mut padded = (bytes.len() as u64).to_le_bytes().to_vec();
        padded.extend_from_slice(&bytes);
        padded.resize(8 + longest[0] as usize, 0);
        let Some(gathered) = self.gather_slice(&padded, root)? else { return Ok(None) };
        let parts = gathered.chunks_exact(padded.len()).map(|part| {
            let (len, rest) = part.split_first_chunk::<8>().expect("the length comes first");
            let len = (u64::from_le_bytes(*len) as usize).min(rest.len());
            postcard::from_bytes(&rest[..len]).map_err(wrap)
        });
        Ok(Some(parts.collect::<Result<_, _>>()?))
    }

    /// Moves the records of operations finished since the last call to the end of `out`, the
    /// thousand most recent ones at most.
    pub fn drain_records(&self, out: &mut Vec<OpRecord>) {
        self.core.drain_records(out);
    }

    fn worker(&self) -> &Worker {
        self.worker.as_ref().expect("the worker is taken when the group is dropped, not before")
    }

    fn check_rank(&self, rank: usize) -> Result<(), CollectiveError> {
        let world_size = self.world_size();
        if rank < world_size {
            return Ok(());
        }
        Err(CollectiveError::NoSuchRank { rank, world_size })
    }

    fn broadcast_call(&self, data: &Tensor, root: usize) -> Result<(Call, Claim), CollectiveError> {
        self.check_rank(root)?;
        self.tensor_call(OpKind::Broadcast, data, Access::Write, ReduceOp::Sum, root)
    }

    fn gather_call(
        &self,
        data: &Tensor,
        gathered: Option<&Tensor>,
        root: usize,
    ) -> Result<(Call, Vec<Claim>), CollectiveError> {
        self.check_rank(root)?;
        let (mut call, claim) =
            self.tensor_call(OpKind::Gather, data, Access::Read, ReduceOp::Sum, root)?;
        let mut claims = vec![claim];
        if self.rank() == root {
            let expected = data.num_elems().saturating_mul(self.world_size());
            let fits = |to: &&Tensor| to.num_elems() == expected && to.dtype() == data.dtype();
            let to = gathered.filter(fits).ok_or(CollectiveError::GatherSize {
                expected,
                dtype: data.dtype(),
                got: gathered.map(|to| format!("{} of {}", to.num_elems(), to.dtype())),
            })?;
            let claim = to.claim(Access::Write, OpKind::Gather.name())?;
            call.recv = claimed_region(&claim);
            claims.push(claim);
        }
        Ok((call, claims))
    }

    fn tensor_call(
        &self,
        kind: OpKind,
        data: &Tensor,
        access: Access,
        op: ReduceOp,
        root: usize,
    ) -> Result<(Call, Claim), CollectiveError> {
        if kind == OpKind::AllReduce && !is_reducible(data.dtype()) {
            return Err(CollectiveError::NotReducible(data.dtype()));
        }
        let claim = data.claim(access, kind.name())?;
        let region = claimed_region(&claim);
        let recv = Region::EMPTY;
        Ok((Call { kind, dtype: data.dtype(), op, root, data: region, recv }, claim))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        drop(self.worker.take());
        self.core.control.depart(self.rank(), Fate::Left);
        if let Some(monitor) = self.monitor.take() {
            monitor.stop(self.links.as_ref());
        }
    }
}

fn claimed_region(claim: &Claim) -> Region {
    Region { base: claim.base().as_ptr(), len_bytes: claim.len_bytes(), is_claimed: true }
}

fn region_of<T: Element>(data: &mut [T]) -> Region {
    let len_bytes = size_of_val(data);
    Region { base: data.as_mut_ptr().cast(), len_bytes, is_claimed: false }
}

/// A call on a slice; the caller keeps the slice borrowed until the call is finished.
fn slice_call<T: Element>(kind: OpKind, data: &mut [T], op: ReduceOp, root: usize) -> Call {
    let (data, recv) = (region_of(data), Region::EMPTY);
    Call { kind, dtype: T::DTYPE, op, root, data, recv }
}
