//! A rank's call of an operation, the header that shows it to the other ranks, and the check that all calls match.
//!
//! Every transport shows each rank the calls of all others before it moves a byte, so all ranks
//! find a mismatch at once, and the error names it. This module knows nothing of how bytes move.

use std::ops::Range;

use paceline_memory::{Access, Claim, DType, Tensor};

use crate::record::{OpRecord, OpTimes, Purpose};
use crate::{OpKind, ReduceOp, Result};

/// The most ranks that a group can have.
pub const MAX_RANKS: usize = 1024;

/// A range of this rank's memory. A peer may still work on it after a failure. So the range is claimed until the
/// operation has succeeded, or belongs to an engine or to nobody after a failure, or no peer reaches it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) base: *mut u8,
    pub(crate) len_bytes: usize,
    /// Whether it is memory of a card, whose addresses the host does not follow.
    pub(crate) is_on_card: bool,
}

// SAFETY: only the thread that executes the operation uses a region, one thread at a time, and the memory is valid until the
// operation ends.
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) const EMPTY: Region =
        Region { base: std::ptr::null_mut(), len_bytes: 0, is_on_card: false };

    /// The bytes at an address of the host.
    pub(crate) fn at(base: *mut u8, len_bytes: usize) -> Self {
        Region { base, len_bytes, is_on_card: false }
    }

    /// The bytes of a claim.
    pub(crate) fn of(claim: &Claim) -> Self {
        Self::at(claim.base().as_ptr(), claim.len_bytes())
    }

    /// The bytes of a tensor on a card, whose uses are queued in streams.
    pub(crate) fn on_card(tensor: &Tensor) -> Result<Self> {
        let start = tensor.byte_range().start;
        let claim = tensor.buffer().claim(start..start, Access::Read, "collective")?;
        Ok(Self { len_bytes: tensor.num_bytes(), is_on_card: true, ..Self::of(&claim) })
    }

    /// The bytes `range` of the region. Panics if it does not contain them.
    pub(crate) fn part(&self, range: Range<usize>) -> Region {
        assert!(range.start <= range.end && range.end <= self.len_bytes, "a part lies within");
        if range.is_empty() {
            return Region { len_bytes: 0, ..*self };
        }
        // SAFETY: the start lies within the region, as was just checked.
        let base = unsafe { self.base.add(range.start) };
        Region { base, len_bytes: range.len(), ..*self }
    }
}

/// One rank's call of an operation.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) kind: OpKind,
    pub(crate) dtype: DType,
    /// Used by reductions only.
    pub(crate) op: ReduceOp,
    /// The root, if the operation has one; the destination of a send, the source of a receive; the launch before which a barrier
    /// comes ([`crate::Group::agree_on_graph`]).
    pub(crate) root: usize,
    /// The source of the receiving half of a send-and-receive.
    pub(crate) from: usize,
    /// This rank's contribution.
    pub(crate) send: Region,
    /// Where this rank wants the result. May be `send` or a part of `send` if the operation allows this.
    pub(crate) recv: Region,
    /// Elements to and from each rank, for an all-to-all only.
    pub(crate) blocks: Option<Box<BlockCounts>>,
    pub(crate) purpose: Purpose,
}

/// How the data of an all-to-all are divided into blocks: the elements for and from each rank.
#[derive(Clone, Debug)]
pub(crate) struct BlockCounts {
    pub(crate) send: Vec<u64>,
    pub(crate) recv: Vec<u64>,
}

/// The part of a rank's call that every other rank sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallHeader {
    /// Operation, element type, reduction, kind of memory and root, packed.
    pub(crate) signature: u64,
    /// Elements that the rank sends.
    pub(crate) send_count: u64,
    /// Elements that the rank receives.
    pub(crate) recv_count: u64,
    /// 1 + the element of the larger region at which the smaller one begins, if they overlap.
    pub(crate) overlap: u64,
}

/// Two calls that do not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conflict {
    pub(crate) ranks: [usize; 2],
    pub(crate) operations: [u32; 2],
    pub(crate) calls: [CallHeader; 2],
}

/// Why the calls of the ranks do not match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Disagreement {
    /// These two ranks made different calls.
    Calls(usize, usize),
    /// The counts do not add up, in words.
    Counts(String),
}

