//! The operations on tensors, blocking and asynchronous.
//!
//! Every rank of the group calls the same operations in the same order. An asynchronous operation is work of the group's
//! stream: whoever uses its memory next waits for it first, and an operation of the same group need not. Anything else is
//! an error, not a race.
//!
//! Input: tensors, a root or peer, a reduction. Output: the times of the operation, or a [`Work`] to wait
//! for. This module knows nothing of transports.

use paceline_memory::{Access, Claim, DType, Device, Event, Tensor};

use crate::call::{Blocks, Call, Region, fill};
use crate::staging::{Operand, Staged};
use crate::worker::Claims;
use crate::{CollectiveError, Group, OpKind, OpTimes, ReduceOp, Result, Work};

type Outcome = Result<OpTimes>;
type Submitted = Result<Work>;
type Prepared = Result<(Call, Used)>;

/// The memory of a call: of the host, or staged.
#[derive(Debug, Default)]
struct Used {
    claims: Claims,
    staged: Option<Staged>,
}

impl Group {
    /// Replaces `data` on every rank by the reduction of all ranks' data, as a tree over the ranks.
    pub fn all_reduce(&self, data: &Tensor, op: ReduceOp) -> Outcome {
        self.run(self.prepare(None, OpKind::AllReduce, Some(data), Some(data), op, 0)?)
    }

    /// Like [`Group::all_reduce`], in the background.
    pub fn all_reduce_async(&self, data: &Tensor, op: ReduceOp) -> Submitted {
        self.submit(|by| self.prepare(by, OpKind::AllReduce, Some(data), Some(data), op, 0))
    }

    /// Like [`Group::all_reduce`], but `data` stays unchanged and the result goes to `result`, which has the
    /// same length.
    pub fn all_reduce_into(&self, data: &Tensor, result: &Tensor, op: ReduceOp) -> Outcome {
        self.same_length(OpKind::AllReduce, data, result)?;
        self.run(self.prepare(None, OpKind::AllReduce, Some(data), Some(result), op, 0)?)
    }

    /// Replaces the root's `data` by the reduction of all ranks' data. Other ranks' data stay unchanged.
    pub fn reduce(&self, data: &Tensor, op: ReduceOp, root: usize) -> Outcome {
        self.run(self.reduce_call(None, data, Some(data), op, root)?)
    }

    /// Like [`Group::reduce`], in the background.
    pub fn reduce_async(&self, data: &Tensor, op: ReduceOp, root: usize) -> Submitted {
        self.submit(|by| self.reduce_call(by, data, Some(data), op, root))
    }

    /// Like [`Group::reduce`], but the root's `data` stays unchanged too, and the result goes to the root's
    /// `result`, which has the same length. Other ranks may pass `None`.
    pub fn reduce_into(
        &self,
        data: &Tensor,
        result: Option<&Tensor>,
        op: ReduceOp,
        root: usize,
    ) -> Outcome {
        if let Some(result) = result.filter(|_| self.rank() == root) {
            self.same_length(OpKind::Reduce, data, result)?;
        }
        self.run(self.reduce_call(None, data, result, op, root)?)
    }

    /// Replaces `data` on every rank by the root's `data`.
    pub fn broadcast(&self, data: &Tensor, root: usize) -> Outcome {
        self.run(self.broadcast_call(None, Some(data), data, root)?)
    }

    /// Like [`Group::broadcast`], in the background.
    pub fn broadcast_async(&self, data: &Tensor, root: usize) -> Submitted {
        self.submit(|by| self.broadcast_call(by, Some(data), data, root))
    }

    /// Like [`Group::broadcast`], from the root's `data` to every rank's `result`. Only the root needs
    /// `data`.
    pub fn broadcast_into(&self, data: Option<&Tensor>, result: &Tensor, root: usize) -> Outcome {
        if let Some(data) = data.filter(|_| self.rank() == root) {
            self.same_length(OpKind::Broadcast, data, result)?;
        }
        self.run(self.broadcast_call(None, data, result, root)?)
    }

