//! The headers at the start of a collective operation.

use paceline_trace::now_ns;

use super::header::{HEADER_BYTES, Header};
use super::{Inner, explain};
use crate::CollectiveError;
use crate::call::{Disagreement, Published, Shares, Verdict, agree, blocks_agree};
use crate::core::Trip;

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
pub(super) fn meet(inner: &mut Inner, trip: &Trip) -> Result<Met, CollectiveError> {
    let own = trip.call.publish();
    let words = match &trip.call.blocks {
        Some(blocks) => blocks.send.iter().chain(&blocks.recv).copied().collect(),
        None => Vec::new(),
    };
    let mut message = Header::Call { operation: trip.seq, call: own }.encode().to_vec();
    message.extend(words.iter().flat_map(|word: &u64| word.to_le_bytes()));
    let peers: Vec<usize> = inner.mesh.peers().collect();
    let headers = swap(inner, trip, &peers, &message[..HEADER_BYTES])?;
    let present_ns = now_ns();
    let mut calls = vec![own; trip.world];
    let mut operations = vec![trip.seq; trip.world];
    for (peer, bytes) in headers.chunks_exact(HEADER_BYTES).enumerate() {
        if peer == trip.rank {
            continue;
        }
        (operations[peer], calls[peer]) = read(inner, trip, peer, bytes)?;
    }
    let mut sent = Vec::new();
    let mut outcome = agree(&calls);
    if outcome.is_ok() && !words.is_empty() {
        let rows = swap(inner, trip, &peers, &message[HEADER_BYTES..])?;
        let row_bytes = message.len() - HEADER_BYTES;
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let row = |rank: usize| -> Vec<u64> {
            if rank == trip.rank {
                return words.clone();
            }
            rows[rank * row_bytes..][..row_bytes].chunks_exact(8).map(word).collect()
        };
        let rows: Vec<Vec<u64>> = (0..trip.world).map(row).collect();
        let expected = |to: usize, from: usize| rows[to][trip.world + from];
        outcome = blocks_agree(trip.world, |from, to| rows[from][to], expected);
        sent = rows.iter().map(|row| row[..trip.world].to_vec()).collect();
    }
    match outcome {
        Ok(()) => Ok(Met { present_ns, calls, sent }),
        Err(found) => {
            if let Disagreement::Calls(a, b) = &found {
                // Whoever waits for this rank elsewhere learns why it does not come.
                let ranks = [*a, *b];
                let verdict = Verdict {
                    ranks,
                    operations: ranks.map(|rank| operations[rank]),
                    calls: ranks.map(|rank| calls[rank]),
                };
                inner.mesh.say_to_all(&Header::Conflict(verdict).encode());
            }
            Err(trip.disagreement(found, |rank| (calls[rank], operations[rank])))
        }
    }
}

/// What a peer called, or why there is no going on.
pub(crate) fn read(
    inner: &mut Inner,
    trip: &Trip,
    peer: usize,
    bytes: &[u8],
) -> Result<(u32, Published), CollectiveError> {
    let bytes = bytes.try_into().expect("a header's bytes");
    match Header::decode(bytes) {
        Some(Header::Call { operation, call }) => Ok((operation, call)),
        Some(Header::Leaves) => Err(trip.left(peer)),
        Some(Header::Conflict(verdict)) => {
            inner.mesh.say_to_all(bytes);
            Err(trip.conflict(&verdict))
        }
        // Only a peer whose memory is broken sends this: no stranger has come this far.
        None => Err(trip.lost(peer)),
    }
}

/// Sends the same message to each of `peers` and receives one as long of each; the answer has room
/// for all ranks, in order.
pub(crate) fn swap(
    inner: &mut Inner,
    trip: &Trip,
    peers: &[usize],
    message: &[u8],
) -> Result<Vec<u8>, CollectiveError> {
    let mut answers = vec![0u8; message.len() * trip.world];
    for &peer in peers {
        let answer = &mut answers[peer * message.len()..][..message.len()];
        // SAFETY: both outlive the wait below; after an error the mesh is cleared before they go,
        // as the callers' caller does.
        unsafe {
            inner.mesh.send(peer, message.as_ptr(), message.len());
            inner.mesh.recv(peer, answer.as_mut_ptr(), answer.len());
        }
    }
    if let Err(why) = inner.mesh.wait_all(trip.patience) {
        let error = explain(&inner.mesh, trip, why);
        inner.mesh.clear();
        return Err(error);
    }
    Ok(answers)
}
