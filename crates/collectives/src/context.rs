//! The context in which an engine carries out one call, and the errors that the call can end with.
//!
//! Input: this rank, the call and how long to wait. Output: errors that name the operation. This module knows no transport.

use std::time::Duration;

use paceline_rendezvous::LONGEST_SLEEP;
use paceline_trace::awake;
use paceline_trace::now_ns;

use crate::CollectiveError;
use crate::call::{Call, CallHeader, Conflict, Disagreement};

/// How long to wait, and how long to keep the core busy before sleeping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitPolicy {
    pub(crate) spin: Duration,
    pub(crate) limit: Duration,
}

/// How long a wait has lasted, without the time for which this process was suspended: by Ctrl-Z, a frozen control
/// group, or a laptop that slept. While a whole run is suspended no rank can arrive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waited {
    last_ns: u64,
    total: Duration,
}

impl Waited {
    pub(crate) fn begin(now_ns: u64) -> Self {
        Self { last_ns: now_ns, total: Duration::ZERO }
    }

    /// How long the wait has lasted. The caller must call this at least every [`LONGEST_SLEEP`].
    pub(crate) fn until(&mut self, now_ns: u64) -> Duration {
        let gap = Duration::from_nanos(now_ns.saturating_sub(self.last_ns));
        self.last_ns = now_ns;
        self.total += awake(gap, LONGEST_SLEEP);
        self.total
    }
}

#[derive(Clone, Copy)]
pub(crate) struct OpContext<'a> {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// Added to a rank's number to get its number in the whole group. Zero, except for the part of an
    /// operation within one host of a hybrid group.
    pub(crate) first: usize,
    /// The numbers of the group's ranks in the outermost group; empty for the outermost group. Only texts use this field:
    /// engines handle errors with the group's own numbers, and `Core` translates them later.
    pub(crate) members: &'a [usize],
    pub(crate) call: &'a Call,
    /// The call that errors name. `call` is this call or a part of it.
    pub(crate) named: &'a Call,
    pub(crate) seq: u32,
    pub(crate) started_ns: u64,
    pub(crate) policy: WaitPolicy,
}

