//! Shared memory within a host, sockets between hosts.
//!
//! Ranks count through the hosts one after the other, the same number on each. Ranks with the same
//! place on their hosts form a *rail*: what concerns all hosts alike travels along the rails, each
//! carrying its share, and is spread within the hosts through shared memory. What goes from one rank
//! to one other goes there directly.
//!
//! Sums are handed from host to host as a running prefix, so that every element is still summed in
//! rank order.

mod copies;
mod reductions;

use crate::call::{Call, Published, agree, blocks_agree};
use crate::core::Trip;
use crate::shared::Shared;
use crate::tcp::header::{HEADER_BYTES, Header};
use crate::tcp::{Inner, Tcp, give_up, meet, point_to_point};
use crate::{CollectiveError, OpKind};

/// One rank's view of its host and of the other hosts.
#[derive(Debug)]
pub(crate) struct Hybrid {
    local: Shared,
    tcp: Tcp,
}

/// What a rank knows once all have met.
struct Met {
    present_ns: u64,
    calls: Vec<Published>,
    /// For an all-to-all: elements that each rank sends to each.
    sent: Vec<Vec<u64>>,
}

impl Hybrid {
    /// `tcp` connects this rank to those of all other hosts.
    pub(crate) fn new(local: Shared, tcp: Tcp) -> Self {
        Self { local, tcp }
    }

    /// The connections to the ranks of other hosts.
    pub(crate) fn remote(&self) -> &Tcp {
        &self.tcp
    }

    /// The shared state of this host's ranks.
    pub(crate) fn local(&self) -> &Shared {
        &self.local
    }

    pub(crate) fn host(&self) -> &str {
        self.tcp.host()
    }

    /// Of these ranks, how many are on each host that has any, if it is the same number everywhere.
    pub(crate) fn local_world(&self, members: &[usize]) -> Option<usize> {
        let on =
            |host: usize| members.iter().filter(|&&rank| rank / self.local.world == host).count();
        let counts: Vec<usize> = (0..self.num_hosts()).map(on).filter(|&count| count > 0).collect();
        let first = *counts.first()?;
        counts.iter().all(|&count| count == first).then_some(first)
    }

    fn num_hosts(&self) -> usize {
        self.tcp.world / self.local.world
    }

    /// This rank's host.
    fn node(&self) -> usize {
        self.tcp.rank / self.local.world
    }

    /// The ranks of a host.
    fn ranks_of(&self, node: usize) -> std::ops::Range<usize> {
        node * self.local.world..(node + 1) * self.local.world
    }

    /// The rank in this rank's place on another host.
    fn on_rail(&self, node: usize) -> usize {
        node * self.local.world + self.local.rank
    }

    /// The same operation, as this host's ranks carry out their part of it.
    fn within_host<'a>(&self, trip: &Trip<'a>, call: &'a Call) -> Trip<'a> {
        let (rank, world) = (self.local.rank, self.local.world);
        Trip { rank, world, first: self.ranks_of(self.node()).start, call, ..*trip }
    }

    /// Carries a call out. Returns when the last rank arrived, as far as this rank can tell.
    pub(crate) fn run(&self, trip: &Trip) -> Result<u64, CollectiveError> {
        let inner = &mut *self.tcp.inner();
        let outcome = self.dispatch(inner, trip);
        if let Err(error) = &outcome {
            give_up(&mut inner.mesh, error);
        }
        outcome
    }

    fn dispatch(&self, inner: &mut Inner, trip: &Trip) -> Result<u64, CollectiveError> {
        match trip.call.kind {
            OpKind::Send | OpKind::Recv | OpKind::SendRecv => return self.pair(inner, trip),
            OpKind::Barrier => return Ok(self.meet(inner, trip)?.present_ns),
            _ => {}
        }
        let met = self.meet(inner, trip)?;
        match trip.call.kind {
            OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter => {
                self.reduce(inner, trip, &met)?;
            }
            OpKind::Broadcast => self.broadcast(inner, trip)?,
            OpKind::AllGather => self.all_gather(inner, trip, &met)?,
            _ => self.direct(inner, trip, &met)?,
        }
        Ok(met.present_ns)
    }

    /// First the ranks of each host see what each other called, then each shows its rail all that its
    /// host called.
    fn meet(&self, inner: &mut Inner, trip: &Trip) -> Result<Met, CollectiveError> {
        let here = self.local.show(&self.within_host(trip, trip.call))?;
        let mut message = Vec::new();
        for (&call, &operation) in here.calls.iter().zip(&here.operations) {
            message.extend(Header::Call { operation, call }.encode());
        }
        let mut rail = self.rail();
        let headers = meet::swap(inner, trip, &rail, &message)?;
        let (mut calls, mut operations) = (Vec::new(), Vec::new());
        for node in 0..self.num_hosts() {
            let on_rail = self.on_rail(node);
            let there = &headers[on_rail * message.len()..][..message.len()];
            for (place, bytes) in there.chunks_exact(HEADER_BYTES).enumerate() {
                let (operation, call) = match node == self.node() {
                    true => (here.operations[place], here.calls[place]),
                    false => meet::read(inner, trip, on_rail, bytes)?,
                };
                calls.push(call);
                operations.push(operation);
            }
        }
        let mut outcome = agree(&calls);
        let mut sent = Vec::new();
        if let (Ok(()), Some(blocks)) = (&outcome, &trip.call.blocks) {
            // Everybody's blocks, host by host: within the host through an all-gather of its own.
            let own: Vec<u64> = blocks.send.iter().chain(&blocks.recv).copied().collect();
            let rows = self.all_rows(inner, trip, &own, &mut rail)?;
            let world = trip.world;
            outcome =
                blocks_agree(world, |from, to| rows[from][to], |to, from| rows[to][world + from]);
            sent = rows.into_iter().map(|row| row[..world].to_vec()).collect();
        }
        outcome
            .map_err(|found| trip.disagreement(found, |rank| (calls[rank], operations[rank])))?;
        Ok(Met { present_ns: paceline_trace::now_ns(), calls, sent })
    }

    /// The ranks in this rank's place on the other hosts.
    fn rail(&self) -> Vec<usize> {
        let others = (0..self.num_hosts()).filter(|&node| node != self.node());
        others.map(|node| self.on_rail(node)).collect()
    }

    /// The two halves of a point-to-point call may lie on different sides of the host's border.
    fn pair(&self, inner: &mut Inner, trip: &Trip) -> Result<u64, CollectiveError> {
        let here = self.ranks_of(self.node());
        let call = trip.call;
        let local_send = call.sending().filter(|(to, _)| here.contains(to));
        let local_recv = call.receiving().filter(|(from, _)| here.contains(from));
        let kind = match (local_send.is_some(), local_recv.is_some()) {
            (true, true) => OpKind::SendRecv,
            (true, false) => OpKind::Send,
            (false, true) => OpKind::Recv,
            (false, false) => return point_to_point::run(inner, trip, || Ok(())),
        };
        let place = |rank: usize| rank - here.start;
        let (root, from) = match kind {
            OpKind::Recv => (place(local_recv.map_or(0, |half| half.0)), 0),
            OpKind::Send => (place(call.root), 0),
            _ => (place(call.root), place(call.from)),
        };
        let within = Call { kind, root, from, ..call.clone() };
        let mut present_ns = 0;
        let remote_ns = point_to_point::run(inner, trip, || {
            present_ns = self.local.run(&self.within_host(trip, &within))?;
            Ok(())
        })?;
        Ok(present_ns.max(remote_ns))
    }
}
