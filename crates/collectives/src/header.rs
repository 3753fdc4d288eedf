//! The header that ranks send each other at the start of every operation, and when
//! they leave the group, over every transport except shared memory.

use crate::Result;
use crate::call::{CallHeader, Conflict, MAX_RANKS};
use crate::context::OpContext;
use crate::meet::CallsOfAll;

/// Words of a header; on the wire each has eight bytes, little-endian.
const WORDS: usize = 11;

/// Bytes of a header.
pub const HEADER_BYTES: usize = WORDS * 8;

const MAGIC: u64 = u32::from_le_bytes(*b"pace") as u64;

const CALL: u64 = 1;
const LEAVES: u64 = 2;
const CONFLICT: u64 = 3;

/// The contents of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Header {
    /// This rank has begun an operation.
    Call { operation: u32, call: CallHeader },
    /// This rank leaves the group in order.
    Leaves,
    /// Two calls do not match, so this rank has given up.
    Conflict(Conflict),
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut words = [0u64; WORDS];
        let call_words =
            |call: &CallHeader| [call.signature, call.send_count, call.recv_count, call.overlap];
        let tag = match self {
            Header::Call { operation, call } => {
                words[2] = u64::from(*operation);
                words[3..7].copy_from_slice(&call_words(call));
                CALL
            }
            Header::Leaves => LEAVES,
            Header::Conflict(conflict) => {
                words[1] = conflict.ranks[0] as u64 | (conflict.ranks[1] as u64) << 32;
                words[2] =
                    u64::from(conflict.operations[0]) | u64::from(conflict.operations[1]) << 32;
                words[3..7].copy_from_slice(&call_words(&conflict.calls[0]));
                words[7..11].copy_from_slice(&call_words(&conflict.calls[1]));
                CONFLICT
            }
        };
        words[0] = MAGIC | tag << 32;
        let mut bytes = [0; HEADER_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a header. `None` if the bytes are not a header.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let mut words = [0u64; WORDS];
        for (word, from) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(from.try_into().ok()?);
        }
        let call = |at: usize| CallHeader {
            signature: words[at],
            send_count: words[at + 1],
            recv_count: words[at + 2],
            overlap: words[at + 3],
        };
        if words[0] as u32 != MAGIC as u32 {
            return None;
        }
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        match words[0] >> 32 {
            CALL => Some(Header::Call { operation: words[2] as u32, call: call(3) }),
            LEAVES => Some(Header::Leaves),
            CONFLICT => Some(Header::Conflict(Conflict {
                ranks: halves(words[1]).map(|rank| rank as usize),
                operations: halves(words[2]),
                calls: [call(3), call(7)],
            })),
            _ => None,
        }
    }
}

/// Reads a peer's header: the sequence number of its call, and the call. Errors if the operation cannot go on.
pub(crate) fn read_call(
    context: &OpContext,
    peer: usize,
    bytes: &[u8],
) -> Result<(u32, CallHeader)> {
    match Header::decode(bytes.try_into().expect("a header's bytes")) {
        Some(Header::Call { operation, call }) => Ok((operation, call)),
        Some(Header::Leaves) => Err(context.left(peer)),
        Some(Header::Conflict(conflict)) if conflict.ranks.iter().all(|rank| *rank < MAX_RANKS) => {
            Err(context.conflict(&conflict))
        }
        // Strangers are refused when ranks connect, so only a peer with corrupted memory can send this.
        Some(Header::Conflict(_)) | None => Err(context.lost(peer)),
    }
}

/// Reads the headers of all ranks, in rank order, this rank's own included.
pub(crate) fn read_calls(
    context: &OpContext,
    headers: &[u8],
    present_ns: u64,
) -> Result<CallsOfAll> {
    let (mut calls, mut operations) = (Vec::new(), Vec::new());
    for (peer, bytes) in headers.chunks_exact(HEADER_BYTES).enumerate() {
        let (operation, call) = read_call(context, peer, bytes)?;
        calls.push(call);
        operations.push(operation);
    }
    Ok(CallsOfAll { present_ns, calls, operations })
}

/// Words as they are sent: eight bytes each, little-endian.
pub(crate) fn encode_words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Decodes rows of `row_words` words each, which were sent one after the other.
pub(crate) fn decode_rows(bytes: &[u8], row_words: usize) -> Vec<Vec<u64>> {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let row = |row: &[u8]| row.chunks_exact(8).map(word).collect();
    bytes.chunks_exact(8 * row_words).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_wire() {
        let call =
            |n| CallHeader { signature: n, send_count: n + 1, recv_count: n + 2, overlap: n };
        let conflict =
            Conflict { ranks: [3, 61], operations: [7, 8], calls: [call(1), call(1 << 40)] };
        for header in [
            Header::Call { operation: u32::MAX, call: call(9) },
            Header::Leaves,
            Header::Conflict(conflict),
        ] {
            assert_eq!(Header::decode(&header.encode()), Some(header));
        }
        assert_eq!(Header::decode(&[0; HEADER_BYTES]), None);
    }
}
