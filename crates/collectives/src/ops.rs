//! The operations on tensors, blocking and asynchronous.
//!
//! Every rank of the group calls the same operations in the same order. An asynchronous operation is work of the group's
//! stream: whoever uses its memory next waits for it first, except operations of the same group. Anything else is
//! an error, not a race.
//!
//! Input: tensors, a root or peer, a reduction. Output: the times of the operation, or a [`Work`] to wait
//! for. This module knows nothing of transports.

use paceline_memory::{Access, DType, Device, Event, Tensor};

use crate::call::{BlockCounts, Call, Region, fill};
use crate::staging::{DeviceOperand, Staged};
use crate::worker::Claims;
use crate::{CollectiveError, Group, OpKind, OpTimes, ReduceOp, Result, Work};

type Outcome = Result<OpTimes>;

/// An operation as the caller asks for it.
#[derive(Clone, Copy)]
struct OpRequest<'a> {
    kind: OpKind,
    send: Option<&'a Tensor>,
    recv: Option<&'a Tensor>,
    op: ReduceOp,
    /// The root; the destination of a send, the source of a receive.
    root: usize,
    /// The source of the receiving half of a send-and-receive.
    from: usize,
    /// The elements to and from each rank in an all-to-all. `None` for blocks of the same length.
    counts: Option<[&'a [usize]; 2]>,
}

impl<'a> OpRequest<'a> {
    fn tensors(&self) -> impl Iterator<Item = &'a Tensor> {
        [self.send, self.recv].into_iter().flatten()
    }
}

fn on<'a>(kind: OpKind, send: Option<&'a Tensor>, recv: Option<&'a Tensor>) -> OpRequest<'a> {
    OpRequest { kind, send, recv, op: ReduceOp::Sum, root: 0, from: 0, counts: None }
}

/// The memory of a call: of the host, or staged.
#[derive(Debug, Default)]
struct CallMemory {
    claims: Claims,
    staged: Option<Staged>,
}

impl Group {
    /// Replaces `data` on every rank by the reduction of all ranks' data, as a tree over the ranks.
    pub fn all_reduce(&self, data: &Tensor, op: ReduceOp) -> Outcome {
        self.run(OpRequest { op, ..on(OpKind::AllReduce, Some(data), Some(data)) })
    }

    /// Like [`Group::all_reduce`], in the background.
    pub fn all_reduce_async(&self, data: &Tensor, op: ReduceOp) -> Result<Work> {
        self.start(OpRequest { op, ..on(OpKind::AllReduce, Some(data), Some(data)) })
    }

    /// Like [`Group::all_reduce`], but the result goes to `result`, which has the same length.
    pub fn all_reduce_into(&self, data: &Tensor, result: &Tensor, op: ReduceOp) -> Outcome {
        self.run(OpRequest { op, ..on(OpKind::AllReduce, Some(data), Some(result)) })
    }

    /// Replaces the root's `data` by the reduction of all ranks' data. Other ranks' data stay unchanged.
    pub fn reduce(&self, data: &Tensor, op: ReduceOp, root: usize) -> Outcome {
        self.reduce_into(data, Some(data), op, root)
    }

    /// Like [`Group::reduce`], but the result goes to the root's
    /// `result`, which has the same length. Other ranks may pass `None`.
    pub fn reduce_into(
        &self,
        data: &Tensor,
        result: Option<&Tensor>,
        op: ReduceOp,
        root: usize,
    ) -> Outcome {
        self.run(OpRequest { op, root, ..on(OpKind::Reduce, Some(data), result) })
    }

    /// Replaces `data` on every rank by the root's `data`.
    pub fn broadcast(&self, data: &Tensor, root: usize) -> Outcome {
        self.broadcast_into(Some(data), data, root)
    }

    /// Like [`Group::broadcast`], from the root's `data` to every rank's `result`. Only the root needs `data`.
    pub fn broadcast_into(&self, data: Option<&Tensor>, result: &Tensor, root: usize) -> Outcome {
        self.run(OpRequest { root, ..on(OpKind::Broadcast, data, Some(result)) })
    }

    /// Gives every rank its share of the reduction of all ranks' `data`. Shares follow each other in rank
    /// order, each as long as that rank's `share`; together they are as long as `data`. `share` may lie within `data`.
    pub fn reduce_scatter(&self, data: &Tensor, share: &Tensor, op: ReduceOp) -> Outcome {
        self.run(OpRequest { op, ..on(OpKind::ReduceScatter, Some(data), Some(share)) })
    }

