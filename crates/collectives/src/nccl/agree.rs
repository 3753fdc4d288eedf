//! Shows each rank the calls of the others, over the transport of the host.
//!
//! Input: a call on memory of a card. Output: the calls of all ranks that take part, which match.

use paceline_memory::DType;

use crate::call::{Call, CallHeader, Disagreement, Region, agree, blocks_agree};
use crate::context::OpContext;
use crate::engine::Engine;
use crate::{OpKind, Result};

/// What this rank knows once all have arrived.
pub(super) struct Met {
    /// When the last one had.
    pub(super) present_ns: u64,
    /// The calls of all ranks; empty between two.
    pub(super) calls: Vec<CallHeader>,
}

/// Words of a header.
const WORDS: usize = 4;

/// Waits for the other ranks of a call, and compares the calls.
pub(super) fn meet(context: &OpContext, engine: &Engine) -> Result<Met> {
    match context.call.kind {
        OpKind::Send | OpKind::Recv | OpKind::SendRecv => pair(context, engine),
        _ => all(context, engine),
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

/// Words as memory of the host that lives as long as the call.
fn region(words: &[u64]) -> Region {
    Region {
        base: words.as_ptr().cast_mut().cast(),
        len_bytes: size_of_val(words),
        is_claimed: false,
    }
}

fn all(context: &OpContext, engine: &Engine) -> Result<Met> {
    let mut own = words(&context.call.header()).to_vec();
    if let Some(blocks) = &context.call.blocks {
        own.extend(blocks.send.iter().chain(&blocks.recv));
    }
    let len = own.len();
    let mut gathered = vec![0; len * context.world];
    let send = region(&own);
    let recv = Region { base: gathered.as_mut_ptr().cast(), ..region(&gathered) };
    let call = Call { send, recv, ..Call::new(OpKind::AllGather, DType::I64) };
    let present_ns = engine.run(&OpContext { call: &call, ..*context })?;
    let calls: Vec<CallHeader> = gathered.chunks(len).map(|of| header(&of[..WORDS])).collect();
    let block = |rank: usize, index: usize| gathered[rank * len + WORDS + index];
    let agreed = agree(&calls).and_then(|()| match context.call.kind {
        OpKind::AllToAll => {
            let expected = |to: usize, from: usize| block(to, context.world + from);
            blocks_agree(&calls, block, expected)
        }
        _ => Ok(()),
    });
    agreed.map_err(|found| context.disagreement(found, |rank| (calls[rank], context.seq)))?;
    Ok(Met { present_ns, calls })
}

/// Both ranks of a message show each other their calls, in the two directions one after the other.
fn pair(context: &OpContext, engine: &Engine) -> Result<Met> {
    let own = context.call.header();
    let (to, from) = (context.call.sending(), context.call.receiving());
    let (to, from) = (to.map(|(rank, _)| rank), from.map(|(rank, _)| rank));
    let mut there = [0; WORDS];
    let mut back = [0; WORDS];
    exchange(context, engine, (to, from), &own, &mut there)?;
    let present_ns = exchange(context, engine, (from, to), &own, &mut back)?;
    let dtype = |signature: u64| (signature >> 8) as u8;
    let differ = |verb: &str, other: usize, theirs: u64, ours: u64| {
        let reason = format!("rank {other} {verb} {theirs} elements, and this rank has {ours}");
        Err(context.disagreement(Disagreement::Counts(reason), |_| (own, context.seq)))
    };
    let sender = from.map(|rank| (rank, header(&there)));
    let receiver = to.map(|rank| (rank, header(&back)));
    for (rank, other) in [sender, receiver].into_iter().flatten() {
        if dtype(other.signature) != dtype(own.signature) {
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
        _ => Ok(Met { present_ns, calls: Vec::new() }),
    }
}

/// Sends this rank's header to one rank and receives one from another, where there are any.
fn exchange(
    context: &OpContext,
    engine: &Engine,
    (to, from): (Option<usize>, Option<usize>),
    own: &CallHeader,
    other: &mut [u64; WORDS],
) -> Result<u64> {
    let kind = match (to, from) {
        (Some(_), Some(_)) => OpKind::SendRecv,
        (Some(_), None) => OpKind::Send,
        _ => OpKind::Recv,
    };
    let sent = words(own);
    let send = if to.is_some() { region(&sent) } else { Region::EMPTY };
    let recv = Region { base: other.as_mut_ptr().cast(), ..region(other) };
    let recv = if from.is_some() { recv } else { Region::EMPTY };
    let root = to.or(from).unwrap_or_default();
    let from = from.unwrap_or_default();
    let call = Call { root, from, send, recv, ..Call::new(kind, DType::I64) };
    engine.run(&OpContext { call: &call, ..*context })
}
