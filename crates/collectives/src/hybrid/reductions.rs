//! All-reduce, reduce and reduce-scatter over hosts: the hosts exchange partial sums of the tree over all ranks.
//!
//! Every rank owns a piece of the result (`plan.rs`). The ranks of a host combine, block by block, their data for all
//! pieces of their rails, and send each owner the partial sums of its piece (in f32
//! for f16 and bf16). The owner completes the tree, and sends the finished piece to its rail (all-reduce) or
//! to the root's host (reduce). In a reduce-scatter the piece is the owner's share. Then the ranks of a host
//! exchange their pieces through shared memory.
//!
//! | operation (`h` hosts of `k` ranks) | steps between hosts | bytes out of and into the busiest rank |
//! |---|---|---|
//! | all-reduce | 2 | `(p + 1) (h-1)/h S/k` |
//! | reduce | 2 | `p (h-1)/h S/k`, and `(h-1)/h S/k` more into each rank of the root's host |
//! | reduce-scatter | 1 | `p (h-1)/h S/k` |
//!
//! `p` is the number of nodes that a host has in the tree: 1 if `k` is a power of two, otherwise 2 or more. For 16-bit
//! floats `p` counts twice. If the owner of a whole slice would receive at most 512 KiB, one rank of the rail owns it:
//! it receives `p (h-1) S/k` bytes, in the fewest messages possible. Blocks
//! overlap: while one block travels, the next is combined. Within a host, every rank reads its slice of all `k` ranks'
//! data. Order of summation: the tree over ranks 0, 1, 2, ...
//!
//! Memory: `p` partial sums of a slice of `S/k`, and room for incoming blocks: 1 MiB, or 32 KiB for each node
//! of any host if this is more. A reduce also needs room for a slice of the result.

use std::ops::Range;

use super::plan::{AHEAD, PiecePlan};
use super::state::Hybrid;
use crate::call::{Call, Region};
use crate::context::OpContext;
use crate::meet::AgreedCalls;
use crate::reduce::Reduction;
use crate::shared::pull::{Fetch, FetchWindow, pull};
use crate::tcp::inner::Sockets;
use crate::tcp::wires::{Interruption, Ticket};
use crate::{MAX_RANKS, OpKind, Result};

