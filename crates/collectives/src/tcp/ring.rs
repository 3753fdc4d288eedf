//! All-reduce around a ring (Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
//! Workstations", 2009).
//!
//! Steps: `2 (n-1)`. Bytes: `2 (n-1)/n S` sent per rank, all to one neighbor. In the first half of the steps
//! each share travels around the ring and collects every rank's contribution. In the second half the sums
//! travel on to all ranks. Blocks are passed on as soon as they are complete, so the steps overlap.
//!
//! Order of summation: share `j` begins at rank `j` and ends at rank `j-1`. That is no tree, and the order
//! differs between shares, so floating-point sums differ in their last bits from those of the other transports. f16 and
//! bf16 are rounded at every step.

use super::inner::Sockets;
use crate::Result;
use crate::call::Shares;
use crate::context::OpContext;
use crate::reduce::{ReduceOp, Reduction};

/// Bytes of a block, which is passed on at once.
const BLOCK_BYTES: usize = 256 << 10;

pub(super) fn all_reduce(inner: &mut Sockets, context: &OpContext) -> Result<()> {
    let (call, n, rank) = (context.call, context.world, context.rank);
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    let size = call.dtype.size_bytes();
    let shares = Shares::even(call.header().send_count, n);
    let share = |index: usize| shares.bytes(index % n, call.dtype);
    let longest = (0..n).map(|index| share(index).len()).max().unwrap_or(0);
    let slot_bytes = BLOCK_BYTES.min(longest.next_multiple_of(64));
    let scratch = inner.scratch.get(2 * slot_bytes);
    let part = call.send.part(share(rank));
    // SAFETY: the caller holds the memory until the operation is over or the wires are cleared.
    unsafe { inner.wires.send(next, part.base, part.len_bytes) };
    // What arrives, in order: the step, and the range of the share. In the first `n - 1` steps this rank adds
    // its own contribution.
    let incoming = (0..2 * n - 2).map(|step| (step, share(rank + 2 * n - 1 - step)));
    let blocks: Vec<(usize, std::ops::Range<usize>)> = incoming
        .flat_map(|(step, range)| {
            let starts = range.clone().step_by(BLOCK_BYTES);
            starts.map(move |start| (step, start..range.end.min(start + BLOCK_BYTES)))
        })
        .collect();
    let mut tickets = Vec::with_capacity(blocks.len());
    for (index, (step, range)) in blocks.iter().enumerate() {
        while tickets.len() < blocks.len().min(index + 2) {
            let (step, range) = &blocks[tickets.len()];
            let to = if *step < n - 1 {
                let at = tickets.len() % 2 * slot_bytes;
                scratch.part(at..at + range.len())
            } else {
                call.recv.part(range.clone())
            };
            // SAFETY: as above. A slot is free again, since its last block was added two blocks ago. A
            // finished share replaces a partial share that this rank passed on long before: the share has
            // traveled all the way around the ring since then.
            tickets.push(unsafe { inner.wires.recv(previous, to.base, to.len_bytes) });
        }
        inner.wait(context, &tickets[index..=index])?;
        let target = call.recv.part(range.clone());
        if *step < n - 1 {
            let slot = scratch.part(index % 2 * slot_bytes..index % 2 * slot_bytes + range.len());
            let is_last = *step == n - 2;
            // A mean is a sum until the last rank divides it.
            let op = if call.op == ReduceOp::Mean && !is_last { ReduceOp::Sum } else { call.op };
            let reduction = Reduction { dtype: call.dtype, op, ranks: n };
            let inputs = [slot.base.cast_const(), call.send.part(range.clone()).base.cast_const()];
            // SAFETY: the block has arrived, and the result replaces this rank's contribution, or goes to
            // memory apart from it.
            unsafe { reduction.run(&inputs, &[target.base], range.len() / size) };
        }
        if *step < 2 * n - 3 {
            // SAFETY: as above. The block stays unchanged until it has traveled around the ring.
            unsafe { inner.wires.send(next, target.base, target.len_bytes) };
        }
    }
    inner.wait_all(context)
}
