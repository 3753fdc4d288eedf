//! One rank's place among the hosts: its host's shared memory, its connections, and its rail.
//!
//! This module does not know which operations exist.

use crate::call::Call;
use crate::context::OpContext;
use crate::shared::SharedState;
use crate::tcp::Tcp;

/// One rank's view of its host and of the other hosts.
#[derive(Debug)]
pub(crate) struct Hybrid {
    /// The state that this host's ranks share.
    pub(crate) local: SharedState,
    /// The connections to the ranks of other hosts.
    pub(crate) tcp: Tcp,
}

impl Hybrid {
    /// How many of these ranks are on each host that has any of them. `None` if the number differs between
    /// hosts.
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

    /// The first rank of this host.
    pub(crate) fn first_of_host(&self) -> usize {
        self.ranks_of(self.node()).start
    }

    /// The ranks of a host.
    pub(super) fn ranks_of(&self, node: usize) -> std::ops::Range<usize> {
        node * self.local.world..(node + 1) * self.local.world
    }

    /// The rank on host `node` with the same local rank as this one.
    pub(super) fn on_rail(&self, node: usize) -> usize {
        node * self.local.world + self.local.rank
    }

    /// The context for the part of an operation that this host's ranks carry out among themselves.
    pub(super) fn within_host<'a>(&self, context: &OpContext<'a>, call: &'a Call) -> OpContext<'a> {
        let (rank, world) = (self.local.rank, self.local.world);
        OpContext { rank, world, first: self.first_of_host(), call, named: call, ..*context }
    }

    /// The ranks on the other hosts with the same local rank as this one.
    pub(super) fn rail(&self) -> Vec<usize> {
        let others = (0..self.num_hosts()).filter(|&node| node != self.node());
        others.map(|node| self.on_rail(node)).collect()
    }
}