    /// Like [`Group::reduce_scatter`], in the background.
    pub fn reduce_scatter_async(
        &self,
        data: &Tensor,
        share: &Tensor,
        op: ReduceOp,
    ) -> Result<Work> {
        self.start(OpRequest { op, ..on(OpKind::ReduceScatter, Some(data), Some(share)) })
    }

    /// Gives every rank the `share` of every rank, in rank order, in `gathered`. Shares
    /// may differ in length. A rank's `share` may lie in place, within `gathered`.
    pub fn all_gather(&self, share: &Tensor, gathered: &Tensor) -> Outcome {
        self.run(on(OpKind::AllGather, Some(share), Some(gathered)))
    }

    /// Like [`Group::all_gather`], in the background.
    pub fn all_gather_async(&self, share: &Tensor, gathered: &Tensor) -> Result<Work> {
        self.start(on(OpKind::AllGather, Some(share), Some(gathered)))
    }

    /// Like [`Group::all_gather`], for the root alone. Only the root needs `gathered`.
    pub fn gather(&self, share: &Tensor, gathered: Option<&Tensor>, root: usize) -> Outcome {
        self.run(OpRequest { root, ..on(OpKind::Gather, Some(share), gathered) })
    }

    /// Gives every rank its share of the root's `data`. Only the root needs `data`. Shares follow each other
    /// in rank order, each as long as that rank's `share`. The root's `share` may lie in place, within `data`.
    pub fn scatter(&self, data: Option<&Tensor>, share: &Tensor, root: usize) -> Outcome {
        self.run(OpRequest { root, ..on(OpKind::Scatter, data, Some(share)) })
    }

    /// Sends a block of `data` to every rank, and receives a block from every rank in `received`. All blocks
    /// are equal parts of the tensors, which must not overlap.
    pub fn all_to_all(&self, data: &Tensor, received: &Tensor) -> Outcome {
        self.run(on(OpKind::AllToAll, Some(data), Some(received)))
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
        let counts = Some([counts, received_counts]);
        self.run(OpRequest { counts, ..on(OpKind::AllToAll, Some(data), Some(received)) })
    }

    /// Sends `data` to rank `to`, which must receive the same number of elements. Returns when the data have left this
    /// rank's memory, after the receiver has asked for them.
    pub fn send(&self, data: &Tensor, to: usize) -> Outcome {
        self.run(OpRequest { root: to, ..on(OpKind::Send, Some(data), None) })
    }

    /// Like [`Group::send`], in the background.
    pub fn send_async(&self, data: &Tensor, to: usize) -> Result<Work> {
        self.start(OpRequest { root: to, ..on(OpKind::Send, Some(data), None) })
    }

    /// Receives `data` from rank `from`, which must send the same number of elements.
    pub fn recv(&self, data: &Tensor, from: usize) -> Outcome {
        self.run(OpRequest { root: from, from, ..on(OpKind::Recv, None, Some(data)) })
    }

    /// Like [`Group::recv`], in the background.
    pub fn recv_async(&self, data: &Tensor, from: usize) -> Result<Work> {
        self.start(OpRequest { root: from, from, ..on(OpKind::Recv, None, Some(data)) })
    }

    /// Sends and receives at the same time, so that two ranks can exchange data, and many can pass data around a ring, without
    /// a deadlock.
    pub fn send_recv(&self, data: &Tensor, to: usize, received: &Tensor, from: usize) -> Outcome {
        self.run(OpRequest { root: to, from, ..on(OpKind::SendRecv, Some(data), Some(received)) })
    }

    /// Returns when every rank has arrived.
    pub fn barrier(&self) -> Outcome {
        self.run(on(OpKind::Barrier, None, None))
    }

    fn run(&self, request: OpRequest) -> Outcome {
        if request.tensors().any(|tensor| tensor.buffer().allocator().home().is_some()) {
            return self.start(request)?.wait();
        }
        let (call, memory) = self.prepare(None, request)?;
        self.worker().run(call, memory.claims, None)
    }

