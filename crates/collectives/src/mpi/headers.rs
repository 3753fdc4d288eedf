//! The headers at the start of every operation. Ranks that take part in the same operation send each other
//! their calls, in one stream of messages per pair. So every rank finds calls that do not match, and can name missing ranks.

use paceline_memory::DType;
use paceline_trace::now_ns;

use super::flight::{Comm, Tag, Transfers};
use super::inner::Buffers;
use crate::call::{CallHeader, Region};
use crate::context::OpContext;
use crate::header::{HEADER_BYTES, Header, decode_rows, encode_words, read_calls};
use crate::meet::{CallsOfAll, ShowCalls};
use crate::{CollectiveError, Result};

pub(super) struct Headers<'a> {
    pub(super) comm: &'a Comm,
    pub(super) inner: &'a mut Buffers,
}

impl ShowCalls for Headers<'_> {
    fn show_call(&mut self, context: &OpContext) -> Result<CallsOfAll> {
        let own = Header::Call { operation: context.seq, call: context.call.header() }.encode();
        let headers = swap(self.comm, self.inner, context, &own)?;
        read_calls(context, headers, now_ns())
    }

    fn show_blocks(&mut self, context: &OpContext, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let rows = swap(self.comm, self.inner, context, &encode_words(own))?;
        Ok(decode_rows(rows, own.len()))
    }
}

/// Sends the same message to every peer and receives one of the same length from each. Returns those of all ranks, in rank
/// order.
fn swap<'a>(
    comm: &Comm,
    inner: &'a mut Buffers,
    context: &OpContext,
    message: &[u8],
) -> Result<&'a [u8]> {
    let len = message.len();
    let out = inner.outgoing.get(len);
    let all = inner.incoming.get(len * context.world);
    let mut flight = Transfers::new();
    let own = all.part(context.rank * len..(context.rank + 1) * len);
    // SAFETY: both regions are as long as the message, and nobody else uses them.
    unsafe {
        std::ptr::copy_nonoverlapping(message.as_ptr(), out.base, len);
        std::ptr::copy_nonoverlapping(message.as_ptr(), own.base, len);
    }
    for peer in (0..context.world).filter(|&peer| peer != context.rank) {
        let answer = all.part(peer * len..(peer + 1) * len);
        // SAFETY: the memory belongs to the engine, which gives it up for good after an error.
        unsafe {
            comm.recv(context, &mut flight, (peer, Tag::Header), (answer, DType::U8))?;
            comm.send(context, &mut flight, (peer, Tag::Header), (out, DType::U8))?;
        }
    }
    comm.land(context, &mut flight)?;
    // SAFETY: all parts have been written, and the borrow of `inner` keeps them.
    Ok(unsafe { std::slice::from_raw_parts(all.base, len * context.world) })
}

/// The error for two point-to-point calls that do not match. This rank sends it to all others, which cannot see these calls,
/// even if they wait for something else.
pub(super) fn conflict(
    comm: &Comm,
    context: &OpContext,
    peer: usize,
    (ours, operation, theirs): (CallHeader, u32, CallHeader),
) -> CollectiveError {
    let conflict = context.conflict_with(peer, ours, operation, theirs);
    // Perhaps no rank ever receives the message, so its memory is leaked.
    let bytes = Box::leak(Box::new(Header::Conflict(conflict).encode()));
    let news = Region::at(bytes.as_mut_ptr(), HEADER_BYTES);
    let mut flight = Transfers::new();
    for other in (0..context.world).filter(|&other| other != context.rank) {
        // A rank that cannot be reached will time out.
        // SAFETY: the memory stays valid for good.
        let _ = unsafe { comm.send(context, &mut flight, (other, Tag::Header), (news, DType::U8)) };
    }
    context.conflict(&conflict)
}