    /// Gives every rank its share of the reduction of all ranks' `data`. Shares follow each other in rank
    /// order. Each is as long as that rank's `share`; together they are as long as `data`. `share` may lie in
    /// place, within `data`.
    pub fn reduce_scatter(&self, data: &Tensor, share: &Tensor, op: ReduceOp) -> Outcome {
        self.run(self.prepare(None, OpKind::ReduceScatter, Some(data), Some(share), op, 0)?)
    }

    /// Like [`Group::reduce_scatter`], in the background.
    pub fn reduce_scatter_async(&self, data: &Tensor, share: &Tensor, op: ReduceOp) -> Submitted {
        self.submit(|by| self.prepare(by, OpKind::ReduceScatter, Some(data), Some(share), op, 0))
    }

    /// Gives every rank the `share` of every rank, one after the other in rank order, in `gathered`. Shares
    /// may differ in length. A rank's `share` may lie in place, within `gathered`.
    pub fn all_gather(&self, share: &Tensor, gathered: &Tensor) -> Outcome {
        self.run(self.prepare(
            None,
            OpKind::AllGather,
            Some(share),
            Some(gathered),
            ReduceOp::Sum,
            0,
        )?)
    }

    /// Like [`Group::all_gather`], in the background.
    pub fn all_gather_async(&self, share: &Tensor, gathered: &Tensor) -> Submitted {
        self.submit(|by| {
            self.prepare(by, OpKind::AllGather, Some(share), Some(gathered), ReduceOp::Sum, 0)
        })
    }

    /// Gives the root the `share` of every rank, one after the other in rank order, in `gathered`. Only the
    /// root needs `gathered`. Shares may differ in length. The root's `share` may lie in place, within
    /// `gathered`.
    pub fn gather(&self, share: &Tensor, gathered: Option<&Tensor>, root: usize) -> Outcome {
        self.run(self.rooted(None, OpKind::Gather, Some(share), gathered, root)?)
    }

    /// Like [`Group::gather`], in the background.
    pub fn gather_async(
        &self,
        share: &Tensor,
        gathered: Option<&Tensor>,
        root: usize,
    ) -> Submitted {
        self.submit(|by| self.rooted(by, OpKind::Gather, Some(share), gathered, root))
    }

    /// Gives every rank its share of the root's `data`. Only the root needs `data`. Shares follow each other
    /// in rank order, each as long as that rank's `share`. The root's `share` may lie in place, within
    /// `data`.
    pub fn scatter(&self, data: Option<&Tensor>, share: &Tensor, root: usize) -> Outcome {
        self.run(self.rooted(None, OpKind::Scatter, data, Some(share), root)?)
    }

    /// Like [`Group::scatter`], in the background.
    pub fn scatter_async(&self, data: Option<&Tensor>, share: &Tensor, root: usize) -> Submitted {
        self.submit(|by| self.rooted(by, OpKind::Scatter, data, Some(share), root))
    }

    /// Sends a block of `data` to every rank, and receives a block from every rank in `received`. All blocks
    /// have the same length: an equal part of the tensor. The two tensors must not overlap.
    pub fn all_to_all(&self, data: &Tensor, received: &Tensor) -> Outcome {
        self.run(self.all_to_all_call(None, data, None, received, None)?)
    }

    /// Like [`Group::all_to_all`], in the background.
    pub fn all_to_all_async(&self, data: &Tensor, received: &Tensor) -> Submitted {
        self.submit(|by| self.all_to_all_call(by, data, None, received, None))
    }

    /// Like [`Group::all_to_all`], with blocks of any length: `counts[r]` elements of `data` go to rank `r`,
    /// and `received_counts[r]` elements come from rank `r`.
    pub fn all_to_all_ragged(
        &self,
        data: &Tensor,
        counts: &[usize],
        received: &Tensor,
        received_counts: &[usize],
    ) -> Outcome {
        self.run(self.all_to_all_call(None, data, Some(counts), received, Some(received_counts))?)
    }

