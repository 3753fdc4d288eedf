//! All-reduce, reduce and reduce-scatter over hosts, in rank order: a running prefix goes from host to
//! host.
//!
//! Each rail is responsible for a slice of the message. Chunk by chunk, a rank of the first host reduces
//! its slice over the data of all ranks of its host. It sends the running result (in f32 for f16 and bf16)
//! to the next host, which goes on from there; the last host finishes the result. Then the result travels
//! back from host to host (all-reduce) or directly to the ranks that want it (reduce, reduce-scatter).
//!
//! Steps: `2 (h-1)` between `h` hosts, overlapping chunk by chunk. Bytes: `S` out of and into each host in
//! either direction, `1/k` of it through each of its `k` ranks; within a host, every rank reads its slice
//! of all `k` ranks' data. Order of summation: rank 0, 1, 2, ..., for each element.

use std::ops::Range;

use paceline_memory::DType;

use super::copies::wait_all;
use super::state::Hybrid;
use crate::call::{Call, Region, Shares};
use crate::context::OpContext;
use crate::meet::Met;
use crate::reduce::Reduction;
use crate::shared::pull::{Cut, pull};
use crate::tcp::inner::{Inner, explain};
use crate::tcp::mesh::Ticket;
use crate::{CollectiveError, OpKind};

/// Elements in a chunk, which a rail sends to the next host at once.
const CHUNK_ELEMS: usize = 64 << 10;

/// How a message is divided into a slice per rail, and each slice into chunks.
struct Cuts {
    /// Which elements each rail is responsible for.
    slices: Vec<Range<usize>>,
    num_chunks: usize,
}

impl Cuts {
    fn new(elems: u64, rails: usize) -> Self {
        let shares = Shares::even(elems, rails);
        let slices: Vec<Range<usize>> =
            (0..rails).map(|rail| shares.bytes(rail, DType::U8)).collect();
        let longest = slices.iter().map(Range::len).max().unwrap_or(0);
        Self { slices, num_chunks: longest.div_ceil(CHUNK_ELEMS) }
    }

    /// The elements of a chunk, counted from the start of the rail's slice.
    fn within(&self, rail: usize, chunk: usize) -> Range<usize> {
        let len = self.slices[rail].len();
        len.min(chunk * CHUNK_ELEMS)..len.min((chunk + 1) * CHUNK_ELEMS)
    }
}

impl Hybrid {
    pub(super) fn reduce(
        &self,
        inner: &mut Inner,
        context: &OpContext,
        met: &Met,
    ) -> Result<(), CollectiveError> {
        let call = context.call;
        let reduction = Reduction { dtype: call.dtype, op: call.op, ranks: context.world };
        let (size, running_size) =
            (call.dtype.size_bytes(), reduction.running_dtype().size_bytes());
        let cuts = Cuts::new(met.calls[0].send_count, self.local.world);
        let own = cuts.slices[self.local.rank].clone();
        let (node, last) = (self.node(), self.num_hosts() - 1);
        let running_bytes = (own.len() * running_size).next_multiple_of(64);
        let scratch = inner.scratch.get(running_bytes + own.len() * size);
        let running = scratch.part(0..own.len() * running_size);
        // Where this rank's slice of the result goes: to its final place, or to scratch memory, from which
        // it is sent on.
        let result = match call.kind {
            OpKind::AllReduce => call.recv.part(own.start * size..own.end * size),
            _ => scratch.part(running_bytes..running_bytes + own.len() * size),
        };
        let chunk_of = |region: &Region, chunk: usize, size: usize| {
            let range = cuts.within(self.local.rank, chunk);
            region.part(range.start * size..range.end * size)
        };
        let chunks = 0..cuts.num_chunks;
        let prefixes: Vec<Ticket> = match node {
            0 => Vec::new(),
            _ => self.post(
                inner,
                node - 1,
                chunks.clone().map(|c| chunk_of(&running, c, running_size)),
            ),
        };
        let results: Vec<Ticket> = match call.kind {
            OpKind::AllReduce if node < last => {
                self.post(inner, node + 1, chunks.clone().map(|c| chunk_of(&result, c, size)))
            }
            _ => Vec::new(),
        };
        for chunk in chunks.clone() {
            if let Some(&prefix) = prefixes.get(chunk) {
                wait(inner, context, prefix)?;
            }
            let to = chunk_of(&running, chunk, running_size);
            self.accumulate(context, &cuts, chunk, node == 0, &reduction, to)?;
            if node < last {
                // SAFETY: the scratch memory lives as long as the mesh, and this chunk of it is complete.
                let ticket =
                    unsafe { inner.mesh.send(self.on_rail(node + 1), to.base, to.len_bytes) };
                // The next host can only receive what has left this rank. So this rank waits until the
                // chunk is sent, before it waits for the other ranks of its host.
                wait(inner, context, ticket)?;
                continue;
            }
            let finished = chunk_of(&result, chunk, size);
            // SAFETY: the running result is complete, and lies apart from where it is finished.
            unsafe { reduction.finish(to.base, &[finished.base], finished.len_bytes / size) };
            if call.kind == OpKind::AllReduce && node > 0 {
                // SAFETY: the caller holds the memory until the operation is over or the mesh cleared.
                unsafe {
                    inner.mesh.send(self.on_rail(node - 1), finished.base, finished.len_bytes)
                };
            }
        }
        if call.kind != OpKind::AllReduce {
            return self.deliver(inner, context, met, &cuts, result);
        }
        for (chunk, &ticket) in results.iter().enumerate() {
            wait(inner, context, ticket)?;
            if node > 0 {
                let finished = chunk_of(&result, chunk, size);
                // SAFETY: as above; the chunk has arrived, and nobody writes to it any longer.
                unsafe {
                    inner.mesh.send(self.on_rail(node - 1), finished.base, finished.len_bytes)
                };
            }
        }
        wait_all(inner, context)?;
        // Every rank of the host now has its own slice in place.
        let within = Call { kind: OpKind::AllGather, send: result, ..call.clone() };
        self.local.run(&self.within_host(context, &within)).map(drop)
    }

