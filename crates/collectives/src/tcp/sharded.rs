//! All-reduce, broadcast, reduce and reduce-scatter, direct: every rank is responsible for a share.
//!
//! First each rank gets its share from the ranks that have it. In a reduction these are all ranks, and the
//! rank reduces the share block by block, as the tree over all ranks, as soon as a block has arrived from all
//! of them. In a broadcast it is only the root. Then the rank sends the finished blocks to the ranks that want them. The
//! two phases overlap block by block.
//!
//! Contributions travel as they are and are combined only by the owner of the share, so f16 and bf16 are
//! rounded once. Memory: room for two blocks from every peer, 1 MiB or 32 KiB for each peer if that is more; in
//! a reduce, a share too.
//!
//! | operation | steps | bytes sent by the busiest rank (S = message, n ranks) | order of summation |
//! |---|---|---|---|
//! | all-reduce | 2 | 2 (n-1)/n S | the tree over ranks 0, 1, 2, ... |
//! | reduce | 2 | (n-1)/n S out, and 2 (n-1)/n S into the root | the tree |
//! | broadcast | 2 | 2 (n-1)/n S out of the root | - |
//! | reduce-scatter | 1 | (n-1)/n S | the tree |

use super::inner::{Inner, explain};
use super::wires::Ticket;
use crate::call::{Region, Shares};
use crate::context::OpContext;
use crate::reduce::Reduction;
use crate::{OpKind, Result};

/// Bytes for incoming blocks: few enough that a few blocks from every peer stay in the second-level cache.
const ROOM_BYTES: usize = 1 << 20;

/// The number of blocks that are awaited from every peer at a time.
const AHEAD: usize = 2;

/// All-reduce, reduce and broadcast.
pub(super) fn run(inner: &mut Inner, context: &OpContext) -> Result<()> {
    let call = context.call;
    let (rank, root) = (context.rank, call.root);
    let shares =
        Shares::even(call.header().recv_count.max(call.header().send_count), context.world);
    let wants = |peer: usize| match call.kind {
        OpKind::Reduce => peer == root,
        OpKind::Broadcast => peer != root,
        _ => true,
    };
    let has = |peer: usize| call.kind != OpKind::Broadcast || peer == root;
    let share = |peer: usize| shares.bytes(peer, call.dtype);
    let peers: Vec<usize> = inner.mesh.peers().collect();
    if has(rank) {
        for &peer in &peers {
            let part = call.send.part(share(peer));
            // SAFETY: the caller holds the memory until the operation is over or the mesh is cleared.
            unsafe { inner.mesh.send(peer, part.base, part.len_bytes) };
        }
    }
    let own = share(rank);
    if call.kind == OpKind::Broadcast {
        let from = if rank == root { call.send } else { call.recv };
        let part = from.part(own);
        let ticket = (rank != root).then(|| {
            // SAFETY: as above; the share comes only from the root.
            unsafe { inner.mesh.recv(root, part.base, part.len_bytes) }
        });
        post_finished(inner, context, &peers, |peer| {
            call.recv.part(if wants(rank) { share(peer) } else { 0..0 })
        });
        if let Some(ticket) = ticket {
            wait(inner, context, &[ticket])?;
        }
        for &peer in peers.iter().filter(|&&peer| wants(peer)) {
            // SAFETY: as above; the share is complete, and nobody writes to it any longer.
            unsafe { inner.mesh.send(peer, part.base, part.len_bytes) };
        }
        if rank == root && !std::ptr::eq(call.send.base, call.recv.base) {
            // SAFETY: the root's two sides have the same length and lie apart.
            unsafe {
                std::ptr::copy_nonoverlapping(call.send.base, call.recv.base, call.send.len_bytes);
            }
        }
        return wait_all(inner, context);
    }
    // In a reduce, each share is finished in scratch memory, except the root's share.
    let target = if wants(rank) { Some(call.recv.part(own.clone())) } else { None };
    let finished = |mesh: &mut Inner, block: Region| {
        for &peer in peers.iter().filter(|&&peer| wants(peer)) {
            // SAFETY: as above; a finished block stays unchanged until the operation is over.
            unsafe { mesh.mesh.send(peer, block.base, block.len_bytes) };
        }
    };
    let expect = |mesh: &mut Inner| {
        post_finished(mesh, context, &peers, |peer| {
            call.recv.part(if wants(rank) { share(peer) } else { 0..0 })
        });
    };
    reduce_share(inner, context, call.send.part(own), target, expect, finished)
}