    /// Sends `data` to rank `to`, which must receive the same number of elements. Returns when the receiver
    /// has asked for the data and they have left this rank's memory.
    pub fn send(&self, data: &Tensor, to: usize) -> Outcome {
        self.run(self.pair(None, OpKind::Send, Some((data, to)), None)?)
    }

    /// Like [`Group::send`], in the background.
    pub fn send_async(&self, data: &Tensor, to: usize) -> Submitted {
        self.submit(|by| self.pair(by, OpKind::Send, Some((data, to)), None))
    }

    /// Receives `data` from rank `from`, which must send the same number of elements.
    pub fn recv(&self, data: &Tensor, from: usize) -> Outcome {
        self.run(self.pair(None, OpKind::Recv, None, Some((data, from)))?)
    }

    /// Like [`Group::recv`], in the background.
    pub fn recv_async(&self, data: &Tensor, from: usize) -> Submitted {
        self.submit(|by| self.pair(by, OpKind::Recv, None, Some((data, from))))
    }

    /// Sends and receives at the same time. Two ranks can exchange data, and many ranks can pass data around
    /// a ring, without a deadlock.
    pub fn send_recv(&self, data: &Tensor, to: usize, received: &Tensor, from: usize) -> Outcome {
        self.run(self.pair(None, OpKind::SendRecv, Some((data, to)), Some((received, from)))?)
    }

    /// Like [`Group::send_recv`], in the background.
    pub fn send_recv_async(
        &self,
        data: &Tensor,
        to: usize,
        received: &Tensor,
        from: usize,
    ) -> Submitted {
        self.submit(|by| self.pair(by, OpKind::SendRecv, Some((data, to)), Some((received, from))))
    }

    /// Returns when every rank has arrived.
    pub fn barrier(&self) -> Outcome {
        self.run((Call::new(OpKind::Barrier, DType::U8), Used::default()))
    }

    /// Like [`Group::barrier`], in the background: finished when every rank has arrived.
    pub fn barrier_async(&self) -> Submitted {
        self.submit(|_| Ok((Call::new(OpKind::Barrier, DType::U8), Used::default())))
    }

    fn reduce_call(
        &self,
        by: Option<&Event>,
        data: &Tensor,
        result: Option<&Tensor>,
        op: ReduceOp,
        root: usize,
    ) -> Prepared {
        self.check_rank(root)?;
        let result = self.at_root(OpKind::Reduce, result, root)?;
        self.prepare(by, OpKind::Reduce, Some(data), result, op, root)
    }

    fn broadcast_call(
        &self,
        by: Option<&Event>,
        data: Option<&Tensor>,
        result: &Tensor,
        root: usize,
    ) -> Prepared {
        self.check_rank(root)?;
        let data = self.at_root(OpKind::Broadcast, data, root)?;
        self.prepare(by, OpKind::Broadcast, data, Some(result), ReduceOp::Sum, root)
    }

    fn rooted(
        &self,
        by: Option<&Event>,
        kind: OpKind,
        send: Option<&Tensor>,
        recv: Option<&Tensor>,
        root: usize,
    ) -> Prepared {
        self.check_rank(root)?;
        let (send, recv) = match kind {
            OpKind::Gather => (send, self.at_root(kind, recv, root)?),
            _ => (self.at_root(kind, send, root)?, recv),
        };
        self.prepare(by, kind, send, recv, ReduceOp::Sum, root)
    }

