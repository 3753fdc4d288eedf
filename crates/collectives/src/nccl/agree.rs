//! Shows each rank the calls of the others, over the transport of the host.
//!
//! Input: a call on memory of a card. Output: the calls of all ranks that take part, which match.

use std::mem::ManuallyDrop;

use paceline_memory::DType;

use crate::call::{Call, CallHeader, Disagreement, Region};
use crate::context::OpContext;
use crate::engine::Engine;
use crate::meet::{AgreedCalls, CallsOfAll, ShowCalls, meet as agree_on_calls};
use crate::{OpKind, Result};

/// Words of a header.
const WORDS: usize = 4;

/// Waits for the other ranks of a call, and compares the calls. Between two ranks, the result has no list of calls.
pub(super) fn meet(context: &OpContext, engine: &Engine) -> Result<AgreedCalls> {
    match context.call.kind {
        OpKind::Send | OpKind::Recv | OpKind::SendRecv => pair(context, engine),
        _ => agree_on_calls(&mut OverHost(engine), context),
    }
}

fn words(header: &CallHeader) -> [u64; WORDS] {
    [header.signature, header.send_count, header.recv_count, header.overlap]
}

fn header(words: &[u64]) -> CallHeader {
    let [signature, send_count, recv_count, overlap] = *words else {
        unreachable!("a header has {WORDS} words")
    };
    CallHeader { signature, send_count, recv_count, overlap }
}

/// Words as memory of the host, which the caller gives up for good if the operation fails: a peer may still use it.
fn region(words: &mut ManuallyDrop<Vec<u64>>) -> Region {
    Region::at(words.as_mut_ptr().cast(), size_of_val(words.as_slice()))
}

/// The ranks of a group, over the transport of the host.
struct OverHost<'a>(&'a Engine);

impl ShowCalls for OverHost<'_> {
    fn show_call(&mut self, context: &OpContext) -> Result<CallsOfAll> {
        let (rows, present_ns) = self.gather(context, &words(&context.call.header()))?;
        let calls = rows.iter().map(|row| header(row)).collect();
        Ok(CallsOfAll { present_ns, calls, operations: vec![context.seq; context.world] })
    }

    fn show_blocks(&mut self, context: &OpContext, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        Ok(self.gather(context, own)?.0)
    }
}

impl OverHost<'_> {
    /// The words of all ranks, each as many as this rank's own, and the moment when the last rank had arrived.
    fn gather(&self, context: &OpContext, own: &[u64]) -> Result<(Vec<Vec<u64>>, u64)> {
        let start = context.rank * own.len();
        let mut all = ManuallyDrop::new(vec![0; context.world * own.len()]);
        all[start..start + own.len()].copy_from_slice(own);
        let recv = region(&mut all);
        let send = recv.part(8 * start..8 * (start + own.len()));
        let call = Call { send, recv, ..Call::new(OpKind::AllGather, DType::I64) };
        let present_ns = self.0.run(&OpContext { call: &call, ..*context })?;
        let all = ManuallyDrop::into_inner(all);
        Ok((all.chunks(own.len()).map(<[u64]>::to_vec).collect(), present_ns))
    }
}

/// Both ranks of a message show each other their calls, in the two directions one after the other.
fn pair(context: &OpContext, engine: &Engine) -> Result<AgreedCalls> {
    let own = context.call.header();
    let (to, from) = (context.call.sending(), context.call.receiving());
    let (to, from) = (to.map(|(rank, _)| rank), from.map(|(rank, _)| rank));
    let (there, _) = exchange(context, engine, (to, from), &own)?;
    let (back, present_ns) = exchange(context, engine, (from, to), &own)?;
    let differ = |verb: &str, other: usize, theirs: u64, ours: u64| {
        let reason = format!("rank {other} {verb} {theirs} elements, and this rank has {ours}");
        Err(context.disagreement(Disagreement::Counts(reason), |_| (own, context.seq)))
    };
    let sender = from.map(|rank| (rank, there));
    let receiver = to.map(|rank| (rank, back));
    for (rank, other) in [sender, receiver].into_iter().flatten() {
        if other.dtype_byte() != own.dtype_byte() {
            let calls = [own.describe(), other.describe()];
            return Err(context.conflicting([context.rank, rank], [context.seq; 2], calls));
        }
    }
    match (sender, receiver) {
        (Some((rank, other)), _) if other.send_count != own.recv_count => {
            differ("sends", rank, other.send_count, own.recv_count)
        }
        (_, Some((rank, other))) if other.recv_count != own.send_count => {
            differ("receives", rank, other.recv_count, own.send_count)
        }
        _ => Ok(AgreedCalls { present_ns, calls: Vec::new(), sent: Vec::new() }),
    }
}

/// Sends this rank's header to one rank and receives one from another, where there are any. Also returns the moment when
/// both had arrived.
fn exchange(
    context: &OpContext,
    engine: &Engine,
    (to, from): (Option<usize>, Option<usize>),
    own: &CallHeader,
) -> Result<(CallHeader, u64)> {
    let kind = match (to, from) {
        (Some(_), Some(_)) => OpKind::SendRecv,
        (Some(_), None) => OpKind::Send,
        _ => OpKind::Recv,
    };
    let mut both = ManuallyDrop::new([words(own), [0; WORDS]].concat());
    let half = |at: usize| at * 8 * WORDS..(at + 1) * 8 * WORDS;
    let memory = region(&mut both);
    let send = if to.is_some() { memory.part(half(0)) } else { Region::EMPTY };
    let recv = if from.is_some() { memory.part(half(1)) } else { Region::EMPTY };
    let root = to.or(from).unwrap_or_default();
    let from = from.unwrap_or_default();
    let call = Call { root, from, send, recv, ..Call::new(kind, DType::I64) };
    let present_ns = engine.run(&OpContext { call: &call, ..*context })?;
    Ok((header(&ManuallyDrop::into_inner(both)[WORDS..]), present_ns))
}
