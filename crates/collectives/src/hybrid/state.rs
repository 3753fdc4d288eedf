//! One rank's place among the hosts: its host's shared memory, its connections, and its rail.
//!
//! Knows nothing of which operations there are.

use crate::call::Call;
use crate::context::OpContext;
use crate::shared::Shared;
use crate::tcp::Tcp;

/// One rank's view of its host and of the other hosts.
#[derive(Debug)]
pub(crate) struct Hybrid {
    pub(super) local: Shared,
    pub(super) tcp: Tcp,
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

    pub(super) fn num_hosts(&self) -> usize {
        self.tcp.world / self.local.world
    }

    /// This rank's host.
    pub(super) fn node(&self) -> usize {
        self.tcp.rank / self.local.world
    }

    /// The ranks of a host.
    pub(super) fn ranks_of(&self, node: usize) -> std::ops::Range<usize> {
        node * self.local.world..(node + 1) * self.local.world
    }

    /// The rank in this rank's place on another host.
    pub(super) fn on_rail(&self, node: usize) -> usize {
        node * self.local.world + self.local.rank
    }

    /// The same operation, as this host's ranks carry out their part of it.
    pub(super) fn within_host<'a>(&self, context: &OpContext<'a>, call: &'a Call) -> OpContext<'a> {
        let (rank, world) = (self.local.rank, self.local.world);
        OpContext { rank, world, first: self.ranks_of(self.node()).start, call, ..*context }
    }

    /// The ranks in this rank's place on the other hosts.
    pub(super) fn rail(&self) -> Vec<usize> {
        let others = (0..self.num_hosts()).filter(|&node| node != self.node());
        others.map(|node| self.on_rail(node)).collect()
    }
}
