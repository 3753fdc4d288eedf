//! Send, receive, and both at once. The sender sends its header and the data without waiting. The receiver's header
//! says what the receiver expects.
//!
//! Steps: 1, `S` bytes. A send is finished when the data have left this rank's memory and the receiver has
//! called its receive. So both sides know whether their calls match.

use paceline_trace::now_ns;

use super::inner::{Inner, explain};
use super::wires::Ticket;
use crate::call::{Call, CallHeader, Conflict, Region};
use crate::context::OpContext;
use crate::header::{HEADER_BYTES, Header, read_call};
use crate::{CollectiveError, OpKind, Result};

/// Carries out the halves of the call whose peer is connected. Calls `meanwhile` while the bytes of these halves are on
/// their way. Returns the moment when the last header arrived.
pub(crate) fn run(
    inner: &mut Inner,
    context: &OpContext,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<u64> {
    let is_connected = |half: &(usize, Region)| inner.mesh.peers().any(|peer| peer == half.0);
    let sending = context.call.sending().filter(is_connected);
    let receiving = context.call.receiving().filter(is_connected);
    let mut headers = Vec::new();
    let mut awaited: Vec<(usize, OpKind)> = Vec::new();
    for (kind, half) in [(OpKind::Send, sending), (OpKind::Recv, receiving)] {
        let Some((peer, _)) = half else { continue };
        let call = Call { kind, root: peer, ..context.call.clone() }.header();
        headers.push((kind, peer, call, Header::Call { operation: context.seq, call }.encode()));
        awaited.push((peer, if kind == OpKind::Send { OpKind::Recv } else { OpKind::Send }));
    }
    for (kind, peer, _, header) in &headers {
        // SAFETY: headers and data outlive the operation, or the mesh is cleared before they are dropped.
        unsafe { inner.mesh.send(*peer, header.as_ptr(), HEADER_BYTES) };
        if let (OpKind::Send, Some((_, data))) = (kind, sending) {
            // SAFETY: as above.
            unsafe { inner.mesh.send(*peer, data.base, data.len_bytes) };
        }
    }
    meanwhile()?;
    let mut present_ns = context.started_ns;
    // A peer may answer the two halves in either order.
    while let Some(&(peer, _)) = awaited.first() {
        let mut answer = [0u8; HEADER_BYTES];
        // SAFETY: the answer outlives the wait, or the mesh is cleared before the answer is dropped.
        let ticket = unsafe { inner.mesh.recv(peer, answer.as_mut_ptr(), HEADER_BYTES) };
        wait(inner, context, ticket)?;
        present_ns = now_ns();
        let (operation, theirs) = read_call(context, peer, &answer)?;
        let is_answer =
            |(from, kind): &(usize, OpKind)| *from == peer && theirs.kind() == Some(*kind);
        let Some(at) = awaited.iter().position(is_answer) else {
            return Err(conflict(context, peer, context.call.header(), operation, theirs));
        };
        let (_, their_kind) = awaited.remove(at);
        let is_for = if their_kind == OpKind::Recv { OpKind::Send } else { OpKind::Recv };
        let ours = headers.iter().find(|(kind, ..)| *kind == is_for).map(|(_, _, call, _)| *call);
        let ours = ours.unwrap_or_default();
        let (sender, receiver) =
            if is_for == OpKind::Send { (&ours, &theirs) } else { (&theirs, &ours) };
        let dtype = |call: &CallHeader| (call.signature >> 8) as u8;
        if dtype(sender) != dtype(receiver) || sender.send_count != receiver.recv_count {
            return Err(conflict(context, peer, ours, operation, theirs));
        }
        if let (OpKind::Recv, Some((_, Region { base, len_bytes, .. }))) = (is_for, receiving) {
            // SAFETY: the caller holds the memory until the operation is over or the mesh is cleared.
            let ticket = unsafe { inner.mesh.recv(peer, base, len_bytes) };
            wait(inner, context, ticket)?;
        }
    }
    inner.mesh.wait_all(context.policy).map_err(|why| explain(&inner.mesh, context, why))?;
    Ok(present_ns)
}

/// The error for two calls that do not match.
fn conflict(
    context: &OpContext,
    peer: usize,
    ours: CallHeader,
    operation: u32,
    theirs: CallHeader,
) -> CollectiveError {
    context.conflict(&Conflict {
        ranks: [context.rank, peer],
        operations: [context.seq, operation],
        calls: [ours, theirs],
    })
}

fn wait(inner: &mut Inner, context: &OpContext, ticket: Ticket) -> Result<()> {
    let outcome = inner.mesh.wait(&[ticket], context.policy);
    outcome.map_err(|why| {
        let error = explain(&inner.mesh, context, why);
        inner.mesh.clear();
        error
    })
}
