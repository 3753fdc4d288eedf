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
    /// After a wait in vain, of this rank or of another one, peers that have given up as well can be reached. Their last
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
            CollectiveError::Broken { culprits, .. } => LastWords::Missing(culprits),
            error => match error.culprits() {
                // The fault is this rank's own.
                ranks if ranks.is_empty() => LastWords::Missing(vec![context.rank]),
                ranks => LastWords::Missing(ranks),
            },
        });
        match error {
            CollectiveError::TimedOut { rank, missing, op, seq, bytes, waited } => {
                let had_missing = !missing.is_empty();
                let (missing, alive) = self.ask(context, missing);
                let error = if had_missing && missing.is_empty() {
                    context.given_up(missing)
                } else {
                    CollectiveError::TimedOut { rank, missing, op, seq, bytes, waited }
                };
                (error, alive)
            }
            CollectiveError::Broken { culprits, .. } => {
                let (missing, alive) = self.ask(context, culprits);
                (context.given_up(missing), alive)
            }
            error => (error, Vec::new()),
        }
    }

    /// Asks the ranks that others miss, and then those that these miss. Returns the ranks that are missing, and those that are
    /// alive: each rank that has given up because of others.
    fn ask(&self, context: &OpContext, mut missing: Vec<usize>) -> (Vec<usize>, Vec<usize>) {
        let (mut asked, mut alive) = (vec![context.rank], vec![context.rank]);
        loop {
            missing.sort_unstable();
            missing.dedup();
            let next: Vec<usize> =
                missing.iter().copied().filter(|rank| !asked.contains(rank)).collect();
            if next.is_empty() {
                break;
            }
            for (peer, words) in self.wires.hear(&next) {
                let because_of = match words {
                    LastWords::Missing(ranks) => ranks,
                    LastWords::Lost(rank) => vec![rank],
                    // Nobody else keeps it from coming.
                    LastWords::Leaves => vec![peer],
                    LastWords::Conflict { .. } => Vec::new(),
                };
                if !because_of.contains(&peer) {
                    alive.push(peer);
                }
                missing.extend(because_of);
            }
            asked.extend(next);
        }
        missing.retain(|rank| !alive.contains(rank));
        (missing, alive)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use paceline_memory::DType;
    use paceline_trace::now_ns;

    use super::*;
    use crate::OpKind;
    use crate::call::Call;
    use crate::context::WaitPolicy;

    fn pair() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [one, listener.accept().unwrap().0]
    }

    /// The ranks that rank 0 of 4 names when it has waited for rank 1 in vain, or has heard that another rank has. Each of the others
    /// has said its last words, or is silent.
    fn named(words: [Option<LastWords>; 3], has_waited: bool) -> Vec<usize> {
        let [data, last] = [0; 2].map(|_| [0; 3].map(|_| pair()));
        let own = |at: usize| [&data, &last].map(|of| of[at][0].try_clone().unwrap());
        let streams = [None].into_iter().chain((0..3).map(|at| Some(own(at))));
        let wires = Wires::new(streams.collect()).unwrap();
        for (words, [_, theirs]) in words.iter().zip(&last) {
            words.iter().for_each(|words| words.say_to(theirs));
        }
        let call = Call::new(OpKind::Barrier, DType::U8);
        let policy = WaitPolicy { spin: Duration::ZERO, limit: Duration::ZERO };
        let (named, started_ns, members) = (&call, now_ns(), &[][..]);
        let (rank, world, first, seq) = (0, 4, 0, 2);
        let context =
            OpContext { rank, world, first, members, call: &call, named, seq, started_ns, policy };
        let missing = vec![1];
        let error = if has_waited { context.timed_out(missing) } else { context.given_up(missing) };
        let mut sockets = Sockets { wires, scratch: ScratchMemory::default() };
        sockets.give_up(&context, error).0.culprits()
    }

    /// Found by schedules 143 and 185 of `crates/checkpoint/tests/cluster.rs`: a host was cut off for as long as an operation may take.
    #[test]
    fn a_rank_that_has_given_up_because_of_others_is_not_missing() {
        let missing = |ranks: &[usize]| Some(LastWords::Missing(ranks.to_vec()));
        for has_waited in [true, false] {
            assert_eq!(named([None, None, None], has_waited), [1], "it is silent");
            let everybody = [missing(&[0, 2]), missing(&[1]), None];
            assert_eq!(named(everybody, has_waited), [0; 0], "all have given up");
            let chain = [missing(&[2]), missing(&[3]), None];
            assert_eq!(named(chain, has_waited), [3], "the end of a chain is silent");
            let own_fault = [missing(&[2]), missing(&[2]), None];
            assert_eq!(named(own_fault, has_waited), [2], "it says that it has failed");
            let left = [missing(&[2]), Some(LastWords::Leaves), None];
            assert_eq!(named(left, has_waited), [2], "it has left, and others need it");
        }
    }
}