impl Hybrid {
    pub(super) fn reduce(
        &self,
        inner: &mut Sockets,
        context: &OpContext,
        met: &AgreedCalls,
    ) -> Result<()> {
        let call = context.call;
        let reduction = Reduction { dtype: call.dtype, op: call.op, ranks: context.world };
        let plan = PiecePlan::new(self, call, met, reduction.running_dtype().size_bytes());
        let mut exchange = RailExchange::begin(self, inner, context, &plan, reduction);
        for hosts in &plan.passes {
            self.combine_own(context, &plan, hosts, &mut exchange)?;
        }
        exchange.end(context)?;
        let result = exchange.result;
        match call.kind {
            OpKind::AllReduce => {
                let within = Call { kind: OpKind::AllGather, send: result, ..call.clone() };
                self.local.run(&self.within_host(context, &within)).map(drop)
            }
            OpKind::Reduce if self.has(call.root) => {
                let root = call.root % self.local.world;
                let recv = if context.rank == call.root { call.recv } else { Region::EMPTY };
                let within =
                    Call { kind: OpKind::Gather, root, send: result, recv, ..call.clone() };
                self.local.run(&self.within_host(context, &within)).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn has(&self, rank: usize) -> bool {
        self.ranks_of(self.node()).contains(&rank)
    }

    /// Combines the data of this host's ranks for the pieces of these hosts on this rank's rail.
    fn combine_own(
        &self,
        context: &OpContext,
        plan: &PiecePlan,
        hosts: &Range<usize>,
        exchange: &mut RailExchange,
    ) -> Result<()> {
        let within = self.within_host(context, context.call);
        let met = self.local.show(&within, |_, _| ())?;
        let size = context.call.dtype.size_bytes();
        let block = |_, reader: usize| {
            let span = plan.span(hosts, reader);
            span.start * size..span.end * size
        };
        pull(&self.local, &within, &met, Fetch::Blocks, block, |window| {
            exchange.combine(hosts, window);
        })
    }
}

/// The exchange of one rank on its rail during one reduction.
struct RailExchange<'a> {
    hybrid: &'a Hybrid,
    inner: &'a mut Sockets,
    call: &'a Call,
    plan: &'a PiecePlan,
    reduction: Reduction,
    /// The partial sums of this host for each host's piece on this rail, node by node.
    partials: Vec<Region>,
    /// Memory for incoming blocks of partial sums.
    room: Region,
    /// This rail's slice of the result, or only this rank's piece if no rank of this host needs the rest.
    result: Region,
    progress: RailProgress,
}

#[derive(Default)]
struct RailProgress {
    /// The receives of each block of this rank's piece that have been posted.
    incoming: Vec<Vec<Ticket>>,
    /// Whether the receives of finished pieces have been posted.
    expects_finished: bool,
    /// Blocks of this rank's own piece for which this host's partial sums are ready.
    num_own: usize,
    /// Blocks of this rank's own piece that are finished.
    num_finished: usize,
    /// Whether all partial sums have been sent. Finished blocks follow them on the same connections.
    has_sent_partials: bool,
    /// The failure after which no more bytes move.
    failure: Option<Interruption>,
}

impl<'a> RailExchange<'a> {
    fn begin(
        hybrid: &'a Hybrid,
        inner: &'a mut Sockets,
        context: &OpContext<'a>,
        plan: &'a PiecePlan,
        reduction: Reduction,
    ) -> Self {
        let (call, host, rail) = (context.call, hybrid.node(), hybrid.local.rank);
        let (size, running_size) =
            (call.dtype.size_bytes(), reduction.running_dtype().size_bytes());
        let line = |bytes: usize| bytes.next_multiple_of(64);
        let num_nodes = plan.nodes[host].len();
        let of_host = |to| num_nodes * line(plan.piece(to, rail).len() * running_size);
        let room_bytes = AHEAD * plan.merges.len() * plan.block_elems * running_size;
        let mut lengths: Vec<usize> = (0..hybrid.num_hosts()).map(of_host).collect();
        let wanted = match call.kind {
            OpKind::Reduce if hybrid.has(call.root) => plan.slice(rail),
            _ => plan.piece(host, rail),
        };
        let is_reduce = call.kind == OpKind::Reduce;
        lengths.extend([room_bytes, if is_reduce { wanted.len() * size } else { 0 }]);
        let scratch = inner.scratch.get(lengths.iter().map(|&bytes| line(bytes)).sum());
        let mut end = 0;
        let mut regions = lengths.iter().map(|&bytes| {
            let start = end;
            end += line(bytes);
            scratch.part(start..start + bytes)
        });
        let partials = regions.by_ref().take(hybrid.num_hosts()).collect();
        let rest: Vec<Region> = regions.collect();
        let result = match call.kind {
            OpKind::Reduce => rest[1],
            OpKind::ReduceScatter => call.recv,
            _ => {
                let slice = plan.slice(rail);
                call.recv.part(slice.start * size..slice.end * size)
            }
        };
        let mut exchange = Self {
            hybrid,
            inner,
            call,
            plan,
            reduction,
            partials,
            room: rest[0],
            result,
            progress: RailProgress::default(),
        };
        for _ in 0..AHEAD {
            exchange.expect_block();
        }
        exchange
    }

    fn own_piece(&self) -> Range<usize> {
        self.plan.piece(self.hybrid.node(), self.hybrid.local.rank)
    }

    /// Whether the ranks of a host get all finished pieces of their rails.
    fn wants_slices(&self, host: usize) -> bool {
        match self.call.kind {
            OpKind::AllReduce => true,
            OpKind::Reduce => self.call.root / self.hybrid.local.world == host,
            _ => false,
        }
    }

    /// Where a finished piece of this rail belongs.
    fn finished(&self, host: usize) -> Region {
        let (size, rail) = (self.call.dtype.size_bytes(), self.hybrid.local.rank);
        let piece = self.plan.piece(host, rail);
        let holds_slice = self.wants_slices(self.hybrid.node());
        let start = if holds_slice { self.plan.slice(rail).start } else { piece.start };
        self.result.part((piece.start - start) * size..(piece.end - start) * size)
    }

    /// Posts the receives of the next block of this rank's piece, and after the last one those of the finished pieces,
    /// which the other ranks send next.
    fn expect_block(&mut self) {
        let (plan, host) = (self.plan, self.hybrid.node());
        let piece = self.own_piece();
        let (index, num_blocks) = (self.progress.incoming.len(), plan.num_blocks(&piece));
        if index < num_blocks {
            let mut tickets = Vec::new();
            for from in (0..self.hybrid.num_hosts()).filter(|&from| from != host) {
                for node in 0..plan.nodes[from].len() {
                    let slot = self.slot(index, plan.first_node(from) + node);
                    let peer = self.hybrid.on_rail(from);
                    // SAFETY: the scratch memory lives as long as the wires, and the slot is free: the block
                    // that was there before is finished.
                    tickets.push(unsafe { self.inner.wires.recv(peer, slot.base, slot.len_bytes) });
                }
            }
            self.progress.incoming.push(tickets);
        }
        if self.progress.incoming.len() < num_blocks || self.progress.expects_finished {
            return;
        }
        self.progress.expects_finished = true;
        if !self.wants_slices(host) {
            return;
        }
        for from in (0..self.hybrid.num_hosts()).filter(|&from| from != host) {
            let (peer, to) = (self.hybrid.on_rail(from), self.finished(from));
            // SAFETY: the caller holds the memory until the operation is over or the wires are cleared. Only
            // this rank reads its own data there, and has read them before the owner has this rank's partial
            // sums. Without these sums the owner finishes nothing.
            unsafe { self.inner.wires.recv(peer, to.base, to.len_bytes) };
        }
    }

    /// Where a block of a node of another host arrives.
    fn slot(&self, index: usize, node: usize) -> Region {
        let running_size = self.reduction.running_dtype().size_bytes();
        let slot_bytes = self.plan.block_elems * running_size;
        let start = (index % AHEAD * self.plan.merges.len() + node) * slot_bytes;
        let elems = self.plan.block(&self.own_piece(), index).len();
        self.room.part(start..start + elems * running_size)
    }

    /// Where this host's partial sums of a node are, for these elements of the piece of `to`.
    fn partial(&self, to: usize, node: usize, elems: &Range<usize>) -> Region {
        let running_size = self.reduction.running_dtype().size_bytes();
        let piece = self.plan.piece(to, self.hybrid.local.rank);
        let start = node * (piece.len() * running_size).next_multiple_of(64);
        let at = |elem: usize| start + (elem - piece.start) * running_size;
        self.partials[to].part(at(elems.start)..at(elems.end))
    }

    /// Combines the part of this host's data that a window holds for the pieces of these hosts, sends complete blocks, and
    /// finishes the blocks of this rank's own piece that have arrived meanwhile. Never
    /// waits, because other ranks of this host may wait for this rank in a barrier phase.
    fn combine(&mut self, hosts: &Range<usize>, window: &FetchWindow) {
        let (plan, rail, host) = (self.plan, self.hybrid.local.rank, self.hybrid.node());
        let size = self.call.dtype.size_bytes();
        let (sources, bytes) = window.of_all();
        let first = plan.span(hosts, rail).start;
        let available = first + bytes.start / size..first + bytes.end / size;
        let pieces: Vec<Range<usize>> = hosts.clone().map(|to| plan.piece(to, rail)).collect();
        let num_blocks = pieces.iter().map(|piece| plan.num_blocks(piece)).max().unwrap_or(0);
        for index in 0..num_blocks {
            let mut has_combined = false;
            for (to, piece) in hosts.clone().zip(&pieces) {
                let block = plan.block(piece, index);
                let elems = block.start.max(available.start)..block.end.min(available.end);
                if elems.is_empty() {
                    continue;
                }
                has_combined = true;
                for (node, ranks) in plan.nodes[host].iter().enumerate() {
                    let start = self.hybrid.ranks_of(host).start;
                    let leaves = &sources[ranks.start - start..ranks.end - start];
                    let mut inputs = [std::ptr::null(); MAX_RANKS];
                    for (input, source) in inputs.iter_mut().zip(leaves) {
                        *input = source.wrapping_add((elems.start - available.start) * size);
                    }
                    let running = self.partial(to, node, &elems).base;
                    // SAFETY: the sources are valid for these elements, and nobody writes there: a result goes
                    // to a slice that only its own rank reads, when this rank has read it. Only this rank uses
                    // the partial sums.
                    unsafe {
                        self.reduction.partial(&inputs[..leaves.len()], running, elems.len())
                    };
                }
                if elems.end == block.end {
                    self.send_block(to, index, &block);
                }
            }
            if has_combined && self.progress.failure.is_none() {
                self.progress.failure = self.inner.wires.progress().err();
                while self.progress.failure.is_none() && self.can_finish() {
                    self.finish_block();
                }
            }
        }
    }

    fn send_block(&mut self, to: usize, index: usize, block: &Range<usize>) {
        if to == self.hybrid.node() {
            self.progress.num_own = index + 1;
            return;
        }
        for node in 0..self.plan.nodes[self.hybrid.node()].len() {
            let part = self.partial(to, node, block);
            let peer = self.hybrid.on_rail(to);
            // SAFETY: the scratch memory lives as long as the wires, and these partial sums are complete.
            unsafe { self.inner.wires.send(peer, part.base, part.len_bytes) };
        }
    }

    /// Whether everything has arrived that the next block of this rank's own piece needs.
    fn can_finish(&self) -> bool {
        self.progress.num_finished < self.progress.num_own
            && self.progress.incoming[self.progress.num_finished]
                .iter()
                .all(|&ticket| self.inner.wires.is_done(ticket))
    }

    /// Completes the tree for the next block of this rank's own piece.
    fn finish_block(&mut self) {
        let (plan, host, index) = (self.plan, self.hybrid.node(), self.progress.num_finished);
        let block = plan.block(&self.own_piece(), index);
        let mut nodes = [std::ptr::null(); MAX_RANKS];
        for (at, to) in nodes.iter_mut().enumerate().take(plan.merges.len()) {
            let own = at.checked_sub(plan.first_node(host));
            *to = match own.filter(|&own| own < plan.nodes[host].len()) {
                Some(own) => self.partial(host, own, &block).base.cast_const(),
                None => self.slot(index, at).base.cast_const(),
            };
        }
        let nodes = &nodes[..plan.merges.len()];
        let result = self.finished_block(index);
        // SAFETY: all partial sums are complete and lie apart from the result. Blocks are aligned.
        unsafe { self.reduction.complete(nodes, &plan.merges, &[result.base], block.len()) };
        self.progress.num_finished += 1;
        if self.progress.has_sent_partials {
            self.send_finished(index);
        }
        self.expect_block();
    }

    fn finished_block(&self, index: usize) -> Region {
        let (size, piece) = (self.call.dtype.size_bytes(), self.own_piece());
        let block = self.plan.block(&piece, index);
        let bytes = (block.start - piece.start) * size..(block.end - piece.start) * size;
        self.finished(self.hybrid.node()).part(bytes)
    }

    fn send_finished(&mut self, index: usize) {
        let (host, block) = (self.hybrid.node(), self.finished_block(index));
        for other in (0..self.hybrid.num_hosts()).filter(|&other| other != host) {
            if self.wants_slices(other) {
                let peer = self.hybrid.on_rail(other);
                // SAFETY: a finished block stays unchanged until the operation is over.
                unsafe { self.inner.wires.send(peer, block.base, block.len_bytes) };
            }
        }
    }

    /// Waits for the missing partial sums, and then for everything that is on its way.
    fn end(&mut self, context: &OpContext) -> Result<()> {
        if let Some(why) = self.progress.failure.take() {
            return Err(self.inner.fail(context, why));
        }
        self.progress.has_sent_partials = true;
        (0..self.progress.num_finished).for_each(|index| self.send_finished(index));
        while self.progress.num_finished < self.plan.num_blocks(&self.own_piece()) {
            self.inner.wait(context, &self.progress.incoming[self.progress.num_finished])?;
            self.finish_block();
        }
        self.inner.wait_all(context)
    }
}
