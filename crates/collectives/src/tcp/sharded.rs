//! All-reduce, broadcast, reduce and reduce-scatter, direct: every rank is responsible for a share.
//!
//! First each rank gets its share from the ranks that have it: in a broadcast the root, in a reduction all ranks. A
//! reduction reduces a block of the share, as the tree over all ranks, as soon as it has arrived from all
//! of them. Then the rank sends the finished blocks to the ranks that want them. The
//! two phases overlap block by block.
//!
//! Contributions are combined only by the owner of the share, so f16 and bf16 are
//! rounded once. Memory: room for two blocks from every peer, 1 MiB or 32 KiB for each peer if that is more; in
//! a reduce, a share too.
//!
//! | operation | steps | bytes sent by the busiest rank (S = message, n ranks) | order of summation |
//! |---|---|---|---|
//! | all-reduce | 2 | 2 (n-1)/n S | the tree over ranks 0, 1, 2, ... |
//! | reduce | 2 | (n-1)/n S out, and 2 (n-1)/n S into the root | the tree |
//! | broadcast | 2 | 2 (n-1)/n S out of the root | - |
//! | reduce-scatter | 1 | (n-1)/n S | the tree |

use super::inner::Sockets;
use super::wires::Ticket;
use crate::call::{Region, Shares};
use crate::context::OpContext;
use crate::reduce::Reduction;
use crate::{OpKind, Result};

/// Bytes for incoming blocks: few enough that a few blocks from every peer stay in the second-level cache.
const ROOM_BYTES: usize = 1 << 20;

const AHEAD: usize = 2;

/// Broadcast: the root gives every rank its share, and the ranks give each other theirs.
pub(super) fn broadcast(inner: &mut Sockets, context: &OpContext) -> Result<()> {
    let (call, rank, root) = (context.call, context.rank, context.call.root);
    let shares = Shares::even(call.header().recv_count, context.world);
    let share = |peer: usize| shares.bytes(peer, call.dtype);
    let peers: Vec<usize> = inner.wires.peers().collect();
    let own = if rank == root { call.send } else { call.recv }.part(share(rank));
    if rank == root {
        for &peer in &peers {
            send(inner, peer, call.send.part(share(peer)));
        }
        expect(inner, &peers, |_| Region::EMPTY);
    } else {
        // SAFETY: the caller holds the memory until the operation is over or the wires are cleared; the share comes only
        // from the root.
        let ticket = unsafe { inner.wires.recv(root, own.base, own.len_bytes) };
        expect(inner, &peers, |peer| call.recv.part(share(peer)));
        inner.wait(context, &[ticket])?;
    }
    for &peer in peers.iter().filter(|&&peer| peer != root) {
        // The share is complete, and nobody writes to it any longer.
        send(inner, peer, own);
    }
    if rank == root && !std::ptr::eq(call.send.base, call.recv.base) {
        // SAFETY: the root's two sides have the same length and lie apart.
        unsafe {
            std::ptr::copy_nonoverlapping(call.send.base, call.recv.base, call.send.len_bytes);
        }
    }
    inner.wait_all(context)
}

pub(super) fn reduce(inner: &mut Sockets, context: &OpContext) -> Result<()> {
    let (call, rank) = (context.call, context.rank);
    let shares = Shares::even(call.header().send_count, context.world);
    let wants = |peer: usize| call.kind == OpKind::AllReduce || peer == call.root;
    let share = |peer: usize| shares.bytes(peer, call.dtype);
    let peers: Vec<usize> = inner.wires.peers().collect();
    for &peer in &peers {
        send(inner, peer, call.send.part(share(peer)));
    }
    let own = share(rank);
    // In a reduce, each share is finished in scratch memory, except the root's share.
    let target = if wants(rank) { Some(call.recv.part(own.clone())) } else { None };
    let finished = |inner: &mut Sockets, block: Region| {
        // A finished block stays unchanged until the operation is over.
        peers.iter().filter(|&&peer| wants(peer)).for_each(|&peer| send(inner, peer, block));
    };
    let expect_finished = |inner: &mut Sockets| {
        expect(inner, &peers, |peer| call.recv.part(if wants(rank) { share(peer) } else { 0..0 }));
    };
    reduce_share(inner, context, call.send.part(own), target, expect_finished, finished)
}