impl Call {
    pub(crate) fn new(kind: OpKind, dtype: DType) -> Self {
        let (send, recv) = (Region::EMPTY, Region::EMPTY);
        let (op, blocks, purpose) = (ReduceOp::Sum, None, Purpose::Other);
        Self { kind, dtype, op, root: 0, from: 0, send, recv, blocks, purpose }
    }

    /// Whether the data are memory of a card.
    pub(crate) fn is_on_card(&self) -> bool {
        self.send.is_on_card || self.recv.is_on_card
    }

    /// The size of the message as benchmarks count it: the longer of the two sides.
    pub(crate) fn message_bytes(&self) -> usize {
        self.send.len_bytes.max(self.recv.len_bytes)
    }

    pub(crate) fn record(
        &self,
        (group, ranks): (u32, usize),
        seq: u32,
        times: OpTimes,
    ) -> OpRecord {
        OpRecord {
            kind: self.kind,
            group,
            seq,
            ranks,
            bytes: self.message_bytes(),
            dtype: self.dtype,
            op: self.op,
            send_bytes: self.send.len_bytes,
            recv_bytes: self.recv.len_bytes,
            purpose: self.purpose,
            times,
        }
    }

    pub(crate) fn sending(&self) -> Option<(usize, Region)> {
        matches!(self.kind, OpKind::Send | OpKind::SendRecv).then_some((self.root, self.send))
    }

    pub(crate) fn receiving(&self) -> Option<(usize, Region)> {
        match self.kind {
            OpKind::Recv => Some((self.root, self.recv)),
            OpKind::SendRecv => Some((self.from, self.recv)),
            _ => None,
        }
    }

    /// The distance in bytes between the starts of `send` and `recv` if they overlap.
    pub(crate) fn overlap(&self) -> Option<usize> {
        let (a, b) = (self.send.base as usize, self.recv.base as usize);
        let disjoint = a + self.send.len_bytes <= b || b + self.recv.len_bytes <= a;
        (!disjoint).then(|| a.abs_diff(b))
    }

    pub(crate) fn header(&self) -> CallHeader {
        let size = self.dtype.size_bytes();
        CallHeader {
            signature: self.signature(),
            send_count: (self.send.len_bytes / size) as u64,
            recv_count: (self.recv.len_bytes / size) as u64,
            overlap: self.overlap().map_or(0, |bytes| 1 + (bytes / size) as u64),
        }
    }

    fn signature(&self) -> u64 {
        let reduces = if self.kind.reduces() { self.op as u8 } else { 0 };
        let has_root = self.kind.has_root() || self.kind == OpKind::Barrier;
        let root = if has_root { self.root as u64 } else { 0 };
        u64::from(self.kind as u8)
            | u64::from(self.dtype as u8) << 8
            | u64::from(reduces) << 16
            | u64::from(self.is_on_card()) << 24
            | root << 32
    }

    pub(crate) fn describe(&self) -> String {
        self.header().describe()
    }
}

impl CallHeader {
    /// Whether a send with this header and a receive move the same elements.
    pub(crate) fn fits(&self, receive: &CallHeader) -> bool {
        self.dtype_byte() == receive.dtype_byte() && self.send_count == receive.recv_count
    }

    /// The element type, as a number.
    pub(crate) fn dtype_byte(&self) -> u8 {
        (self.signature >> 8) as u8
    }

    /// The operation, if the signature holds one.
    pub(crate) fn kind(&self) -> Option<OpKind> {
        OpKind::ALL.into_iter().find(|kind| *kind as u8 == self.signature as u8)
    }

    /// The call in words, such as `all_reduce(f32, 12, sum)`.
    pub(crate) fn describe(&self) -> String {
        let byte = |at: u32| (self.signature >> at) as u8;
        let dtype = DType::ALL.into_iter().find(|dtype| *dtype as u8 == byte(8));
        let op = ReduceOp::ALL.into_iter().find(|op| *op as u8 == byte(16));
        let (Some(kind), Some(dtype), Some(op)) = (self.kind(), dtype, op) else {
            return format!("an unknown operation ({:#x})", self.signature);
        };
        if kind == OpKind::Barrier {
            return match (self.signature >> 32).checked_sub(1) {
                None => "barrier()".into(),
                Some(of) => format!("barrier(before launch {} of graph {})", of % 4, of / 4),
            };
        }
        let (sent, received) = (self.send_count, self.recv_count);
        let mut text = match kind {
            OpKind::AllReduce => format!("{}({dtype}, {sent}", kind.name()),
            OpKind::Send => format!("send({dtype}, {sent}"),
            OpKind::Recv => format!("recv({dtype}, {received}"),
            OpKind::SendRecv => format!("send_recv({dtype}, {sent} and {received}"),
            OpKind::Broadcast => format!("broadcast({dtype}, {received}"),
            OpKind::Reduce => format!("reduce({dtype}, {sent}"),
            _ => format!("{}({dtype}, {sent} -> {received}", kind.name()),
        };
        if kind.reduces() {
            text.push_str(&format!(", {}", op.name()));
        }
        let rank = self.signature >> 32;
        match kind {
            OpKind::Send | OpKind::SendRecv => text.push_str(&format!(", to {rank}")),
            OpKind::Recv => text.push_str(&format!(", from {rank}")),
            kind if kind.has_root() => text.push_str(&format!(", root {rank}")),
            _ => {}
        }
        text.push(')');
        text
    }
}

