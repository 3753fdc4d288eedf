//! The connections of a rank and its scratch memory, which every operation over TCP uses.
//!
//! This module does not know which operations exist.

use super::last_words::LastWords;
use super::wires::{Interruption, Ticket, Wires};
use crate::call::Region;
use crate::context::OpContext;
use crate::{CollectiveError, Result};

#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) wires: Wires,
    pub(crate) scratch: ScratchMemory,
}

/// Memory for data in transit, aligned for every element type.
#[derive(Debug, Default)]
pub(crate) struct ScratchMemory(Vec<[u64; 8]>);

impl ScratchMemory {
    /// Returns `len_bytes` bytes with arbitrary contents, valid until the next call.
    pub(crate) fn get(&mut self, len_bytes: usize) -> Region {
        let lines = len_bytes.div_ceil(64);
        if self.0.len() < lines {
            self.0.resize(lines, [0; 8]);
        }
        Region::at(self.0.as_mut_ptr().cast(), len_bytes)
    }
}

impl Sockets {
    /// Waits until all of these transfers are done. After a failure this rank can only give up.
    pub(crate) fn wait(&mut self, context: &OpContext, tickets: &[Ticket]) -> Result<()> {
        let outcome = self.wires.wait(tickets, context.policy);
        outcome.map_err(|why| self.fail(context, why))
    }

    /// Waits until all posted transfers are done. After a failure this rank can only give up.
    pub(crate) fn wait_all(&mut self, context: &OpContext) -> Result<()> {
        let outcome = self.wires.wait_all(context.policy);
        outcome.map_err(|why| self.fail(context, why))
    }

    /// Forgets all posted transfers. Returns the error for an interrupted operation.
    pub(crate) fn fail(&mut self, context: &OpContext, why: Interruption) -> CollectiveError {
        let error = match why {
            Interruption::TimedOut => context.timed_out(self.wires.awaited()),
            Interruption::Gone(peer, words) => match words {
                LastWords::Leaves => context.left(peer),
                LastWords::Lost(rank) => context.lost(rank),
                LastWords::Missing(ranks) => context.given_up(ranks),
                LastWords::Conflict { ranks, operations, calls } => {
                    context.conflicting(ranks, operations, calls)
                }
            },
        };
        self.wires.clear();
        error
    }

    /// Forgets all posted transfers after a failed operation, and sends all peers the reason why this rank gives up. Returns
    /// the error to report, and which of its ranks are alive.
    ///
    /// After a time-out, peers that have given up as well can be reached. Their last
    /// words say which ranks they have waited for: perhaps a rank from which this one already had all that it needed.
    pub(crate) fn give_up(
        &mut self,
        context: &OpContext,
        error: CollectiveError,
    ) -> (CollectiveError, Vec<usize>) {
        self.wires.give_up(&match error.clone() {
            // Every rank finds this by itself.
            CollectiveError::Counts { .. } => return (error, Vec::new()),
            CollectiveError::Mismatch { rank, peer, seq, peer_seq, ours, theirs } => {
                let (ranks, operations, calls) = ([rank, peer], [seq, peer_seq], [ours, theirs]);
                LastWords::Conflict { ranks, operations, calls }
            }
            CollectiveError::PeerLost { peer, .. } => LastWords::Lost(peer),
            error => match error.culprits() {
                // The fault is this rank's own.
                ranks if ranks.is_empty() => LastWords::Missing(vec![context.rank]),
                ranks => LastWords::Missing(ranks),
            },
        });
        let CollectiveError::TimedOut { rank, missing, op, seq, bytes, waited } = error else {
            return (error, Vec::new());
        };
        let heard = self.wires.hear(&missing);
        let alive: Vec<usize> = heard.iter().map(|(peer, _)| *peer).collect();
        let had_missing = !missing.is_empty();
        let mut named: Vec<usize> = missing;
        for (_, words) in &heard {
            match words {
                LastWords::Missing(ranks) => named.extend(ranks),
                LastWords::Lost(peer) => named.push(*peer),
                LastWords::Leaves | LastWords::Conflict { .. } => {}
            }
        }
        named.retain(|peer| *peer != context.rank && !alive.contains(peer));
        named.sort_unstable();
        named.dedup();
        let error = if had_missing && named.is_empty() {
            context.given_up(named)
        } else {
            CollectiveError::TimedOut { rank, missing: named, op, seq, bytes, waited }
        };
        (error, alive)
    }
}
