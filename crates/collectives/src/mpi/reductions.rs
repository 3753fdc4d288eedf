//! All-reduce, reduce and reduce-scatter, by the library's blocking operations.
//!
//! The nonblocking operations of Open MPI 4.1 take twice as long for an
//! all-reduce of 1 MB between two ranks, and four times as long for a reduce. So once all ranks have
//! arrived and their calls match, this module makes a blocking call, without our time limit. If a rank dies meanwhile, the
//! launcher ends the job. A library that allows only one thread at a
//! time gets nonblocking calls, since with blocking ones two groups could wait for each other.

use std::ffi::{c_int, c_void};

use mpi_sys as ffi;

use super::flight::{Comm, address};
use super::inner::{Buffers, copy_region, room_for_result, windows, within};
use super::runtime::datatype;
use crate::call::Region;
use crate::context::OpContext;
use crate::meet::AgreedCalls;
use crate::reduce::Reduction;
use crate::{OpKind, ReduceOp, Result};

/// How this rank takes part.
struct Sides {
    /// This rank's contribution. `None` if it lies in `result`.
    send: Option<Region>,
    /// Where the library writes, in the running type.
    result: Region,
}

pub(super) fn run(
    comm: &Comm,
    inner: &mut Buffers,
    context: &OpContext,
    met: &AgreedCalls,
) -> Result<()> {
    let call = context.call;
    let reduction = Reduction { dtype: call.dtype, op: call.op, ranks: context.world };
    let running = reduction.running_dtype();
    let (type_, op) = (datatype(running), comm.runtime.operation(running, call.op));
    let elems = call.send.len_bytes / call.dtype.size_bytes();
    let recv_elems = call.recv.len_bytes / call.dtype.size_bytes();
    let sides = prepare(comm, inner, context, met, &reduction);
    let in_place = comm.runtime.in_place().unwrap_or_default();
    let bytes = |from: usize, len: usize| {
        let size = running.size_bytes();
        from * size..(from + len) * size
    };
    let shares = met.shares();
    for window in windows(elems) {
        let len = window.len() as c_int;
        let part = |region: Region| address(region.part(bytes(window.start, window.len())));
        let send: *const c_void = sides.send.map_or(in_place, |region| part(region).cast_const());
        let counts = match call.kind {
            OpKind::ReduceScatter => {
                inner.cut(&shares, context.world, &window);
                inner.counts.as_ptr()
            }
            _ => std::ptr::null(),
        };
        let result = match call.kind {
            OpKind::ReduceScatter => {
                let own = within(&shares, context.rank, &window);
                let from = own.start.saturating_sub(shares.elements(context.rank).start);
                let part = match own.len() {
                    0 => Region::EMPTY,
                    len => sides.result.part(bytes(from, len)),
                };
                address(part)
            }
            OpKind::Reduce if context.rank != call.root => address(Region::EMPTY),
            _ => part(sides.result),
        };
        let root = call.root as c_int;
        // SAFETY: the regions and the counts stay valid until the operation has succeeded, and are long enough; all ranks
        // have agreed on the counts, and divide the data in the same way.
        unsafe {
            if comm.runtime.is_concurrent() {
                comm.carry_out_blocking(context, |comm| match call.kind {
                    OpKind::AllReduce => ffi::MPI_Allreduce(send, result, len, type_, op, comm),
                    OpKind::Reduce => ffi::MPI_Reduce(send, result, len, type_, op, root, comm),
                    _ => ffi::MPI_Reduce_scatter(send, result, counts, type_, op, comm),
                })?;
                continue;
            }
            comm.carry_out(context, |comm, request| match call.kind {
                OpKind::AllReduce => {
                    ffi::MPI_Iallreduce(send, result, len, type_, op, comm, request)
                }
                OpKind::Reduce => {
                    ffi::MPI_Ireduce(send, result, len, type_, op, root, comm, request)
                }
                _ => ffi::MPI_Ireduce_scatter(send, result, counts, type_, op, comm, request),
            })?;
        }
    }
    if running != call.dtype || call.op == ReduceOp::Mean {
        // SAFETY: the result is complete, in the running type, and has `recv_elems` elements. It lies apart
        // from `call.recv`, or both are the same memory with the same type.
        unsafe {
            reduction.complete(
                &[sides.result.base.cast_const()],
                &[0],
                &[call.recv.base],
                recv_elems,
            )
        };
    } else {
        copy_region(sides.result, call.recv);
    }
    Ok(())
}

/// Decides where the library reads and writes, and puts the contribution there.
fn prepare(
    comm: &Comm,
    inner: &mut Buffers,
    context: &OpContext,
    met: &AgreedCalls,
    reduction: &Reduction,
) -> Sides {
    let call = context.call;
    let running = reduction.running_dtype();
    let size = |region: Region| region.len_bytes / call.dtype.size_bytes() * running.size_bytes();
    if running != call.dtype {
        let send = inner.sending.get(size(call.send));
        let elems = call.send.len_bytes / call.dtype.size_bytes();
        // SAFETY: `send` is long enough, and the engine's own.
        unsafe { reduction.partial(&[call.send.base], send.base, elems) };
        return Sides { send: Some(send), result: inner.receiving.get(size(call.recv)) };
    }
    let is_in_place = match call.kind {
        // The MPI standard allows "in place" on all ranks or on none.
        OpKind::AllReduce => met.calls.iter().all(|call| call.overlap > 0),
        OpKind::Reduce => call.overlap().is_some(),
        _ => false,
    };
    if is_in_place && comm.runtime.in_place().is_some() {
        copy_region(call.send, call.recv);
        return Sides { send: None, result: call.recv };
    }
    Sides { send: Some(call.send), result: room_for_result(call, &mut inner.receiving) }
}
