//! Which bytes go where, for each operation.
//!
//! Input: a call, and the calls of all ranks. Output: work in the stream of this rank's card. All ranks make the same calls
//! of NCCL, in the same order, and leave out empty messages.

use std::ops::Range;

use paceline_cuda::nccl::PeerMessage;

use super::{Nccl, NcclOrder, reduce};
use crate::call::{BlockCounts, Call, Region, Shares};
use crate::context::OpContext;
use crate::meet::AgreedCalls;
use crate::{OpKind, Result};

type Outcome = Result<()>;

fn at(region: Region, offset: usize) -> u64 {
    (region.base.addr() + offset) as u64
}

/// Messages from and to other ranks, without the empty ones.
#[derive(Default)]
struct Mail(Vec<PeerMessage>);

impl Mail {
    fn send(&mut self, from: u64, bytes: usize, to: usize) {
        if bytes > 0 {
            self.0.push(PeerMessage::Send { from, bytes, to });
        }
    }

    fn receive(&mut self, to: u64, bytes: usize, from: usize) {
        if bytes > 0 {
            self.0.push(PeerMessage::Receive { to, bytes, from });
        }
    }
}

pub(super) fn queue(nccl: &Nccl, context: &OpContext, met: &AgreedCalls) -> Outcome {
    let Call { kind, send, recv, root, .. } = *context.call;
    let (call, size) = (context.call, context.call.dtype.size_bytes());
    let shares = || Shares::new(kind, &met.calls);
    let op = CardOp { nccl, context };
    match kind {
        OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter
            if nccl.order == NcclOrder::Ring && op.by_library(&met.calls)? =>
        {
            Ok(())
        }
        OpKind::AllReduce => {
            let shares = Shares::even((send.len_bytes / size) as u64, context.world);
            let own = at(recv, op.bytes(&shares).start);
            op.reduce(&shares, own, 0)?;
            op.gather(&shares, None, own)
        }
        OpKind::ReduceScatter => op.reduce(&shares(), at(recv, 0), 0),
        OpKind::Reduce => {
            let shares = Shares::even((send.len_bytes / size) as u64, context.world);
            let own = op.bytes(&shares);
            if context.rank == root {
                op.reduce(&shares, at(recv, own.start), 0)?;
                return op.gather(&shares, Some(root), at(recv, own.start));
            }
            // The result lies after the parts of all ranks.
            let place = nccl.scratch((context.world + 1) * own.len())?;
            let result = place + (context.world * own.len()) as u64;
            op.reduce(&shares, result, own.len())?;
            op.gather(&shares, Some(root), result)
        }
        OpKind::AllGather => op.gather(&shares(), None, at(send, 0)),
        OpKind::Gather => op.gather(&shares(), Some(root), at(send, 0)),
        OpKind::Scatter => op.scatter(&shares()),
        OpKind::Broadcast => {
            // SAFETY: the memory is that of the call.
            let sent = unsafe {
                let bytes = (at(send, 0), at(recv, 0), recv.len_bytes);
                nccl.communicator.broadcast(nccl.queue(), bytes, root)
            };
            op.queued(sent)
        }
        OpKind::AllToAll => call.blocks.as_ref().map_or(Ok(()), |blocks| op.all_to_all(blocks)),
        OpKind::Send | OpKind::Recv | OpKind::SendRecv => op.messages(),
        OpKind::Barrier => Ok(()),
    }
}

struct CardOp<'a> {
    nccl: &'a Nccl,
    context: &'a OpContext<'a>,
}