/// Reduce-scatter: the first phase alone.
pub(super) fn reduce_scatter(
    inner: &mut Sockets,
    context: &OpContext,
    shares: &Shares,
) -> Result<()> {
    let call = context.call;
    let peers: Vec<usize> = inner.wires.peers().collect();
    for peer in peers {
        // If the operation works in place, this rank's result goes to its own share, which is sent to no peer.
        send(inner, peer, call.send.part(shares.bytes(peer, call.dtype)));
    }
    let own = call.send.part(shares.bytes(context.rank, call.dtype));
    reduce_share(inner, context, own, Some(call.recv), |_| {}, |_, _| {})
}

/// Receives all peers' contributions to this rank's share block by block and reduces them together with its
/// own. `expect_finished` is called after the last receive of a contribution has been posted, `finished` with every
/// finished block.
fn reduce_share(
    inner: &mut Sockets,
    context: &OpContext,
    own: Region,
    target: Option<Region>,
    expect_finished: impl Fn(&mut Sockets),
    finished: impl Fn(&mut Sockets, Region),
) -> Result<()> {
    let call = context.call;
    let peers: Vec<usize> = inner.wires.peers().collect();
    let size = call.dtype.size_bytes();
    let block_bytes =
        (ROOM_BYTES / (AHEAD * peers.len().max(1))).clamp(16 << 10, 256 << 10) / 64 * 64;
    let num_blocks = own.len_bytes.div_ceil(block_bytes);
    let room_bytes = AHEAD * peers.len() * block_bytes;
    let own_bytes = if target.is_some() { 0 } else { own.len_bytes };
    let scratch = inner.scratch.get(room_bytes + own_bytes);
    let target = target.unwrap_or_else(|| scratch.part(room_bytes..room_bytes + own_bytes));
    let reduction = Reduction { dtype: call.dtype, op: call.op, ranks: context.world };
    let block = |index: usize| index * block_bytes..own.len_bytes.min((index + 1) * block_bytes);
    let slot = |index: usize, peer: usize| {
        let at = (index % AHEAD * peers.len() + peer) * block_bytes;
        scratch.part(at..at + block(index).len())
    };
    let mut tickets: Vec<Vec<Ticket>> = Vec::with_capacity(num_blocks);
    let post = |inner: &mut Sockets, tickets: &mut Vec<Vec<Ticket>>| {
        let index = tickets.len();
        if index < num_blocks {
            let mut posted = Vec::with_capacity(peers.len());
            for (at, &peer) in peers.iter().enumerate() {
                let part = slot(index, at);
                // SAFETY: the scratch memory lives as long as the wires, and the slot is free: the block that
                // was there before has been reduced.
                posted.push(unsafe { inner.wires.recv(peer, part.base, part.len_bytes) });
            }
            tickets.push(posted);
        }
        if index + 1 == num_blocks {
            expect_finished(inner);
        }
    };
    if num_blocks == 0 {
        expect_finished(inner);
    }
    for _ in 0..AHEAD {
        post(inner, &mut tickets);
    }
    for index in 0..num_blocks {
        inner.wait(context, &tickets[index])?;
        let mut inputs = [std::ptr::null(); crate::MAX_RANKS];
        let own_block = own.part(block(index));
        inputs[context.rank] = own_block.base.cast_const();
        for (at, &peer) in peers.iter().enumerate() {
            inputs[peer] = slot(index, at).base.cast_const();
        }
        let output = target.part(block(index));
        // SAFETY: all inputs have arrived. Blocks are aligned, and their sizes are multiples of the element
        // size. The output is this rank's own input or lies apart from all inputs.
        unsafe { reduction.run(&inputs[..context.world], &[output.base], output.len_bytes / size) };
        finished(inner, output);
        post(inner, &mut tickets);
    }
    inner.wait_all(context)
}

/// Posts a part of the data to be sent to a peer.
fn send(inner: &mut Sockets, peer: usize, part: Region) {
    // SAFETY: the caller holds the memory until the operation is over or the wires are cleared. The part stays unchanged
    // until then.
    unsafe { inner.wires.send(peer, part.base, part.len_bytes) };
}

/// Posts the receives of the finished shares of all peers.
fn expect(inner: &mut Sockets, peers: &[usize], part: impl Fn(usize) -> Region) {
    for &peer in peers {
        let part = part(peer);
        // SAFETY: the caller holds the memory until the operation is over or the wires are cleared. This rank
        // may still have to send its contribution from the same place. But the peer needs that contribution
        // to finish the share, so it has left by the time the finished share arrives.
        unsafe { inner.wires.recv(peer, part.base, part.len_bytes) };
    }
}
