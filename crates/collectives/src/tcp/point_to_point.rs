//! Send, receive, and both at once. The sender sends its header and the data without waiting. The receiver's header
//! says what the receiver expects.
//!
//! Steps: 1, `S` bytes. A send is finished when the data have left this rank's memory and the receiver has
//! called its receive. So both sides know whether their calls match.

use paceline_trace::now_ns;

use super::inner::Sockets;
use crate::call::{Call, Region};
use crate::context::OpContext;
use crate::header::{HEADER_BYTES, Header, read_call};
use crate::{OpKind, Result};

/// Carries out the halves of the call whose peer is connected. Calls `meanwhile` while the bytes of these halves are on
/// their way. Returns the moment when the last header arrived.
pub(crate) fn run(
    inner: &mut Sockets,
    context: &OpContext,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<u64> {
    let is_connected = |half: &(usize, Region)| inner.wires.peers().any(|peer| peer == half.0);
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
        // SAFETY: headers and data outlive the operation, or the wires are cleared before they are dropped.
        unsafe { inner.wires.send(*peer, header.as_ptr(), HEADER_BYTES) };
        if let (OpKind::Send, Some((_, data))) = (kind, sending) {
            // SAFETY: as above.
            unsafe { inner.wires.send(*peer, data.base, data.len_bytes) };
        }
    }
    meanwhile()?;
    let mut present_ns = context.started_ns;
    // A peer may answer the two halves in either order.
    while let Some(&(peer, _)) = awaited.first() {
        let mut answer = [0u8; HEADER_BYTES];
        // SAFETY: the answer outlives the wait, or the wires are cleared before the answer is dropped.
        let ticket = unsafe { inner.wires.recv(peer, answer.as_mut_ptr(), HEADER_BYTES) };
        inner.wait(context, &[ticket])?;
        present_ns = now_ns();
        let (operation, theirs) = read_call(context, peer, &answer)?;
        let conflict =
            |ours| context.conflict(&context.conflict_with(peer, ours, operation, theirs));
        let is_answer =
            |(from, kind): &(usize, OpKind)| *from == peer && theirs.kind() == Some(*kind);
        let Some(at) = awaited.iter().position(is_answer) else {
            return Err(conflict(context.call.header()));
        };
        let (_, their_kind) = awaited.remove(at);
        let is_for = if their_kind == OpKind::Recv { OpKind::Send } else { OpKind::Recv };
        let ours = headers.iter().find(|(kind, ..)| *kind == is_for).map(|(_, _, call, _)| *call);
        let ours = ours.unwrap_or_default();
        let (sender, receiver) =
            if is_for == OpKind::Send { (&ours, &theirs) } else { (&theirs, &ours) };
        if !sender.fits(receiver) {
            return Err(conflict(ours));
        }
        if let (OpKind::Recv, Some((_, Region { base, len_bytes, .. }))) = (is_for, receiving) {
            // SAFETY: the caller holds the memory until the operation is over or the wires are cleared.
            let ticket = unsafe { inner.wires.recv(peer, base, len_bytes) };
            inner.wait(context, &[ticket])?;
        }
    }
    inner.wait_all(context)?;
    Ok(present_ns)
}