/// Checks that the collective calls of all ranks match. Every rank passes the same list, so all ranks find the same
/// disagreement.
pub(crate) fn agree(calls: &[CallHeader]) -> Result<(), Disagreement> {
    let first = &calls[0];
    if let Some(other) = calls.iter().position(|call| call.signature != first.signature) {
        return Err(Disagreement::Calls(0, other));
    }
    let Some(kind) = first.kind() else { return Err(Disagreement::Calls(0, 0)) };
    let root = (first.signature >> 32) as usize;
    let same =
        |count: fn(&CallHeader) -> u64| match calls.iter().position(|c| count(c) != count(first)) {
            Some(other) => Err(Disagreement::Calls(0, other)),
            None => Ok(()),
        };
    let sum = |count: fn(&CallHeader) -> u64| calls.iter().map(count).try_fold(0, u64::checked_add);
    let (Some(sent), Some(received)) = (sum(|call| call.send_count), sum(|call| call.recv_count))
    else {
        // Only a peer with corrupted memory says this. Sums that wrap could look right.
        let reason = "all ranks together send or receive more elements than any memory has";
        return Err(Disagreement::Counts(reason.into()));
    };
    let adds_up = |verb: &str, sum: u64, rank: usize, has: u64| {
        if sum == has {
            return Ok(());
        }
        let (verb, other) =
            if verb == "send" { ("send", "receives") } else { ("receive", "sends") };
        let text =
            format!("all ranks together {verb} {sum} elements, but rank {rank} {other} {has}");
        Err(Disagreement::Counts(text))
    };
    match kind {
        OpKind::AllReduce | OpKind::Reduce => same(|call| call.send_count)?,
        OpKind::Broadcast => same(|call| call.recv_count)?,
        OpKind::AllGather => {
            same(|call| call.recv_count)?;
            adds_up("send", sent, 0, first.recv_count)?;
        }
        OpKind::ReduceScatter => {
            same(|call| call.send_count)?;
            adds_up("receive", received, 0, first.send_count)?;
        }
        OpKind::Gather => adds_up("send", sent, root, calls[root].recv_count)?,
        OpKind::Scatter => adds_up("receive", received, root, calls[root].send_count)?,
        OpKind::AllToAll | OpKind::Barrier | OpKind::Send | OpKind::Recv | OpKind::SendRecv => {}
    }
    // At any other offset than that of the rank's own share, peers would read memory that is being written.
    let shares = Shares::new(kind, calls);
    for (rank, call) in calls.iter().enumerate().filter(|(_, call)| call.overlap > 0) {
        let want = if kind.has_shares() { shares.start(rank) } else { 0 };
        if call.overlap - 1 != want {
            return Err(Disagreement::Counts(format!(
                "rank {rank} works in place at element {}, but its own part begins at {want}",
                call.overlap - 1
            )));
        }
    }
    Ok(())
}

/// Whether numbers add up to `whole`. False if the sum overflows.
pub(crate) fn add_up(parts: impl IntoIterator<Item = u64>, whole: u64) -> bool {
    parts.into_iter().try_fold(0, u64::checked_add) == Some(whole)
}

/// Whether these are the counts of blocks for `world` ranks that together have `elems` elements.
pub(crate) fn fill(counts: &[usize], world: usize, elems: usize) -> bool {
    counts.len() == world && add_up(counts.iter().map(|&count| count as u64), elems as u64)
}

