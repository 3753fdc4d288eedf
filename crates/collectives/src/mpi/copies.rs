//! Broadcast, all-gather, gather, scatter and all-to-all by the MPI library.

use std::ffi::c_int;

use mpi_sys as ffi;

use super::flight::{Comm, MOST, Tag, Transfers, address};
use super::inner::{Buffers, copy_region, room_for_result, windows, within};
use super::runtime::datatype;
use crate::call::{Region, Shares};
use crate::context::OpContext;
use crate::meet::AgreedCalls;
use crate::{OpKind, Result};

pub(super) fn broadcast(comm: &Comm, context: &OpContext) -> Result<()> {
    let call = context.call;
    let size = call.dtype.size_bytes();
    let data = call.recv;
    if context.rank == call.root {
        copy_region(call.send, data);
    }
    for window in windows(data.len_bytes / size) {
        let part = address(data.part(window.start * size..window.end * size));
        let (len, root) = (window.len() as c_int, call.root as c_int);
        // SAFETY: the region stays valid until the operation has succeeded, and all ranks have agreed on its length.
        unsafe {
            comm.carry_out(context, |comm, request| {
                ffi::MPI_Ibcast(part, len, datatype(call.dtype), root, comm, request)
            })?;
        }
    }
    Ok(())
}

/// All-gather and gather.
pub(super) fn gather(
    comm: &Comm,
    inner: &mut Buffers,
    context: &OpContext,
    met: &AgreedCalls,
) -> Result<()> {
    let (call, rank) = (context.call, context.rank);
    let (size, type_) = (call.dtype.size_bytes(), datatype(call.dtype));
    let shares = met.shares();
    let is_root = call.kind == OpKind::AllGather || rank == call.root;
    let whole = call.recv;
    let is_in_place = match call.kind {
        // The MPI standard allows "in place" on all ranks or on none.
        OpKind::AllGather => met.calls.iter().all(|call| call.overlap > 0 || call.send_count == 0),
        _ => is_root && call.overlap().is_some(),
    };
    let in_place = comm.runtime.in_place().filter(|_| is_in_place);
    let send = match in_place {
        Some(_) => {
            copy_region(call.send, whole.part(shares.bytes(rank, call.dtype)));
            Region::EMPTY
        }
        None if call.overlap().is_none() => call.send,
        None => {
            let copy = inner.sending.get(call.send.len_bytes);
            copy_region(call.send, copy);
            copy
        }
    };
    for window in windows(shares.elements(context.world - 1).end) {
        inner.cut(&shares, context.world, &window);
        let own = share_part(&shares, rank, &window);
        let send = match in_place {
            Some(address) => address,
            None => address(part(send, own, size)).cast_const(),
        };
        let len = inner.counts[rank];
        let to = if is_root { part(whole, window.clone(), size) } else { Region::EMPTY };
        let (to, root) = (address(to), call.root as c_int);
        let (counts, starts) = (inner.counts.as_ptr(), inner.starts.as_ptr());
        // SAFETY: the regions and the counts stay valid until the operation has succeeded, and are long enough; all ranks
        // have agreed on the counts, and divide the data in the same way.
        unsafe {
            comm.carry_out(context, |comm, request| match call.kind {
                OpKind::AllGather => {
                    ffi::MPI_Iallgatherv(send, len, type_, to, counts, starts, type_, comm, request)
                }
                _ => ffi::MPI_Igatherv(
                    send, len, type_, to, counts, starts, type_, root, comm, request,
                ),
            })?;
        }
    }
    Ok(())
}