    /// The tensor that only the root needs. On other ranks it is ignored. Errors if the root passes none.
    fn at_root<'a>(
        &self,
        kind: OpKind,
        tensor: Option<&'a Tensor>,
        root: usize,
    ) -> Result<Option<&'a Tensor>> {
        if self.rank() != root {
            return Ok(None);
        }
        match tensor {
            Some(_) => Ok(tensor),
            None => self.refuse(kind, "needs a tensor for the whole on the root"),
        }
    }

    fn all_to_all_call(
        &self,
        by: Option<&Event>,
        data: &Tensor,
        counts: Option<&[usize]>,
        received: &Tensor,
        received_counts: Option<&[usize]>,
    ) -> Prepared {
        let kind = OpKind::AllToAll;
        let cut = |tensor: &Tensor, counts: Option<&[usize]>| {
            let (world, elems) = (self.world_size(), tensor.num_elems());
            match counts {
                None if elems.is_multiple_of(world) => Ok(vec![(elems / world) as u64; world]),
                None => {
                    let reason = format!("cannot cut {elems} elements into {world} even blocks");
                    self.refuse(kind, reason)
                }
                Some(counts) if fill(counts, world, elems) => {
                    Ok(counts.iter().map(|&count| count as u64).collect())
                }
                Some(counts) => {
                    let reason =
                        format!("got counts {counts:?} for {world} ranks and {elems} elements");
                    self.refuse(kind, reason)
                }
            }
        };
        let blocks = Blocks { send: cut(data, counts)?, recv: cut(received, received_counts)? };
        let (mut call, used) =
            self.prepare(by, kind, Some(data), Some(received), ReduceOp::Sum, 0)?;
        if call.overlap().is_some() {
            return self.refuse(kind, "cannot work in place");
        }
        call.blocks = Some(Box::new(blocks));
        Ok((call, used))
    }

    fn pair(
        &self,
        by: Option<&Event>,
        kind: OpKind,
        send: Option<(&Tensor, usize)>,
        recv: Option<(&Tensor, usize)>,
    ) -> Prepared {
        let (to, from) = (send.map(|(_, to)| to), recv.map(|(_, from)| from));
        self.check_pair(kind, to, from)?;
        let (send, recv) = (send.map(|(data, _)| data), recv.map(|(data, _)| data));
        let (mut call, used) = self.prepare(by, kind, send, recv, ReduceOp::Sum, 0)?;
        if call.overlap().is_some() {
            return self.refuse(kind, "needs two tensors that lie apart");
        }
        call.root = to.or(from).unwrap_or(0);
        call.from = from.unwrap_or(0);
        Ok((call, used))
    }

    pub(crate) fn check_pair(
        &self,
        kind: OpKind,
        to: Option<usize>,
        from: Option<usize>,
    ) -> Result<()> {
        for peer in [to, from].into_iter().flatten() {
            self.check_rank(peer)?;
            if peer == self.rank() && to != from {
                return self.refuse(kind, "names this very rank on one side only");
            }
        }
        Ok(())
    }

    fn same_length(&self, kind: OpKind, a: &Tensor, b: &Tensor) -> Result<()> {
        if a.num_elems() == b.num_elems() {
            return Ok(());
        }
        let (a, b) = (a.num_elems(), b.num_elems());
        self.refuse(kind, format!("needs a result as long as the data, got {b} for {a} elements"))
    }

    /// Claims the memory that a call needs, for the host or for the work of an event, or stages it. If the two tensors
    /// overlap, one of them must lie within the other, and one claim covers both.
    fn prepare(
        &self,
        by: Option<&Event>,
        kind: OpKind,
        send: Option<&Tensor>,
        recv: Option<&Tensor>,
        op: ReduceOp,
        root: usize,
    ) -> Prepared {
        let Some(dtype) = send.or(recv).map(Tensor::dtype) else {
            unreachable!("every operation has data on one side at least")
        };
        for tensor in [send, recv].into_iter().flatten() {
            match tensor.device() {
                // Every engine reaches the memory of the host.
                Device::Cpu => {}
                Device::Meta => {
                    return self.refuse(kind, "a tensor on the device meta has no contents");
                }
                // By NCCL, or through memory of the host.
                Device::Sim | Device::Cuda => {}
            }
        }
        let mut used = Used::default();
        let is_on_card = [send, recv].into_iter().flatten().all(|tensor| self.reaches(tensor));
        // `contents` says whether the operation reads the tensor, and whether it writes to it.
        let mut region = |place: usize, tensor: &Tensor, contents: (bool, bool)| {
            if let Some(home) = tensor.buffer().allocator().home() {
                let staged = used.staged.get_or_insert_default();
                if is_on_card {
                    let access = if contents.1 { Access::Write } else { Access::Read };
                    let (memory, ready) = (tensor.clone(), home.record());
                    staged.operands.push(Operand { memory, access, ready });
                    return Ok(Region { len_bytes: tensor.num_bytes(), ..address(tensor)? });
                }
                let host = self.staging(home)?.stage(tensor, contents, staged)?;
                // Whoever runs the operation notes its use of this memory, behind the copies to it.
                let base = host.buffer().claim(0..0, Access::Read, kind.name())?.base().as_ptr();
                return Ok(Region { base, len_bytes: host.num_bytes(), is_claimed: true });
            }
            let access = if contents.1 { Access::Write } else { Access::Read };
            let claim = match by {
                Some(event) => tensor.queue(access, kind.name(), event)?,
                None => tensor.claim(access, kind.name())?,
            };
            let region = claimed_region(&claim);
            used.claims[place] = Some(claim);
            Ok::<_, CollectiveError>(region)
        };
        let mut call = Call { op, root, is_on_card, ..Call::new(kind, dtype) };
        if let (Some(send), Some(recv)) = (send, recv) {
            if send.dtype() != recv.dtype() {
                let reason = format!("got both {} and {}", send.dtype(), recv.dtype());
                return self.refuse(kind, reason);
            }
            let (a, b) = (send.byte_range(), recv.byte_range());
            let is_shared =
                send.buffer().is_same(recv.buffer()) && a.start < b.end && b.start < a.end;
            if is_shared {
                let (outer, inner) = if a.len() >= b.len() { (send, &b) } else { (recv, &a) };
                let whole = outer.byte_range();
                if inner.start < whole.start || whole.end < inner.end {
                    return self.refuse(kind, "got two tensors that overlap in part");
                }
                let region = region(0, outer, (true, true))?;
                let part = |range: &std::ops::Range<usize>| {
                    region.part(range.start - whole.start..range.end - whole.start)
                };
                (call.send, call.recv) = (part(&a), part(&b));
                return Ok((call, used));
            }
        }
        if let Some(send) = send {
            call.send = region(0, send, (true, false))?;
        }
        if let Some(recv) = recv {
            call.recv = region(1, recv, (false, true))?;
        }
        Ok((call, used))
    }

    pub(crate) fn refuse<T>(&self, kind: OpKind, reason: impl Into<String>) -> Result<T> {
        Err(CollectiveError::Buffers { rank: self.rank(), op: kind.name(), reason: reason.into() })
    }

    fn run(&self, (mut call, used): (Call, Used)) -> Outcome {
        call.purpose = self.purpose;
        match used.staged {
            None => self.worker().run(call, used.claims),
            Some(_) => self.submit(|_| Ok((call, used)))?.wait(),
        }
    }

    fn submit(&self, prepare: impl FnOnce(Option<&Event>) -> Prepared) -> Submitted {
        let mut staged = None;
        let work = self.worker().submit(|event| {
            let (mut call, used) = prepare(Some(event))?;
            call.purpose = self.purpose;
            let operands = used.staged.as_ref().map_or_else(Vec::new, |of| of.operands.clone());
            staged = used.staged;
            Ok((call, operands))
        })?;
        let Some(staged) = staged else { return Ok(work) };
        let copied_back = self.copy_back(&staged, work.event())?;
        let ready = staged.operands.into_iter().map(|of| of.ready);
        Ok(work.between(ready.chain([copied_back]).collect()))
    }
}

/// Where the memory of a tensor begins.
pub(crate) fn address(tensor: &Tensor) -> Result<Region> {
    let start = tensor.byte_range().start;
    Ok(claimed_region(&tensor.buffer().claim(start..start, Access::Read, "collective")?))
}

fn claimed_region(claim: &Claim) -> Region {
    Region { base: claim.base().as_ptr(), len_bytes: claim.len_bytes(), is_claimed: true }
}
