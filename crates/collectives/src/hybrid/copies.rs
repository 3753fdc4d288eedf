//! Broadcast, all-gather, gather, scatter and all-to-all over hosts.
//!
//! | operation | between hosts | within a host |
//! |---|---|---|
//! | broadcast | the root sends to its rail: `S` to each other host | broadcast from the rail's rank |
//! | all-gather | each rank's share to its rail: once to each other host | all-gather, host by host |
//! | gather, scatter, all-to-all | each block directly from rank to rank | the same among its ranks |

use super::state::Hybrid;
use crate::call::{BlockCounts, Call, Region, Shares};
use crate::context::OpContext;
use crate::meet::AgreedCalls;
use crate::tcp::blocks;
use crate::tcp::inner::Sockets;
use crate::{OpKind, Result};

impl Hybrid {
    pub(super) fn broadcast(&self, inner: &mut Sockets, context: &OpContext) -> Result<()> {
        let call = context.call;
        let place = call.root % self.local.world;
        let is_root = context.rank == call.root;
        if self.local.rank == place {
            for peer in self.rail() {
                // SAFETY: the caller holds the memory until the operation is over or the wires are
                // cleared, and only the root's contents are sent.
                unsafe {
                    if is_root {
                        inner.wires.send(peer, call.send.base, call.send.len_bytes);
                    } else if peer == call.root {
                        inner.wires.recv(peer, call.recv.base, call.recv.len_bytes);
                    }
                }
            }
            inner.wait_all(context)?;
        }
        let send = match (self.local.rank == place, is_root) {
            (true, true) => call.send,
            (true, false) => call.recv,
            (false, _) => Region::EMPTY,
        };
        let within = Call { root: place, send, ..call.clone() };
        self.local.run(&self.within_host(context, &within)).map(drop)
    }

    pub(super) fn all_gather(
        &self,
        inner: &mut Sockets,
        context: &OpContext,
        met: &AgreedCalls,
    ) -> Result<()> {
        let call = context.call;
        let shares = Shares::new(call.kind, &met.calls);
        let share = |rank: usize| call.recv.part(shares.bytes(rank, call.dtype));
        for peer in self.rail() {
            let incoming = share(peer);
            // SAFETY: as for the broadcast; every share has a place of its own.
            unsafe {
                inner.wires.send(peer, call.send.base, call.send.len_bytes);
                inner.wires.recv(peer, incoming.base, incoming.len_bytes);
            }
        }
        let own = self.node();
        // Gathers this host's shares first, while the shares of the other hosts are on their way.
        for node in std::iter::once(own).chain((0..self.num_hosts()).filter(|&node| node != own)) {
            if node != own {
                inner.wait_all(context)?;
            }
            let ranks = self.ranks_of(node);
            let (first, last) = (ranks.start, ranks.end - 1);
            let whole = shares.bytes(first, call.dtype).start..shares.bytes(last, call.dtype).end;
            let send = if node == own { call.send } else { share(self.on_rail(node)) };
            let within = Call { send, recv: call.recv.part(whole), ..call.clone() };
            self.local.run(&self.within_host(context, &within))?;
        }
        inner.wait_all(context)
    }

    /// Gather, scatter and all-to-all.
    pub(super) fn direct(
        &self,
        inner: &mut Sockets,
        context: &OpContext,
        met: &AgreedCalls,
    ) -> Result<()> {
        let call = context.call;
        let here = self.ranks_of(self.node());
        let dtype = call.dtype;
        let part = |region: &Region, shares: &Shares| {
            region
                .part(shares.bytes(here.start, dtype).start..shares.bytes(here.end - 1, dtype).end)
        };
        let shares = Shares::new(call.kind, &met.calls);
        let has_root = here.contains(&call.root);
        let within = match call.kind {
            OpKind::AllToAll => {
                let to_all = Shares::of(met.sent[context.rank].iter().copied());
                let from_all = Shares::of(met.sent.iter().map(|row| row[context.rank]));
                let blocks = BlockCounts {
                    send: here.clone().map(|to| met.sent[context.rank][to]).collect(),
                    recv: here.clone().map(|from| met.sent[from][context.rank]).collect(),
                };
                let (send, recv) = (part(&call.send, &to_all), part(&call.recv, &from_all));
                Some(Call { send, recv, blocks: Some(Box::new(blocks)), ..call.clone() })
            }
            _ if !has_root => None,
            kind => {
                let root = call.root - here.start;
                let (mut send, mut recv) = (call.send, call.recv);
                if context.rank == call.root {
                    match kind {
                        OpKind::Gather => recv = part(&recv, &shares),
                        _ => send = part(&send, &shares),
                    }
                }
                Some(Call { root, send, recv, ..call.clone() })
            }
        };
        blocks::run(inner, context, &met.calls, &met.sent, || match &within {
            Some(within) => self.local.run(&self.within_host(context, within)).map(drop),
            None => Ok(()),
        })
    }
}
