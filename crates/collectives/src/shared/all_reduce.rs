//! All-reduce, direct: every element is reduced as one tree and written to every rank at once.
//!
//! Steps: barrier phase, chunks, barrier phase. The ranks claim the *chunks* of the message
//! from a shared counter. For a message of `S` bytes, each rank reads and writes `S` bytes on average,
//! the least possible if every rank keeps its own copy. Order of summation: the tree over ranks 0, 1, 2, ...
//! for each element, whichever rank claims the chunk.
//!
//! Staged (private memory of processes): the message goes in pieces of half a megabyte for each rank. The first one is
//! there when the ranks meet. Each piece is copied in (`S` more bytes), reduced in the staging areas, which stay in
//! the cache, and copied out (`S` more). A group of two ranks needs neither the second phase nor the copy out: each rank
//! reduces the whole message directly into its private memory.

use std::borrow::Cow;

use super::control::PlaceWords;
use super::control::Slot;
use super::round::Round;
use super::state::{SharedState, half_bytes};
use crate::Result;
use crate::context::OpContext;
use crate::reduce::Reduction;

/// Bytes of a chunk: small enough that even a megabyte is divided among the ranks, large enough that
/// claiming a chunk (one atomic addition) costs little compared to the work.
const CHUNK_BYTES: usize = 64 << 10;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    reduce_to(shared, context, 0..shared.world)
}

pub(super) fn reduce_to(
    shared: &SharedState,
    context: &OpContext,
    targets: std::ops::Range<usize>,
) -> Result<u64> {
    let met = shared.meet(context)?;
    let len_bytes = context.call.send.len_bytes;
    if len_bytes == 0 {
        return Ok(met.present_ns);
    }
    let job = ChunkedReduction { shared, context, targets };
    if met.is_anyone_staged {
        job.staged(&met)?
    } else {
        job.in_place(&met)?
    }
    Ok(met.present_ns)
}

struct ChunkedReduction<'a> {
    shared: &'a SharedState,
    context: &'a OpContext<'a>,
    targets: std::ops::Range<usize>,
}

impl ChunkedReduction<'_> {
    fn in_place(&self, met: &Round) -> Result<()> {
        let len_bytes = self.context.call.send.len_bytes;
        let inputs =
            self.places(met.number, 0..self.shared.world, |slot| &slot.send, 0, len_bytes)?;
        let outputs =
            self.places(met.number, self.targets.clone(), |slot| &slot.recv, 0, len_bytes)?;
        self.reduce_chunks(met.number, &inputs, &outputs, len_bytes)
    }

    /// The addresses of the data of `ranks`: `len_bytes` bytes, from `start` bytes into the message.
    fn places(
        &self,
        round: u32,
        ranks: std::ops::Range<usize>,
        side: impl Fn(&Slot) -> &PlaceWords,
        start: usize,
        len_bytes: usize,
    ) -> Result<Vec<*mut u8>> {
        let Self { shared, context, .. } = self;
        let address = |rank| match side(shared.control().slot(round, rank)).load() {
            None => Ok(shared.stage(rank, round)),
            Some(place) => shared.resolve(context, rank, Some(place.after(start)), len_bytes),
        };
        ranks.map(address).collect()
    }

    /// Claims chunks until all are claimed, and waits until all are complete.
    fn reduce_chunks(
        &self,
        round: u32,
        inputs: &[*mut u8],
        outputs: &[*mut u8],
        len_bytes: usize,
    ) -> Result<()> {
        let Self { shared, context, .. } = self;
        let barrier = &shared.control().barrier;
        let num_chunks = len_bytes.div_ceil(CHUNK_BYTES) as u32;
        while let Some(chunk) = barrier.claim_chunk(num_chunks) {
            let begin = chunk as usize * CHUNK_BYTES;
            let chunk_bytes = CHUNK_BYTES.min(len_bytes - begin);
            // SAFETY: the chunk lies within every region. The owners of the regions have claimed them until the operation has
            // succeeded: if one leaves early, its claim stays. Only this rank works on a chunk that it has claimed.
            unsafe { self.reduce(inputs, outputs, begin, chunk_bytes) };
            barrier.complete_chunk(round, num_chunks);
        }
        shared.done_with(round);
        shared.wait_done(context, round)
    }

    /// # Safety
    ///
    /// Bytes `begin..begin + len_bytes` of every input and output are valid, aligned for the element
    /// type, and nobody else writes to them.
    unsafe fn reduce(
        &self,
        inputs: &[*mut u8],
        outputs: &[*mut u8],
        begin: usize,
        len_bytes: usize,
    ) {
        let call = self.context.call;
        // Most messages are a single chunk, which begins where the regions do.
        let moved = |bases: &[*mut u8]| -> Vec<*mut u8> {
            // SAFETY: the chunk lies within every region, as required of the caller.
            bases.iter().map(|base| unsafe { base.add(begin) }).collect()
        };
        let (from, to) = match begin {
            0 => (Cow::Borrowed(inputs), Cow::Borrowed(outputs)),
            _ => (Cow::Owned(moved(inputs)), Cow::Owned(moved(outputs))),
        };
        // SAFETY: a slice of as many pointers, which differ only in what they permit.
        let from = unsafe { std::slice::from_raw_parts(from.as_ptr().cast(), from.len()) };
        let reduction = Reduction { dtype: call.dtype, op: call.op, ranks: self.shared.world };
        let elems = len_bytes / call.dtype.size_bytes();
        // SAFETY: as required of the caller; different ranks' regions do not overlap, and a rank's
        // own two are the same or apart, as was checked when they met.
        unsafe { reduction.run(from, &to, elems) };
    }

    fn staged(&self, first: &Round) -> Result<()> {
        let Self { shared, context, targets } = self;
        let (rank, world, call) = (shared.rank, shared.world, context.call);
        let is_staged = |rank| shared.control().slot(first.number, rank).send.load().is_none();
        let is_target = targets.contains(&rank);
        let is_private = world == 2 && (0..world).all(is_staged);
        for start in (0..call.send.len_bytes).step_by(half_bytes(shared.world)) {
            let len_bytes = half_bytes(shared.world).min(call.send.len_bytes - start);
            let mut round = first.number;
            if start > 0 {
                round = shared.next_round();
                if is_staged(rank) {
                    shared.stage_piece(call, round, start);
                }
                shared.arrive(context, round);
                shared.wait_present(context, round)?;
            }
            let mut inputs = self.places(round, 0..world, |slot| &slot.send, start, len_bytes)?;
            if is_private {
                if is_target {
                    // This rank reads its own data from their original place: the cache lines of the staged copy, which the peer reads,
                    // would have to come back from the peer's core.
                    // SAFETY: the piece lies within this rank's data.
                    inputs[rank] = unsafe { call.send.base.add(start) };
                    // SAFETY: the staged pieces stay unchanged until all ranks have arrived in the next
                    // round, and the result goes to memory that only this rank uses.
                    unsafe { self.reduce(&inputs, &[call.recv.base.add(start)], 0, len_bytes) };
                }
                continue;
            }
            let outputs =
                self.places(round, targets.clone(), |slot| &slot.recv, start, len_bytes)?;
            self.reduce_chunks(round, &inputs, &outputs, len_bytes)?;
            if is_staged(rank) && is_target {
                // SAFETY: all chunks are complete, and nobody writes to this half before this rank arrives
                // in another round.
                unsafe {
                    let stage = shared.stage(rank, round);
                    std::ptr::copy_nonoverlapping(stage, call.recv.base.add(start), len_bytes);
                }
            }
        }
        Ok(())
    }
}
