//! The headers at the start of every operation: each pair of ranks that has to do with each other
//! tells what it calls, in one stream of messages, so that calls that do not fit together are found
//! and ranks that do not come are known by name.

use paceline_memory::DType;
use paceline_trace::now_ns;

use super::Inner;
use super::flight::{Comm, Flight, Tag};
use crate::CollectiveError;
use crate::call::{Published, Region, Shares, Verdict, agree, blocks_agree};
use crate::core::Trip;
use crate::tcp::Header;
use crate::tcp::header::HEADER_BYTES;

/// What a rank knows once all have met.
pub(super) struct Met {
    pub(super) present_ns: u64,
    pub(super) calls: Vec<Published>,
    /// For an all-to-all: elements that each rank sends to each.
    pub(super) sent: Vec<Vec<u64>>,
}

impl Met {
    /// Which elements belong to which rank.
    pub(super) fn shares(&self) -> Shares {
        let kind = self.calls[0].kind().expect("calls that agree are of a known kind");
        Shares::new(kind, &self.calls)
    }
}

/// Shows every rank what this one calls, waits until all others have done so, and compares.
pub(super) fn meet(comm: &Comm, inner: &mut Inner, trip: &Trip) -> Result<Met, CollectiveError> {
    let own = trip.call.publish();
    let header = Header::Call { operation: trip.seq, call: own }.encode();
    let headers = swap(comm, inner, trip, &header)?;
    let present_ns = now_ns();
    let mut calls = vec![own; trip.world];
    let mut operations = vec![trip.seq; trip.world];
    for (peer, bytes) in headers.chunks_exact(HEADER_BYTES).enumerate() {
        if peer != trip.rank {
            (operations[peer], calls[peer]) = read(trip, peer, bytes)?;
        }
    }
    let disagree = |found| trip.disagreement(found, |rank| (calls[rank], operations[rank]));
    agree(&calls).map_err(disagree)?;
    let mut sent = Vec::new();
    if let Some(blocks) = &trip.call.blocks {
        let words = blocks.send.iter().chain(&blocks.recv);
        let row: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
        let bytes = swap(comm, inner, trip, &row)?;
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let words: Vec<u64> = bytes.chunks_exact(8).map(word).collect();
        let rows: Vec<&[u64]> = words.chunks_exact(2 * trip.world).collect();
        let expected = |to: usize, from: usize| rows[to][trip.world + from];
        blocks_agree(trip.world, |from, to| rows[from][to], expected).map_err(disagree)?;
        sent = rows.iter().map(|row| row[..trip.world].to_vec()).collect();
    }
    Ok(Met { present_ns, calls, sent })
}

/// What a peer called, or why there is no going on.
pub(super) fn read(
    trip: &Trip,
    peer: usize,
    bytes: &[u8],
) -> Result<(u32, Published), CollectiveError> {
    match Header::decode(bytes.try_into().expect("a header's bytes")) {
        Some(Header::Call { operation, call }) => Ok((operation, call)),
        Some(Header::Leaves) => Err(trip.left(peer)),
        Some(Header::Conflict(verdict)) => Err(trip.conflict(&verdict)),
        // Only a peer whose memory is broken sends this.
        None => Err(trip.lost(peer)),
    }
}

/// Sends the same message to every peer and receives one as long of each: all ranks' messages, in
/// rank order.
fn swap<'a>(
    comm: &Comm,
    inner: &'a mut Inner,
    trip: &Trip,
    message: &[u8],
) -> Result<&'a [u8], CollectiveError> {
    let len = message.len();
    let out = inner.outgoing.get(len);
    let all = inner.incoming.get(len * trip.world);
    let mut flight = Flight::new();
    let own = all.part(trip.rank * len..(trip.rank + 1) * len);
    // SAFETY: both regions are as long, and nobody else's.
    unsafe {
        std::ptr::copy_nonoverlapping(message.as_ptr(), out.base, len);
        std::ptr::copy_nonoverlapping(message.as_ptr(), own.base, len);
    }
    for peer in (0..trip.world).filter(|&peer| peer != trip.rank) {
        let answer = all.part(peer * len..(peer + 1) * len);
        // SAFETY: the memory belongs to the engine, which gives it up for good after an error.
        unsafe {
            comm.recv(trip, &mut flight, (peer, Tag::Header), (answer, DType::U8))?;
            comm.send(trip, &mut flight, (peer, Tag::Header), (out, DType::U8))?;
        }
    }
    comm.land(trip, &mut flight)?;
    // SAFETY: all parts have been written, and the borrow of `inner` keeps them.
    Ok(unsafe { std::slice::from_raw_parts(all.base, len * trip.world) })
}

/// The error for two calls that do not fit together, where not all ranks can see both: this rank's
/// was for one other rank only. So it tells all, whatever they are waiting for.
pub(super) fn conflict(
    comm: &Comm,
    trip: &Trip,
    peer: usize,
    (ours, operation, theirs): (Published, u32, Published),
) -> CollectiveError {
    let verdict = Verdict {
        ranks: [trip.rank, peer],
        operations: [trip.seq, operation],
        calls: [ours, theirs],
    };
    // Nobody may ever receive it, so its memory stays for good.
    let bytes = Box::leak(Box::new(Header::Conflict(verdict).encode()));
    let news = Region { base: bytes.as_mut_ptr(), len_bytes: HEADER_BYTES, is_claimed: true };
    let mut flight = Flight::new();
    for other in (0..trip.world).filter(|&other| other != trip.rank) {
        // SAFETY: the memory stays for good. Who cannot be told will time out.
        let _ = unsafe { comm.send(trip, &mut flight, (other, Tag::Header), (news, DType::U8)) };
    }
    trip.conflict(&verdict)
}