/// Checks that the blocks of an all-to-all match: those of each rank add up to its data, and each rank sends every other
/// rank as many elements as that rank expects. `sent(from, to)` and `expected(to, from)` give the counts.
pub(crate) fn blocks_agree(
    calls: &[CallHeader],
    sent: impl Fn(usize, usize) -> u64,
    expected: impl Fn(usize, usize) -> u64,
) -> Result<(), Disagreement> {
    let world = calls.len();
    for (from, call) in calls.iter().enumerate() {
        let adds_up = |count: &dyn Fn(usize) -> u64, whole| add_up((0..world).map(count), whole);
        if !adds_up(&|to| sent(from, to), call.send_count)
            || !adds_up(&|to| expected(from, to), call.recv_count)
        {
            return Err(Disagreement::Counts(format!(
                "the blocks of rank {from} do not add up to the {} elements that it sends and the {} that it receives",
                call.send_count, call.recv_count
            )));
        }
        for to in 0..world {
            let (sent, expected) = (sent(from, to), expected(to, from));
            if sent != expected {
                return Err(Disagreement::Counts(format!(
                    "rank {from} sends {sent} elements to rank {to}, which expects {expected}"
                )));
            }
        }
    }
    Ok(())
}

/// Which elements of the whole belong to which rank, in rank order.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    /// `starts[rank]..starts[rank + 1]`, in elements.
    starts: Vec<u64>,
}

impl Shares {
    /// The shares of an operation in which each rank sends or receives its own part.
    pub(crate) fn new(kind: OpKind, calls: &[CallHeader]) -> Self {
        let own = |call: &CallHeader| match kind {
            OpKind::AllGather | OpKind::Gather => call.send_count,
            _ => call.recv_count,
        };
        Self::of(calls.iter().map(own))
    }

    /// Shares of these sizes.
    pub(crate) fn of(sizes: impl Iterator<Item = u64>) -> Self {
        let mut starts = vec![0];
        for size in sizes {
            starts.push(starts[starts.len() - 1] + size);
        }
        Self { starts }
    }

    /// `total` elements divided as evenly as possible: sizes differ by one at most.
    pub(crate) fn even(total: u64, world: usize) -> Self {
        let world = world as u64;
        Self { starts: (0..=world).map(|rank| total * rank / world).collect() }
    }

    fn start(&self, rank: usize) -> u64 {
        self.starts[rank]
    }

    pub(crate) fn elements(&self, rank: usize) -> Range<usize> {
        self.starts[rank] as usize..self.starts[rank + 1] as usize
    }

    pub(crate) fn bytes(&self, rank: usize, dtype: DType) -> Range<usize> {
        let (size, elements) = (dtype.size_bytes(), self.elements(rank));
        elements.start * size..elements.end * size
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{CollectiveError, Group};

    /// In a build without checks for overflow, both sums would wrap to what they should be.
    #[test]
    fn counts_whose_sum_wraps_are_refused_before_anything_moves() {
        assert!(fill(&[1, 2], 2, 3));
        assert!(!fill(&[usize::MAX, 4], 2, 3));
        assert!(!fill(&[3], 2, 3));
        let mut groups = Group::threads(2).into_iter();
        let (first, _second) = (groups.next().unwrap(), groups.next().unwrap());
        let (data, received) =
            (first.copy_of(&[1.0f32; 3]).unwrap(), first.copy_of(&[7.0f32; 3]).unwrap());
        let error = first.all_to_all_ragged(&data, &[usize::MAX, 4], &received, &[1, 2]);
        assert!(matches!(error, Err(CollectiveError::Buffers { .. })), "{error:?}");
        assert_eq!(*received.read::<f32>().unwrap(), [7.0; 3]);
    }

    /// Every rank sees the blocks of all, so all ranks fail together.
    #[test]
    fn blocks_that_do_not_add_up_to_the_call_are_a_disagreement() {
        let call =
            |count| CallHeader { send_count: count, recv_count: count, ..Default::default() };
        let calls = [call(3), call(3)];
        let check = |rows: [[u64; 2]; 2]| {
            blocks_agree(&calls, |from, to| rows[from][to], |to, from| rows[from][to])
        };
        assert_eq!(check([[1, 2], [2, 1]]), Ok(()));
        for rows in [[[u64::MAX, 4], [u64::MAX, 4]], [[1, 1], [2, 2]]] {
            let Err(Disagreement::Counts(reason)) = check(rows) else { panic!("{rows:?}") };
            assert!(reason.contains("do not add up to the 3 elements"), "{reason}");
        }
    }
}
