//! Checks of a rank that receives arbitrary headers from its peers.
//!
//! Input: the number of ranks in one byte, a header from each rank (this rank's own first), and for an all-to-all a row
//! of counts from each rank. Output: nothing if the ranks agree, otherwise the message of the error. After the ranks
//! have agreed, every byte that a transport would touch must lie within this rank's memory. `paceline-collectives`
//! includes this file with its feature `fuzzing`.

use std::time::Duration;

use paceline_memory::DType;
use paceline_trace::now_ns;

use crate::call::{BlockCounts, Call, CallHeader, Region, Shares};
use crate::context::{OpContext, WaitPolicy};
use crate::header::{HEADER_BYTES, Header, decode_rows, read_calls};
use crate::meet::{AgreedCalls, CallsOfAll, ShowCalls, meet};
use crate::{CollectiveError, MAX_RANKS, OpKind, ReduceOp, Result};

const MAX_WORLD: usize = 8;
/// The longest message of this rank, in elements.
const MAX_ELEMS: u64 = 4096;

/// Compares the call of this rank, rank 0, with the calls of its peers.
pub fn tcp_header(bytes: &[u8]) -> Result<(), String> {
    let (first, rest) = bytes.split_first().ok_or("no bytes came")?;
    for header in rest.chunks_exact(HEADER_BYTES) {
        survives_the_wire(header);
    }
    let world = 1 + usize::from(*first) % MAX_WORLD;
    let own = rest.first_chunk().and_then(Header::decode);
    let Some(Header::Call { operation, call }) = own else {
        return Err("the first header is no call of this rank".into());
    };
    let mut memory = [Vec::new(), Vec::new()];
    let mut own = own_call(&call, world, &mut memory).ok_or("a program cannot make this call")?;
    let mut peers = Peers { world, rest };
    if own.kind == OpKind::AllToAll {
        let row = rest.get(world * HEADER_BYTES..).and_then(|rows| rows.get(..16 * world));
        let row = decode_rows(row.ok_or("the row of this rank is missing")?, world);
        let [send, recv] = row.try_into().expect("two halves of a row");
        // A program's counts add up to the length of its memory, as the group checks before.
        let adds_up = |counts: &[u64], region: &Region| {
            let sum = counts.iter().try_fold(0u64, |sum, count| sum.checked_add(*count));
            sum.and_then(|sum| sum.checked_mul(own.dtype.size_bytes() as u64))
                == Some(region.len_bytes as u64)
        };
        if !adds_up(&send, &own.send) || !adds_up(&recv, &own.recv) {
            return Err("a program cannot make this call".into());
        }
        own.blocks = Some(Box::new(BlockCounts { send, recv }));
    }
    let policy = WaitPolicy { spin: Duration::ZERO, limit: Duration::ZERO };
    let context = OpContext {
        rank: 0,
        world,
        first: 0,
        members: &[],
        named: &own,
        call: &own,
        seq: operation,
        started_ns: now_ns(),
        policy,
    };
    match meet(&mut peers, &context) {
        Ok(met) => {
            touches_only_own_memory(&own, &met, world);
            Ok(())
        }
        Err(error) => {
            if let CollectiveError::Mismatch { rank, peer, .. } = error {
                assert!(rank < MAX_RANKS && peer < MAX_RANKS, "{error}");
            }
            let message = error.to_string();
            assert!(message.contains(' '), "a message is a sentence: {message}");
            Err(message)
        }
    }
}

/// A header is the same when it is written again.
fn survives_the_wire(bytes: &[u8]) {
    let Some(header) = Header::decode(bytes.try_into().expect("a header's bytes")) else {
        return;
    };
    assert_eq!(Header::decode(&header.encode()), Some(header));
    let calls = match header {
        Header::Call { call, .. } => vec![call],
        Header::Leaves => Vec::new(),
        Header::Conflict(conflict) => conflict.calls.to_vec(),
    };
    assert!(calls.iter().all(|call| !call.describe().is_empty()));
}

