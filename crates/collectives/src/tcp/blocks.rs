//! All-gather, gather, scatter and all-to-all: blocks that go directly from the rank that has them to the
//! rank that wants them.
//!
//! Steps: 1. For a message of `S` bytes the busiest rank sends or receives `(n-1)/n S` (for gather and
//! scatter, only the root). Nothing is summed.

use super::inner::Sockets;
use crate::call::{CallHeader, Region, Shares};
use crate::context::OpContext;
use crate::{OpKind, Result};

/// Exchanges the blocks of all connected ranks. `meanwhile` is called while the blocks are on their way. For
/// an all-to-all, `sent[from][to]` is the number of elements that one rank sends to the other.
pub(crate) fn run(
    inner: &mut Sockets,
    context: &OpContext,
    calls: &[CallHeader],
    sent: &[Vec<u64>],
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let call = context.call;
    let (rank, root) = (context.rank, call.root);
    let shares = Shares::new(call.kind, calls);
    let columns = (call.kind == OpKind::AllToAll).then(|| {
        let to_all = Shares::of(sent[rank].iter().copied());
        let from_all = Shares::of(sent.iter().map(|row| row[rank]));
        (to_all, from_all)
    });
    let share = |peer: usize| shares.bytes(peer, call.dtype);
    // What this rank sends to a peer, and where it wants the data from that peer.
    let send = |peer: usize| match (call.kind, &columns) {
        (OpKind::AllToAll, Some((to_all, _))) => call.send.part(to_all.bytes(peer, call.dtype)),
        (OpKind::Scatter, _) if rank == root => call.send.part(share(peer)),
        (OpKind::AllGather, _) => call.send,
        (OpKind::Gather, _) if peer == root => call.send,
        _ => Region::EMPTY,
    };
    let recv = |peer: usize| match (call.kind, &columns) {
        (OpKind::AllToAll, Some((_, from_all))) => call.recv.part(from_all.bytes(peer, call.dtype)),
        (OpKind::Scatter, _) if peer == root => call.recv,
        (OpKind::AllGather, _) => call.recv.part(share(peer)),
        (OpKind::Gather, _) if rank == root => call.recv.part(share(peer)),
        _ => Region::EMPTY,
    };
    let peers: Vec<usize> = inner.wires.peers().collect();
    for peer in peers {
        let (out, incoming) = (send(peer), recv(peer));
        // SAFETY: the caller holds the memory until the operation is over or the wires are cleared. Blocks of
        // different peers lie apart, and so do sent and received blocks.
        unsafe {
            inner.wires.send(peer, out.base, out.len_bytes);
            inner.wires.recv(peer, incoming.base, incoming.len_bytes);
        }
    }
    let (own, target) = (send(rank), recv(rank));
    if !std::ptr::eq(own.base, target.base) {
        // SAFETY: a rank's own block has the same length on both sides, which lie apart: the case in which
        // both are the same was excluded above.
        unsafe { std::ptr::copy_nonoverlapping(own.base, target.base, own.len_bytes) };
    }
    meanwhile()?;
    inner.wait_all(context)
}