    fn start(&self, request: OpRequest) -> Result<Work> {
        if request.tensors().any(|tensor| tensor.buffer().allocator().is_for_graph()) {
            let (call, memory) = self.prepare(None, request)?;
            return self.start_in_stream(call, memory.staged.unwrap_or_default().operands);
        }
        let mut staged = None;
        let prepare = |event: &Event| {
            let (call, memory) = self.prepare(Some(event), request)?;
            staged = memory.staged;
            Ok((call, staged.as_ref().map_or_else(Vec::new, |of| of.operands.clone())))
        };
        let work = self.worker().submit(prepare, None, None)?;
        let Some(staged) = staged else { return Ok(work) };
        let copied_back = staged.copy_back(work.event())?;
        let ready = staged.operands.into_iter().map(|of| of.ready);
        Ok(work.between(ready.chain([copied_back]).collect()))
    }

    /// Makes the requested call. Claims its memory, for the host or for the work of an event, or stages it.
    fn prepare(&self, by: Option<&Event>, mut request: OpRequest) -> Result<(Call, CallMemory)> {
        let OpRequest { kind, op, root, from, .. } = request;
        self.check_peers(&request)?;
        self.leave_whole_to_root(&mut request)?;
        let (dtype, is_on_card) = self.check_tensors(&request)?;
        let blocks = if kind == OpKind::AllToAll { Some(self.blocks(&request)?) } else { None };
        let purpose = self.purpose;
        let mut call = Call { op, root, from, blocks, purpose, ..Call::new(kind, dtype) };
        let OpRequest { send, recv, .. } = request;
        let mut memory = CallMemory::default();
        let mut take = |tensor: &Tensor, contents: (bool, bool)| {
            if is_on_card {
                memory.use_on_card(tensor, contents)
            } else if tensor.buffer().allocator().home().is_some() {
                memory.stage(self, kind, tensor, contents)
            } else {
                memory.claim(by, kind, tensor, contents)
            }
        };
        if let (Some(send), Some(recv)) = (send, recv)
            && let Some(outer) = self.overlapping(kind, send, recv)?
        {
            let whole = outer.byte_range();
            let region = take(outer, (true, true))?;
            let part = |tensor: &Tensor| {
                let range = tensor.byte_range();
                region.part(range.start - whole.start..range.end - whole.start)
            };
            (call.send, call.recv) = (part(send), part(recv));
        } else {
            if let Some(send) = send {
                call.send = take(send, (true, false))?;
            }
            if let Some(recv) = recv {
                call.recv = take(recv, (false, true))?;
            }
        }
        if matches!(kind, OpKind::AllToAll | OpKind::SendRecv) && call.overlap().is_some() {
            return self.refuse(kind, "needs two tensors that lie apart");
        }
        Ok((call, memory))
    }

    fn check_peers(&self, &OpRequest { kind, root, from, .. }: &OpRequest) -> Result<()> {
        if kind.has_root() {
            self.check_rank(root)?;
        }
        let is_one_sided = match kind {
            OpKind::Send | OpKind::Recv => root == self.rank(),
            OpKind::SendRecv => {
                self.check_rank(from)?;
                root != from && [root, from].contains(&self.rank())
            }
            _ => false,
        };
        if is_one_sided {
            return self.refuse(kind, "names this very rank on one side only");
        }
        Ok(())
    }

    /// Only the root needs the tensor for the whole; on other ranks it is ignored. Errors if the root does not pass it.
    fn leave_whole_to_root(&self, request: &mut OpRequest) -> Result<()> {
        let (kind, root) = (request.kind, request.root);
        let whole = match kind {
            OpKind::Reduce | OpKind::Gather => &mut request.recv,
            OpKind::Broadcast | OpKind::Scatter => &mut request.send,
            _ => return Ok(()),
        };
        if self.rank() != root {
            *whole = None;
        } else if whole.is_none() {
            return self.refuse(kind, "needs a tensor for the whole on the root");
        }
        Ok(())
    }

    /// Checks devices, types and lengths. Returns the element type, and whether NCCL reaches all of the memory.
    fn check_tensors(&self, request: &OpRequest) -> Result<(DType, bool)> {
        let &OpRequest { kind, send, recv, .. } = request;
        // Every engine reaches the memory of the host; NCCL reaches that of accelerators, which is staged otherwise.
        if request.tensors().any(|tensor| tensor.device() == Device::Meta) {
            return self.refuse(kind, "a tensor on the device meta has no contents");
        }
        if let (Some(send), Some(recv)) = (send, recv) {
            if send.dtype() != recv.dtype() {
                let reason = format!("got both {} and {}", send.dtype(), recv.dtype());
                return self.refuse(kind, reason);
            }
            let (data, result) = (send.num_elems(), recv.num_elems());
            let is_same = matches!(kind, OpKind::AllReduce | OpKind::Reduce | OpKind::Broadcast);
            if is_same && data != result {
                let reason =
                    format!("needs a result as long as the data, got {result} for {data} elements");
                return self.refuse(kind, reason);
            }
        }
        let dtype = send.or(recv).map_or(DType::U8, Tensor::dtype);
        Ok((dtype, request.tensors().all(|tensor| self.reaches(tensor))))
    }