    /// Posts the receives of these chunks from the rank of this rail on host `node`.
    fn post(
        &self,
        inner: &mut Inner,
        node: usize,
        chunks: impl Iterator<Item = Region>,
    ) -> Vec<Ticket> {
        let from = self.on_rail(node);
        chunks
            .map(|chunk| {
                // SAFETY: the chunks are scratch memory, or lie in the slice of the caller's result that
                // only this rank uses: by the time the result comes back, this rank's own contribution in
                // that slice is part of the prefix.
                unsafe { inner.mesh.recv(from, chunk.base, chunk.len_bytes) }
            })
            .collect()
    }

    /// Adds one chunk of the data of all ranks of this host to the running result. `is_fresh` starts a new
    /// result instead, on the first host.
    fn accumulate(
        &self,
        context: &OpContext,
        cuts: &Cuts,
        chunk: usize,
        is_fresh: bool,
        reduction: &Reduction,
        running: Region,
    ) -> Result<(), CollectiveError> {
        let call = context.call;
        let within = self.within_host(context, call);
        let met = self.local.show(&within)?;
        let size = call.dtype.size_bytes();
        let running_size = reduction.running_dtype().size_bytes();
        let block = |_, reader: usize| {
            let (start, range) = (cuts.slices[reader].start, cuts.within(reader, chunk));
            (start + range.start) * size..(start + range.end) * size
        };
        pull(&self.local, &within, &met, Cut::Blocks, block, |window| {
            let (sources, range) = window.of_all();
            if range.is_empty() {
                return;
            }
            let elems = range.start / size..range.end / size;
            let to = running.part(elems.start * running_size..elems.end * running_size);
            // SAFETY: the sources are valid for the range, and nobody writes there: each rank's result
            // goes to its own slice, which only that rank reads. Only this rank uses the running result.
            unsafe { reduction.accumulate(is_fresh, sources, to.base, elems.len()) };
        })
    }

    /// Sends the finished slices from the last host to the ranks that want them: each rank gets its share
    /// (reduce-scatter), or the root gets everything (reduce).
    fn deliver(
        &self,
        inner: &mut Inner,
        context: &OpContext,
        met: &Met,
        cuts: &Cuts,
        result: Region,
    ) -> Result<(), CollectiveError> {
        let call = context.call;
        let size = call.dtype.size_bytes();
        let shares = Shares::of(met.calls.iter().map(|call| call.recv_count));
        let last = self.ranks_of(self.num_hosts() - 1);
        // The bytes that rank `wanted` needs from a rail's slice: their range within the slice, and their
        // range within the rank's share.
        let overlap = |rail: usize, wanted: usize| {
            let share = shares.bytes(wanted, DType::U8);
            let slice = &cuts.slices[rail];
            let both = slice.start.max(share.start)..slice.end.min(share.end);
            if both.is_empty() {
                return (0..0, 0..0);
            }
            let within = |start: usize| (both.start - start) * size..(both.end - start) * size;
            (within(slice.start), within(share.start))
        };
        if !last.contains(&context.rank) {
            for (rail, source) in last.clone().enumerate() {
                let to = call.recv.part(overlap(rail, context.rank).1);
                // SAFETY: the caller holds the memory; the parts of a share from different slices lie apart.
                unsafe { inner.mesh.recv(source, to.base, to.len_bytes) };
            }
            return wait_all(inner, context);
        }
        for wanted in (0..context.world).filter(|wanted| !last.contains(wanted)) {
            let part = result.part(overlap(self.local.rank, wanted).0);
            // SAFETY: the scratch memory lives as long as the mesh.
            unsafe { inner.mesh.send(wanted, part.base, part.len_bytes) };
        }
        wait_all(inner, context)?;
        let within = Call { send: result, ..call.clone() };
        let within = self.within_host(context, &within);
        let met = self.local.show(&within)?;
        let block = |rail: usize, reader: usize| overlap(rail, last.start + reader).0;
        pull(&self.local, &within, &met, Cut::Blocks, block, |window| {
            for rail in 0..self.local.world {
                let to = call.recv.part(overlap(rail, context.rank).1);
                // SAFETY: the receiving memory is this rank's own, and the parts fill it exactly.
                unsafe { window.copy(rail, to.base) };
            }
        })
    }
}

fn wait(inner: &mut Inner, context: &OpContext, ticket: Ticket) -> Result<(), CollectiveError> {
    inner.mesh.wait(&[ticket], context.policy).map_err(|why| explain(&inner.mesh, context, why))
}
