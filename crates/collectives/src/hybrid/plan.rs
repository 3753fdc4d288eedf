//! How a reduction over hosts is divided: which rank completes which piece of the result, and which partial
//! sums the hosts send each other for it.
//!
//! The message is divided into a slice for each rail, and each slice into a piece for each rank of the rail, its *owner*.
//! In a reduce-scatter, the piece is the rank's share. If a slice is short, messages cost more than
//! bytes, so one rank of the rail owns the whole slice: it gets `h-1` partial sums and sends `h-1` results.
//!
//! Each host combines the data of its own ranks, and sends the owner of a
//! piece one partial sum for each *node* that the host's ranks have in the tree ([`paceline_numeric::tree`]): one node if
//! the number `k` of ranks per host is a power of two, at most `2 log2(k)` otherwise.
//! Every node after the first adds as many bytes as the first.
//!
//! Input: the call, and where ranks are. Output: ranges of elements and ranks. This module moves nothing.

use std::cmp::Ordering;
use std::ops::Range;

use paceline_numeric::tree;

use super::state::Hybrid;
use crate::OpKind;
use crate::call::{Call, Shares};
use crate::meet::AgreedCalls;

/// Bytes for incoming blocks. If there are so many nodes that blocks would be too short, more bytes are used.
const ROOM_BYTES: usize = 1 << 20;

/// The most bytes that the owner of a whole slice may receive.
const WHOLE_SLICE_BYTES: u64 = 512 << 10;

/// Whether one rank owns the whole slice of a rail. `slice_bytes` counts partial sums.
pub(crate) fn is_slice_whole(num_hosts: usize, slice_bytes: u64) -> bool {
    slice_bytes.saturating_mul(num_hosts as u64 - 1) <= WHOLE_SLICE_BYTES
}

/// The number of blocks whose receives are posted at a time.
pub(super) const AHEAD: usize = 2;

/// The division of one call.
pub(super) struct PiecePlan {
    num_hosts: usize,
    /// The elements that each rank owns, host by host.
    pieces: Vec<Range<usize>>,
    /// The nodes that the ranks of each host have.
    pub(super) nodes: Vec<Vec<Range<usize>>>,
    /// The merges after each node, host by host.
    pub(super) merges: Vec<u8>,
    /// The hosts whose pieces the ranks of a host work on in one round: all of them if the pieces
    /// of a rail follow each other, otherwise one at a time.
    pub(super) passes: Vec<Range<usize>>,
    pub(super) block_elems: usize,
}

impl PiecePlan {
    /// In a reduce-scatter a rank owns its share. Otherwise the message is divided into even slices, one for each rail, and
    /// each slice into even pieces, one for each host. A short slice is a single
    /// piece, and the rails choose different hosts as its owner in turn.
    pub(super) fn new(
        hybrid: &Hybrid,
        call: &Call,
        met: &AgreedCalls,
        running_size: usize,
    ) -> Self {
        let (num_hosts, local, node) = (hybrid.num_hosts(), hybrid.local.world, hybrid.node());
        let world = num_hosts * local;
        let (pieces, passes) = if call.kind == OpKind::ReduceScatter {
            let shares = Shares::of(met.calls.iter().map(|call| call.recv_count));
            // Hosts begin with different pieces, so that they do not all send to one. A host's own piece, for which no other host
            // waits, comes last.
            let passes = (1..=num_hosts).map(|step| (node + step) % num_hosts);
            (
                (0..world).map(|rank| shares.elements(rank)).collect(),
                passes.map(|host| host..host + 1).collect(),
            )
        } else {
            let slices = Shares::even(met.calls[0].send_count, local);
            let piece = |rank: usize| {
                let (host, rail) = (rank / local, rank % local);
                let slice = slices.elements(rail);
                if is_slice_whole(num_hosts, (slice.len() * running_size) as u64) {
                    return match host.cmp(&(rail % num_hosts)) {
                        Ordering::Less => slice.start..slice.start,
                        Ordering::Equal => slice,
                        Ordering::Greater => slice.end..slice.end,
                    };
                }
                let piece = Shares::even(slice.len() as u64, num_hosts).elements(host);
                slice.start + piece.start..slice.start + piece.end
            };
            ((0..world).map(piece).collect(), std::iter::once(0..num_hosts).collect())
        };
        let of_host = |host| tree::nodes(world, host * local..(host + 1) * local);
        let nodes: Vec<Vec<Range<usize>>> = (0..num_hosts).map(of_host).collect();
        let merges = tree::merges(world, &nodes.concat());
        let block_bytes = (ROOM_BYTES / (AHEAD * merges.len())).clamp(16 << 10, 256 << 10);
        let block_elems = block_bytes / 64 * 64 / running_size;
        Self { num_hosts, pieces, nodes, merges, passes, block_elems }
    }

    pub(super) fn piece(&self, host: usize, rail: usize) -> Range<usize> {
        let local = self.pieces.len() / self.num_hosts;
        self.pieces[host * local + rail].clone()
    }

    /// The pieces of these hosts on a rail, which follow each other.
    pub(super) fn span(&self, hosts: &Range<usize>, rail: usize) -> Range<usize> {
        self.piece(hosts.start, rail).start..self.piece(hosts.end - 1, rail).end
    }

    pub(super) fn slice(&self, rail: usize) -> Range<usize> {
        self.span(&(0..self.num_hosts), rail)
    }

    pub(super) fn num_blocks(&self, piece: &Range<usize>) -> usize {
        piece.len().div_ceil(self.block_elems)
    }

    /// The elements of a block of a piece, empty if the piece ends before the block.
    pub(super) fn block(&self, piece: &Range<usize>, index: usize) -> Range<usize> {
        let at = |index: usize| piece.end.min(piece.start + index * self.block_elems);
        at(index)..at(index + 1)
    }

    pub(super) fn first_node(&self, host: usize) -> usize {
        self.nodes[..host].iter().map(Vec::len).sum()
    }
}