    /// How the data of an all-to-all are divided.
    fn blocks(&self, request: &OpRequest) -> Result<Box<BlockCounts>> {
        let counts_of = |tensor: Option<&Tensor>, counts: Option<&[usize]>| {
            let (world, elems) = (self.world_size(), tensor.map_or(0, Tensor::num_elems));
            let reason = match counts {
                None if elems.is_multiple_of(world) => {
                    return Ok(vec![(elems / world) as u64; world]);
                }
                None => format!("cannot cut {elems} elements into {world} even blocks"),
                Some(counts) if fill(counts, world, elems) => {
                    return Ok(counts.iter().map(|&count| count as u64).collect());
                }
                Some(counts) => {
                    format!("got counts {counts:?} for {world} ranks and {elems} elements")
                }
            };
            self.refuse(request.kind, reason)
        };
        let [sent, received] = request.counts.map_or([None; 2], |counts| counts.map(Some));
        let (send, recv) = (counts_of(request.send, sent)?, counts_of(request.recv, received)?);
        Ok(Box::new(BlockCounts { send, recv }))
    }

    /// If two tensors overlap, the one that the other lies within. Errors if they overlap only in part.
    fn overlapping<'a>(
        &self,
        kind: OpKind,
        send: &'a Tensor,
        recv: &'a Tensor,
    ) -> Result<Option<&'a Tensor>> {
        let (a, b) = (send.byte_range(), recv.byte_range());
        if !send.buffer().is_same(recv.buffer()) || a.end <= b.start || b.end <= a.start {
            return Ok(None);
        }
        let (outer, whole, inner) = if a.len() >= b.len() { (send, a, b) } else { (recv, b, a) };
        if inner.start < whole.start || whole.end < inner.end {
            return self.refuse(kind, "got two tensors that overlap in part");
        }
        Ok(Some(outer))
    }

    pub(crate) fn refuse<T>(&self, kind: OpKind, reason: impl Into<String>) -> Result<T> {
        Err(CollectiveError::Buffers { rank: self.rank(), op: kind.name(), reason: reason.into() })
    }
}

/// How an operation uses a tensor, by whether it reads and whether it writes the contents.
fn access((_, is_written): (bool, bool)) -> Access {
    if is_written { Access::Write } else { Access::Read }
}

impl CallMemory {
    /// Claims memory of the host.
    fn claim(
        &mut self,
        by: Option<&Event>,
        kind: OpKind,
        tensor: &Tensor,
        contents: (bool, bool),
    ) -> Result<Region> {
        let claim = match by {
            Some(event) => tensor.queue(access(contents), kind.name(), event)?,
            None => tensor.claim(access(contents), kind.name())?,
        };
        let region = Region::of(&claim);
        let place = usize::from(self.claims[0].is_some());
        self.claims[place] = Some(claim);
        Ok(region)
    }

    /// Memory of a card that NCCL reaches. The worker notes its use.
    fn use_on_card(&mut self, tensor: &Tensor, contents: (bool, bool)) -> Result<Region> {
        let home = tensor.buffer().allocator().home().expect("NCCL reaches memory of cards only");
        let staged = self.staged.get_or_insert_default();
        let (memory, ready) = (tensor.clone(), home.record());
        staged.operands.push(DeviceOperand { memory, access: access(contents), ready });
        Region::on_card(tensor)
    }

    /// Memory of the host for the contents of a tensor of an accelerator. The worker notes its use, after the copies to it.
    fn stage(
        &mut self,
        group: &Group,
        kind: OpKind,
        tensor: &Tensor,
        contents: (bool, bool),
    ) -> Result<Region> {
        let home = tensor.buffer().allocator().home().expect("memory of an accelerator");
        let staged = self.staged.get_or_insert_default();
        let host = group.staging(home)?.stage(tensor, contents, staged)?;
        let base = host.buffer().claim(0..0, Access::Read, kind.name())?.base().as_ptr();
        Ok(Region::at(base, host.num_bytes()))
    }
}