/// The call that has this header, if a program can make it. Its memory is kept in `memory`.
fn own_call(header: &CallHeader, world: usize, memory: &mut [Vec<u8>; 2]) -> Option<Call> {
    let byte = |at: u32| (header.signature >> at) as u8;
    let kind = header.kind()?;
    let dtype = DType::ALL.into_iter().find(|dtype| *dtype as u8 == byte(8))?;
    let op = ReduceOp::ALL.into_iter().find(|op| *op as u8 == byte(16))?;
    let root = (header.signature >> 32) as usize;
    if root >= world || header.send_count > MAX_ELEMS || header.recv_count > MAX_ELEMS {
        return None;
    }
    let size = dtype.size_bytes();
    let lens = [header.send_count, header.recv_count].map(|count| count as usize * size);
    let [mut send, mut recv] = [0, 1].map(|at| {
        memory[at].resize(lens[at], 0);
        Region::at(memory[at].as_mut_ptr(), lens[at])
    });
    if let Some(at) = header.overlap.checked_sub(1) {
        // The smaller region lies within the larger one.
        let begin = usize::try_from(at).ok()?.checked_mul(size)?;
        let (small, large) = if lens[0] < lens[1] { (&mut send, recv) } else { (&mut recv, send) };
        let end = begin.checked_add(small.len_bytes).filter(|end| *end <= large.len_bytes)?;
        *small = large.part(begin..end);
    }
    let call = Call { op, root, send, recv, ..Call::new(kind, dtype) };
    (call.header() == *header).then_some(call)
}

/// Peers whose headers and rows are those of the input.
struct Peers<'a> {
    world: usize,
    rest: &'a [u8],
}

impl Peers<'_> {
    fn take(&mut self, context: &OpContext, len: usize) -> Result<&[u8]> {
        let taken = self.rest.split_at_checked(len);
        let (taken, rest) = taken.ok_or_else(|| context.lost(context.world - 1))?;
        self.rest = rest;
        Ok(taken)
    }
}

impl ShowCalls for Peers<'_> {
    fn show_call(&mut self, context: &OpContext) -> Result<CallsOfAll> {
        let headers = self.take(context, self.world * HEADER_BYTES)?;
        read_calls(context, headers, now_ns())
    }

    fn show_blocks(&mut self, context: &OpContext, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let rows = self.take(context, self.world * own.len() * 8)?;
        Ok(decode_rows(rows, own.len()))
    }
}

/// Takes the parts of this rank's memory that the transports take.
fn touches_only_own_memory(call: &Call, met: &AgreedCalls, world: usize) {
    let is_root = call.root == 0;
    let shares = met.shares();
    // `part` panics if the bytes do not lie within the region.
    let touch = |region: Region, shares: &Shares, peer: usize| {
        let part = region.part(shares.bytes(peer, call.dtype));
        assert!(part.len_bytes <= region.len_bytes);
    };
    for peer in 0..world {
        match call.kind {
            OpKind::AllGather => touch(call.recv, &shares, peer),
            OpKind::ReduceScatter => touch(call.send, &shares, peer),
            OpKind::Gather if is_root => touch(call.recv, &shares, peer),
            OpKind::Scatter if is_root => touch(call.send, &shares, peer),
            OpKind::AllReduce | OpKind::Reduce => {
                touch(call.send, &Shares::even(call.header().send_count, world), peer);
            }
            OpKind::Broadcast => {
                touch(call.recv, &Shares::even(call.header().recv_count, world), peer);
            }
            OpKind::AllToAll => {
                touch(call.send, &Shares::of(met.sent[0].iter().copied()), peer);
                touch(call.recv, &Shares::of(met.sent.iter().map(|row| row[0])), peer);
            }
            _ => {}
        }
    }
    // The data that this rank contributes are as long as its share, because they are copied there.
    let own = shares.bytes(0, call.dtype).len();
    match call.kind {
        OpKind::AllGather | OpKind::Gather => assert_eq!(own, call.send.len_bytes),
        OpKind::ReduceScatter | OpKind::Scatter => assert_eq!(own, call.recv.len_bytes),
        _ => {}
    }
}