pub(super) fn scatter(
    comm: &Comm,
    inner: &mut Buffers,
    context: &OpContext,
    met: &AgreedCalls,
) -> Result<()> {
    let (call, rank) = (context.call, context.rank);
    let (size, type_) = (call.dtype.size_bytes(), datatype(call.dtype));
    let shares = met.shares();
    let whole = call.send;
    let share = room_for_result(call, &mut inner.receiving);
    for window in windows(shares.elements(context.world - 1).end) {
        inner.cut(&shares, context.world, &window);
        let is_root = rank == call.root;
        let from = if is_root { part(whole, window.clone(), size) } else { Region::EMPTY };
        let from = address(from).cast_const();
        let to = address(part(share, share_part(&shares, rank, &window), size));
        let (len, root) = (inner.counts[rank], call.root as c_int);
        let (counts, starts) = (inner.counts.as_ptr(), inner.starts.as_ptr());
        // SAFETY: as for `gather`.
        unsafe {
            comm.carry_out(context, |comm, request| {
                ffi::MPI_Iscatterv(from, counts, starts, type_, to, len, type_, root, comm, request)
            })?;
        }
    }
    copy_region(share, call.recv);
    Ok(())
}

pub(super) fn all_to_all(
    comm: &Comm,
    inner: &mut Buffers,
    context: &OpContext,
    met: &AgreedCalls,
) -> Result<()> {
    let (call, rank) = (context.call, context.rank);
    let (type_, sent) = (datatype(call.dtype), &met.sent);
    let (send, recv) = (call.send, call.recv);
    let to_all = Shares::of(sent[rank].iter().copied());
    let from_all = Shares::of(sent.iter().map(|row| row[rank]));
    // All ranks know all counts, so they all choose the same branch.
    let column = |rank: usize| sent.iter().map(|row| row[rank]).sum::<u64>();
    let longest = (0..context.world).map(|r| sent[r].iter().sum::<u64>().max(column(r))).max();
    if longest.is_some_and(|longest| longest <= MOST as u64) {
        let numbers = |shares: &Shares, f: fn(std::ops::Range<usize>) -> usize| {
            (0..context.world).map(move |r| f(shares.elements(r)) as c_int).collect::<Vec<_>>()
        };
        let both = |f| [numbers(&to_all, f), numbers(&from_all, f)].concat();
        inner.counts = both(|elements| elements.len());
        inner.starts = both(|elements| elements.start);
        let (send_counts, recv_counts) = inner.counts.split_at(context.world);
        let (send_starts, recv_starts) = inner.starts.split_at(context.world);
        let (from, to) = (address(send).cast_const(), address(recv));
        let (sc, ss) = (send_counts.as_ptr(), send_starts.as_ptr());
        let (rc, rs) = (recv_counts.as_ptr(), recv_starts.as_ptr());
        // SAFETY: as for `gather`.
        unsafe {
            comm.carry_out(context, |comm, request| {
                ffi::MPI_Ialltoallv(from, sc, ss, type_, to, rc, rs, type_, comm, request)
            })?;
        }
    } else {
        // The library cannot count so many elements in one call, so each block is sent separately, in parts.
        let mut flight = Transfers::new();
        let out = |peer| send.part(to_all.bytes(peer, call.dtype));
        let incoming = |peer| recv.part(from_all.bytes(peer, call.dtype));
        for peer in (0..context.world).filter(|&peer| peer != rank) {
            let with = (peer, Tag::Data);
            // SAFETY: the regions stay valid until the operation has succeeded.
            unsafe {
                comm.recv(context, &mut flight, with, (incoming(peer), call.dtype))?;
                comm.send(context, &mut flight, with, (out(peer), call.dtype))?;
            }
        }
        copy_region(out(rank), incoming(rank));
        comm.land(context, &mut flight)?;
    }
    Ok(())
}

/// The elements of a rank's share within a window, counted from the share's beginning.
fn share_part(
    shares: &Shares,
    rank: usize,
    window: &std::ops::Range<usize>,
) -> std::ops::Range<usize> {
    let (share, part) = (shares.elements(rank), within(shares, rank, window));
    if part.is_empty() { 0..0 } else { part.start - share.start..part.end - share.start }
}

/// The part of a region that holds these elements, of `size` bytes each.
fn part(region: Region, elements: std::ops::Range<usize>, size: usize) -> Region {
    region.part(elements.start * size..elements.end * size)
}