impl CardOp<'_> {
    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.context.rank;
        (0..self.context.world).filter(move |peer| *peer != own)
    }

    /// This rank's share, in bytes.
    fn bytes(&self, shares: &Shares) -> Range<usize> {
        shares.bytes(self.context.rank, self.context.call.dtype)
    }

    fn queued(&self, outcome: paceline_cuda::Result<()>) -> Outcome {
        outcome.map_err(|error| self.context.on_card(error.to_string()))
    }

    fn exchange(&self, mail: &Mail) -> Outcome {
        // SAFETY: the memory is that of the call, and of scratch memory that only this operation uses. What is received
        // goes to places of its own.
        let exchanged = unsafe { self.nccl.communicator.exchange(self.nccl.queue(), &mail.0) };
        self.queued(exchanged)
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Outcome {
        if from == to || bytes == 0 {
            return Ok(());
        }
        // SAFETY: as for `exchange`.
        self.queued(unsafe { self.nccl.queue().copy_on_card(from, to, bytes) })
    }

    /// Reduces this rank's share of all ranks' data to `result`. Scratch memory holds `more` extra bytes.
    fn reduce(&self, shares: &Shares, result: u64, more: usize) -> Outcome {
        let Call { send, dtype, op, .. } = *self.context.call;
        let (own, world) = (self.bytes(shares), self.context.world);
        let len = own.len();
        if world == 1 {
            return self.copy(at(send, own.start), result, len);
        }
        let parts = self.nccl.scratch(world * len + more)?;
        let part = |rank: usize| parts + (rank * len) as u64;
        let mut mail = Mail::default();
        for peer in self.others() {
            let theirs = shares.bytes(peer, dtype);
            mail.send(at(send, theirs.start), theirs.len(), peer);
            mail.receive(part(peer), len, peer);
        }
        self.copy(at(send, own.start), part(self.context.rank), len)?;
        self.exchange(&mail)?;
        let elems = len / dtype.size_bytes();
        // SAFETY: as for `exchange`; the parts lie in scratch memory, apart from the result.
        let reduced =
            unsafe { reduce::tree(self.nccl.queue(), (parts, result), elems, world, (dtype, op)) };
        self.queued(reduced)
    }

    /// Gives the root, or every rank, the shares of all ranks. This rank's share is at `own`.
    fn gather(&self, shares: &Shares, root: Option<usize>, own: u64) -> Outcome {
        let Call { recv, dtype, .. } = *self.context.call;
        let mine = self.bytes(shares);
        let is_even =
            || (0..self.context.world).all(|rank| shares.bytes(rank, dtype).len() == mine.len());
        if root.is_none() && is_even() {
            if mine.is_empty() {
                return Ok(());
            }
            let (nccl, to) = (self.nccl, at(recv, 0));
            // SAFETY: as for `exchange`.
            return self.queued(unsafe {
                nccl.communicator.all_gather(nccl.queue(), own, to, mine.len())
            });
        }
        let gets_all = |rank: usize| root.is_none_or(|root| root == rank);
        let mut mail = Mail::default();
        for peer in self.others() {
            if gets_all(peer) {
                mail.send(own, mine.len(), peer);
            }
            if gets_all(self.context.rank) {
                let theirs = shares.bytes(peer, dtype);
                mail.receive(at(recv, theirs.start), theirs.len(), peer);
            }
        }
        if gets_all(self.context.rank) {
            self.copy(own, at(recv, mine.start), mine.len())?;
        }
        self.exchange(&mail)
    }

    /// Gives every rank its share of the root's data.
    fn scatter(&self, shares: &Shares) -> Outcome {
        let Call { send, recv, root, dtype, .. } = *self.context.call;
        let (mine, mut mail) = (self.bytes(shares), Mail::default());
        if self.context.rank != root {
            mail.receive(at(recv, 0), mine.len(), root);
            return self.exchange(&mail);
        }
        for peer in self.others() {
            let theirs = shares.bytes(peer, dtype);
            mail.send(at(send, theirs.start), theirs.len(), peer);
        }
        self.copy(at(send, mine.start), at(recv, 0), mine.len())?;
        self.exchange(&mail)
    }

    /// Gives every rank its block of every rank's data.
    fn all_to_all(&self, blocks: &BlockCounts) -> Outcome {
        let Call { send, recv, dtype, .. } = *self.context.call;
        let of = |counts: &[u64]| Shares::of(counts.iter().copied());
        let (sent, received) = (of(&blocks.send), of(&blocks.recv));
        let mut mail = Mail::default();
        for peer in 0..self.context.world {
            let (from, to) = (sent.bytes(peer, dtype), received.bytes(peer, dtype));
            mail.send(at(send, from.start), from.len(), peer);
            mail.receive(at(recv, to.start), to.len(), peer);
        }
        self.exchange(&mail)
    }

    /// Send, receive, or both at once.
    fn messages(&self) -> Outcome {
        let mut mail = Mail::default();
        if let Some((to, region)) = self.context.call.sending() {
            mail.send(at(region, 0), region.len_bytes, to);
        }
        if let Some((from, region)) = self.context.call.receiving() {
            mail.receive(at(region, 0), region.len_bytes, from);
        }
        self.exchange(&mail)
    }

    /// Reduces in NCCL's own order, if it has the operation: it scatters equal shares only.
    fn by_library(&self, calls: &[crate::call::CallHeader]) -> Result<bool> {
        let Call { kind, send, recv, root, dtype, op, .. } = *self.context.call;
        let (nccl, by) = (self.nccl, reduce::of_library(dtype, op));
        let elems = |region: Region| region.len_bytes / dtype.size_bytes();
        let (from, to) = (at(send, 0), at(recv, 0));
        // SAFETY: the memory is that of the call.
        let queued = unsafe {
            match kind {
                OpKind::AllReduce => {
                    nccl.communicator.all_reduce(nccl.queue(), (from, to, elems(send)), by)
                }
                OpKind::Reduce => {
                    nccl.communicator.reduce(nccl.queue(), (from, to, elems(send)), by, root)
                }
                OpKind::ReduceScatter
                    if calls.iter().all(|call| call.recv_count == calls[0].recv_count) =>
                {
                    nccl.communicator.reduce_scatter(nccl.queue(), (from, to, elems(recv)), by)
                }
                _ => return Ok(false),
            }
        };
        self.queued(queued).map(|()| true)
    }
}
