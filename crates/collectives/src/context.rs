//! What an engine needs to know to carry out one call, and the errors that the call can end with.
//!
//! Input: this rank, the call and how long to wait. Output: errors that name the operation. This module
//! knows nothing of how any transport works.

use std::time::Duration;

use paceline_trace::now_ns;

use crate::CollectiveError;
use crate::call::{Call, CallHeader, Disagreement, Verdict};

/// How long to wait, and how long to keep the core busy before sleeping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitPolicy {
    pub(crate) spin: Duration,
    pub(crate) limit: Duration,
}

/// One execution of one call.
#[derive(Clone, Copy)]
pub(crate) struct OpContext<'a> {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// What to add to a rank's number to get its number in the whole group. Not zero only for the part of
    /// an operation that runs within a host of a hybrid group.
    pub(crate) first: usize,
    pub(crate) call: &'a Call,
    pub(crate) seq: u32,
    pub(crate) started_ns: u64,
    pub(crate) policy: WaitPolicy,
}

impl OpContext<'_> {
    fn waited(&self) -> Duration {
        Duration::from_nanos(now_ns() - self.started_ns)
    }

    pub(crate) fn lost(&self, peer: usize) -> CollectiveError {
        let (op, bytes) = (self.call.kind.name(), self.call.message_bytes());
        let (rank, peer) = (self.first + self.rank, self.first + peer);
        let (seq, waited) = (self.seq, self.waited());
        CollectiveError::PeerLost { rank, peer, op, seq, bytes, waited }
    }

    pub(crate) fn left(&self, peer: usize) -> CollectiveError {
        let (op, bytes) = (self.call.kind.name(), self.call.message_bytes());
        let (rank, peer) = (self.first + self.rank, self.first + peer);
        CollectiveError::PeerLeft { rank, peer, op, seq: self.seq, bytes }
    }

    pub(crate) fn timed_out(&self, mut missing: Vec<usize>) -> CollectiveError {
        missing.iter_mut().for_each(|rank| *rank += self.first);
        let (op, bytes) = (self.call.kind.name(), self.call.message_bytes());
        let (rank, seq, waited) = (self.first + self.rank, self.seq, self.waited());
        CollectiveError::TimedOut { rank, missing, op, seq, bytes, waited }
    }

    /// The error after another rank has timed out. `missing` are the ranks that have not arrived.
    pub(crate) fn given_up(&self, mut missing: Vec<usize>) -> CollectiveError {
        missing.iter_mut().for_each(|rank| *rank += self.first);
        let (op, seq) = (self.call.kind.name(), self.seq);
        let cause = format!(
            "another rank stopped waiting in {op} #{seq}, where ranks {missing:?} are missing"
        );
        CollectiveError::Broken { rank: self.first + self.rank, cause }
    }

    /// The error for two calls that do not match. If one of them is this rank's own, it comes first.
    pub(crate) fn conflict(&self, verdict: &Verdict) -> CollectiveError {
        let own = usize::from(verdict.ranks[1] == self.rank);
        CollectiveError::Mismatch {
            rank: self.first + verdict.ranks[own],
            peer: self.first + verdict.ranks[1 - own],
            seq: verdict.operations[own],
            peer_seq: verdict.operations[1 - own],
            ours: verdict.calls[own].describe(),
            theirs: verdict.calls[1 - own].describe(),
        }
    }

    /// The error for collective calls that do not match. `called` gives each rank's call and the call's
    /// sequence number on that rank.
    pub(crate) fn disagreement(
        &self,
        found: Disagreement,
        called: impl Fn(usize) -> (CallHeader, u32),
    ) -> CollectiveError {
        match found {
            Disagreement::Calls(a, b) => {
                let ((call_a, seq_a), (call_b, seq_b)) = (called(a), called(b));
                self.conflict(&Verdict {
                    ranks: [a, b],
                    operations: [seq_a, seq_b],
                    calls: [call_a, call_b],
                })
            }
            Disagreement::Counts(reason) => {
                let (rank, seq, call) = (self.first + self.rank, self.seq, self.call.describe());
                CollectiveError::Counts { rank, call, seq, reason }
            }
        }
    }
}