/// Reduce-scatter: the first phase alone.
pub(super) fn reduce_scatter(
    inner: &mut Inner,
    context: &OpContext,
    shares: &Shares,
) -> Result<()> {
    let call = context.call;
    let peers: Vec<usize> = inner.mesh.peers().collect();
    for peer in peers {
        let part = call.send.part(shares.bytes(peer, call.dtype));
        // SAFETY: the caller holds the memory until the operation is over or the mesh is cleared. If the
        // operation works in place, this rank's result goes to its own share, which is sent to no peer.
        unsafe { inner.mesh.send(peer, part.base, part.len_bytes) };
    }
    let own = call.send.part(shares.bytes(context.rank, call.dtype));
    reduce_share(inner, context, own, Some(call.recv), |_| {}, |_, _| {})
}

/// Receives all peers' contributions to this rank's share block by block and reduces them together with its
/// own. `expect` is called after the last receive of a contribution has been posted. `finished` is called
/// with every finished block.
fn reduce_share(
    inner: &mut Inner,
    context: &OpContext,
    own: Region,
    target: Option<Region>,
    expect: impl Fn(&mut Inner),
    finished: impl Fn(&mut Inner, Region),
) -> Result<()> {
    let call = context.call;
    let peers: Vec<usize> = inner.mesh.peers().collect();
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
    let post = |inner: &mut Inner, tickets: &mut Vec<Vec<Ticket>>| {
        let index = tickets.len();
        if index < num_blocks {
            let mut posted = Vec::with_capacity(peers.len());
            for (at, &peer) in peers.iter().enumerate() {
                let part = slot(index, at);
                // SAFETY: the scratch memory lives as long as the mesh, and the slot is free: the block that
                // was there before has been reduced.
                posted.push(unsafe { inner.mesh.recv(peer, part.base, part.len_bytes) });
            }
            tickets.push(posted);
        }
        if index + 1 == num_blocks {
            expect(inner);
        }
    };
    if num_blocks == 0 {
        expect(inner);
    }
    for _ in 0..AHEAD {
        post(inner, &mut tickets);
    }
    for index in 0..num_blocks {
        wait(inner, context, &tickets[index])?;
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
    wait_all(inner, context)
}

/// Posts the receives of the finished shares of all peers.
fn post_finished(
    inner: &mut Inner,
    context: &OpContext,
    peers: &[usize],
    part: impl Fn(usize) -> Region,
) {
    for &peer in peers.iter().filter(|&&peer| peer != context.rank) {
        let part = part(peer);
        // SAFETY: the caller holds the memory until the operation is over or the mesh is cleared. This rank
        // may still have to send its contribution from the same place. But the peer needs that contribution
        // to finish the share, so it has left by the time the finished share arrives.
        unsafe { inner.mesh.recv(peer, part.base, part.len_bytes) };
    }
}

fn wait(inner: &mut Inner, context: &OpContext, tickets: &[Ticket]) -> Result<()> {
    inner.mesh.wait(tickets, context.policy).map_err(|why| explain(&inner.mesh, context, why))
}

fn wait_all(inner: &mut Inner, context: &OpContext) -> Result<()> {
    inner.mesh.wait_all(context.policy).map_err(|why| explain(&inner.mesh, context, why))
}
