//! Send, receive, and both at once: a header each way, then the data.
//!
//! Steps: 1, `S` bytes, after the headers. A send is finished when the receiver has called its receive and
//! the data have left this rank's memory. So both sides know whether their calls match.

use paceline_memory::DType;
use paceline_trace::now_ns;

use super::flight::{Comm, Tag, Transfers};
use super::headers;
use super::inner::Buffers;
use crate::call::{Call, CallHeader};
use crate::context::OpContext;
use crate::header::{HEADER_BYTES, Header, read_call};
use crate::{OpKind, Result};

/// The sending or the receiving half of a call: its kind, the peer, and the header that the peer sees.
struct OneSide {
    kind: OpKind,
    peer: usize,
    call: CallHeader,
}

pub(super) fn run(comm: &Comm, inner: &mut Buffers, context: &OpContext) -> Result<u64> {
    let halves = halves(context);
    let mut flight = Transfers::new();
    let headers = inner.outgoing.get(halves.len() * HEADER_BYTES);
    for (n, half) in halves.iter().enumerate() {
        let bytes = Header::Call { operation: context.seq, call: half.call }.encode();
        let header = headers.part(n * HEADER_BYTES..(n + 1) * HEADER_BYTES);
        // SAFETY: the header's memory is as long, and the engine's own; it stays valid until all transfers
        // have landed, or for good.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), header.base, HEADER_BYTES);
            comm.send(context, &mut flight, (half.peer, Tag::Header), (header, DType::U8))?;
        }
    }
    let present_ns = hear(comm, inner, context, &halves)?;
    let dtype = context.call.dtype;
    if let Some((peer, region)) = context.call.receiving() {
        // SAFETY: the region stays valid until the operation has succeeded.
        unsafe { comm.recv(context, &mut flight, (peer, Tag::Data), (region, dtype))? };
    }
    if let Some((peer, region)) = context.call.sending() {
        // SAFETY: as above.
        unsafe { comm.send(context, &mut flight, (peer, Tag::Data), (region, dtype))? };
    }
    comm.land(context, &mut flight)?;
    Ok(present_ns)
}

fn halves(context: &OpContext) -> Vec<OneSide> {
    let sending = context.call.sending().map(|(peer, _)| (OpKind::Send, peer));
    let receiving = context.call.receiving().map(|(peer, _)| (OpKind::Recv, peer));
    let half = |(kind, peer)| {
        let call = Call { kind, root: peer, ..context.call.clone() }.header();
        OneSide { kind, peer, call }
    };
    sending.into_iter().chain(receiving).map(half).collect()
}

/// Waits for the peers' headers and compares them with this rank's. Returns the moment when the last one
/// came.
fn hear(comm: &Comm, inner: &mut Buffers, context: &OpContext, halves: &[OneSide]) -> Result<u64> {
    let mut present_ns = context.started_ns;
    let mut open: Vec<&OneSide> = halves.iter().collect();
    // A peer may answer the two halves in either order.
    while let Some(peer) = open.first().map(|half| half.peer) {
        let answer = inner.incoming.get(HEADER_BYTES);
        let mut flight = Transfers::new();
        // SAFETY: the memory is the engine's own.
        let bytes = unsafe {
            comm.recv(context, &mut flight, (peer, Tag::Header), (answer, DType::U8))?;
            comm.land(context, &mut flight)?;
            std::slice::from_raw_parts(answer.base, HEADER_BYTES)
        };
        present_ns = now_ns();
        let (operation, theirs) = read_call(context, peer, bytes)?;
        let other_side = |half: &OneSide| {
            if half.kind == OpKind::Send { OpKind::Recv } else { OpKind::Send }
        };
        let is_answered =
            |half: &&OneSide| half.peer == peer && theirs.kind() == Some(other_side(half));
        let Some(at) = open.iter().position(is_answered) else {
            let ours = context.call.header();
            return Err(headers::conflict(comm, context, peer, (ours, operation, theirs)));
        };
        let half = open.remove(at);
        let (sender, receiver) = match half.kind {
            OpKind::Send => (&half.call, &theirs),
            _ => (&theirs, &half.call),
        };
        if !sender.fits(receiver) {
            return Err(headers::conflict(comm, context, peer, (half.call, operation, theirs)));
        }
    }
    Ok(present_ns)
}
