//! How ranks show each other their calls over TCP: every rank sends every other rank a header.

use paceline_trace::now_ns;

use super::inner::Sockets;
use crate::Result;
use crate::context::OpContext;
use crate::header::{Header, decode_rows, encode_words, read_calls};
use crate::meet::{CallsOfAll, ShowCalls};

/// The connections to all other ranks, over which headers are exchanged.
pub(super) struct Headers<'a>(pub(super) &'a mut Sockets);

impl ShowCalls for Headers<'_> {
    fn show_call(&mut self, context: &OpContext) -> Result<CallsOfAll> {
        let own = Header::Call { operation: context.seq, call: context.call.header() }.encode();
        let peers: Vec<usize> = self.0.wires.peers().collect();
        let headers = swap(self.0, context, &peers, &own)?;
        let present_ns = now_ns();
        read_calls(context, &headers, present_ns)
    }

    fn show_blocks(&mut self, context: &OpContext, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let peers: Vec<usize> = self.0.wires.peers().collect();
        let rows = swap(self.0, context, &peers, &encode_words(own))?;
        Ok(decode_rows(&rows, own.len()))
    }
}

/// Sends the same message to each of `peers` and receives a message of the same length from each. The result
/// has room for the messages of all ranks, in rank order, this rank's own message included.
pub(crate) fn swap(
    inner: &mut Sockets,
    context: &OpContext,
    peers: &[usize],
    message: &[u8],
) -> Result<Vec<u8>> {
    let mut answers = vec![0u8; message.len() * context.world];
    answers[context.rank * message.len()..][..message.len()].copy_from_slice(message);
    for &peer in peers {
        let answer = &mut answers[peer * message.len()..][..message.len()];
        // SAFETY: both outlive the wait below. After an error the wires are cleared before they are dropped.
        unsafe {
            inner.wires.send(peer, message.as_ptr(), message.len());
            inner.wires.recv(peer, answer.as_mut_ptr(), answer.len());
        }
    }
    inner.wait_all(context)?;
    Ok(answers)
}