impl OpContext<'_> {
    fn waited(&self) -> Duration {
        Duration::from_nanos(now_ns() - self.started_ns)
    }

    pub(crate) fn lost(&self, peer: usize) -> CollectiveError {
        let (op, bytes) = (self.named.kind.name(), self.named.message_bytes());
        let (rank, peer) = (self.first + self.rank, self.first + peer);
        let (seq, waited) = (self.seq, self.waited());
        CollectiveError::PeerLost { rank, peer, op, seq, bytes, waited }
    }

    pub(crate) fn left(&self, peer: usize) -> CollectiveError {
        let (op, bytes) = (self.named.kind.name(), self.named.message_bytes());
        let (rank, peer) = (self.first + self.rank, self.first + peer);
        CollectiveError::PeerLeft { rank, peer, op, seq: self.seq, bytes }
    }

    pub(crate) fn timed_out(&self, mut missing: Vec<usize>) -> CollectiveError {
        missing.iter_mut().for_each(|rank| *rank += self.first);
        let (op, bytes) = (self.named.kind.name(), self.named.message_bytes());
        let (rank, seq, waited) = (self.first + self.rank, self.seq, self.waited());
        CollectiveError::TimedOut { rank, missing, op, seq, bytes, waited }
    }

    /// The error after a card has failed, or NCCL.
    pub(crate) fn on_card(&self, reason: String) -> CollectiveError {
        let (op, bytes) = (self.named.kind.name(), self.named.message_bytes());
        CollectiveError::Card { rank: self.first + self.rank, op, seq: self.seq, bytes, reason }
    }

    /// The error after another rank has timed out. `missing` are the ranks that have not arrived, as far as that rank can tell: it may
    /// have waited for this one, which is here and waits too.
    pub(crate) fn given_up(&self, mut missing: Vec<usize>) -> CollectiveError {
        missing.retain(|rank| *rank != self.rank);
        missing.iter_mut().for_each(|rank| *rank += self.first);
        let (op, seq) = (self.named.kind.name(), self.seq);
        let named = |rank: &usize| self.members.get(*rank).copied().unwrap_or(*rank);
        let names: Vec<usize> = missing.iter().map(named).collect();
        let cause = if missing.is_empty() {
            format!(
                "another rank stopped waiting in {op} #{seq}; its own error says for which ranks"
            )
        } else {
            format!(
                "another rank stopped waiting in {op} #{seq}, where ranks {names:?} are missing"
            )
        };
        CollectiveError::Broken { rank: self.first + self.rank, cause, culprits: missing }
    }

    /// This rank's call and operation `operation` of a peer, which do not match.
    pub(crate) fn conflict_with(
        &self,
        peer: usize,
        ours: CallHeader,
        operation: u32,
        theirs: CallHeader,
    ) -> Conflict {
        Conflict {
            ranks: [self.rank, peer],
            operations: [self.seq, operation],
            calls: [ours, theirs],
        }
    }

    pub(crate) fn conflict(&self, conflict: &Conflict) -> CollectiveError {
        let calls = conflict.calls.map(|call| call.describe());
        self.conflicting(conflict.ranks, conflict.operations, calls)
    }

    /// The error for two calls, in words, that do not match. This rank's own call comes first.
    pub(crate) fn conflicting(
        &self,
        ranks: [usize; 2],
        operations: [u32; 2],
        calls: [String; 2],
    ) -> CollectiveError {
        let own = usize::from(ranks[1] == self.rank);
        let [first, second] = calls;
        let (ours, theirs) = if own == 0 { (first, second) } else { (second, first) };
        CollectiveError::Mismatch {
            rank: self.first + ranks[own],
            peer: self.first + ranks[1 - own],
            seq: operations[own],
            peer_seq: operations[1 - own],
            ours,
            theirs,
        }
    }

    /// The error for collective calls that do not match. `called` gives each rank's call and its sequence number there.
    #[cold]
    pub(crate) fn disagreement(
        &self,
        found: Disagreement,
        called: impl Fn(usize) -> (CallHeader, u32),
    ) -> CollectiveError {
        match found {
            Disagreement::Calls(a, b) => {
                let ((call_a, seq_a), (call_b, seq_b)) = (called(a), called(b));
                self.conflict(&Conflict {
                    ranks: [a, b],
                    operations: [seq_a, seq_b],
                    calls: [call_a, call_b],
                })
            }
            Disagreement::Counts(reason) => {
                let (rank, seq, call) = (self.first + self.rank, self.seq, self.named.describe());
                CollectiveError::Counts { rank, call, seq, reason }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use paceline_memory::DType;

    use super::*;
    use crate::OpKind;

    /// Found by a schedule of `tests/cluster.rs`.
    #[test]
    fn a_rank_for_which_others_wait_does_not_blame_itself() {
        let call = Call::new(OpKind::Barrier, DType::U8);
        let (named, policy) = (&call, WaitPolicy { spin: Duration::ZERO, limit: Duration::ZERO });
        let (members, started_ns) = (&[][..], now_ns());
        let context = OpContext {
            rank: 1,
            world: 3,
            first: 0,
            members,
            call: &call,
            named,
            seq: 2,
            started_ns,
            policy,
        };
        assert_eq!(context.given_up(vec![0, 1]).culprits(), [0]);
        assert_eq!(context.given_up(vec![1]).culprits(), [0; 0]);
    }

    #[test]
    fn a_suspension_does_not_count_as_waiting() {
        const MS: u64 = 1_000_000;
        let mut waited = Waited::begin(5 * MS);
        assert_eq!(waited.until(105 * MS), Duration::from_millis(100));
        // A busy core.
        assert_eq!(waited.until(1005 * MS), Duration::from_millis(1000));
        // An hour in a closed laptop.
        let opened = (1005 + 3_600_000) * MS;
        assert_eq!(waited.until(opened), Duration::from_millis(1100));
        assert_eq!(waited.until(opened + 50 * MS), Duration::from_millis(1150));
        // The longest sleep, late by a tenth of a second, and one that was later.
        assert_eq!(waited.until(opened + 1150 * MS), Duration::from_millis(2250));
        assert_eq!(waited.until(opened + 2251 * MS), Duration::from_millis(2350));
    }
}
