//! How a group forms: from threads, or from processes that meet, connect, and choose a transport.
//!
//! Input: a rendezvous and this rank's number, or the addresses of ranks that have met. Output: a
//! group whose ranks have passed a barrier.

use std::sync::Arc;

use paceline_rendezvous::{PeerAddress, PeerListener, Rendezvous, Store};

use super::host_links::{HostLinks, SplitRegistry};
use super::{Group, Lineage};
use crate::call::MAX_RANKS;
use crate::cost::Algorithm;
use crate::engine::Engine;
use crate::hybrid::Hybrid;
#[cfg(feature = "mpi")]
use crate::mpi::Mpi;
use crate::shared::links::Links;
use crate::shared::{Control, Reach, SharedState};
use crate::tcp::Tcp;
use crate::{CollectiveError, GroupOptions, Result, Transport};

/// How processes connect to each other.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Connect<'a> {
    /// All on one host.
    Shm,
    /// By sockets. This host has this address.
    Tcp(&'a str),
    /// By sockets between hosts with this number of ranks each.
    Hybrid(&'a str, usize),
}

impl<'a> Connect<'a> {
    /// The address of this host, if ranks of other hosts connect to it.
    pub(crate) fn host(self) -> Option<&'a str> {
        match self {
            Connect::Shm => None,
            Connect::Tcp(host) | Connect::Hybrid(host, _) => Some(host),
        }
    }
}

impl Group {
    /// The groups of `world_size` ranks that are threads of this process, in rank order.
    ///
    /// Panics if `world_size` is zero or above [`MAX_RANKS`], or if memory for the group's shared state
    /// cannot be allocated.
    pub fn threads(world_size: usize) -> Vec<Self> {
        Self::threads_with(world_size, GroupOptions::for_local_ranks(world_size))
            .expect("memory for the shared state of a group")
    }

    /// Like [`Group::threads`], with options. [`GroupOptions::link`] is ignored: to emulate a link, every
    /// rank calls [`Group::emulate`]. Errors if memory for the group's shared state cannot be allocated.
    ///
    /// Panics if `world_size` is zero or above [`MAX_RANKS`].
    pub fn threads_with(world_size: usize, options: GroupOptions) -> Result<Vec<Self>> {
        assert!((1..=MAX_RANKS).contains(&world_size), "1 to {MAX_RANKS} ranks");
        let memory = Arc::new(Control::create(world_size)?);
        let registry = Arc::new(SplitRegistry::default());
        let rank = |rank| {
            let (memory, host_links) = (memory.clone(), HostLinks::Threads(registry.clone()));
            let engine = Engine::Shared(SharedState::new(rank, world_size, memory, Reach::Threads));
            let (transport, lineage) = (Transport::Thread, Lineage::world());
            Self::assemble(
                rank,
                world_size,
                engine,
                transport,
                host_links,
                options.clone(),
                lineage,
            )
        };
        (0..world_size).map(rank).collect()
    }

    /// A group of one. Errors if memory for its state cannot be allocated.
    pub fn single() -> Result<Self> {
        Ok(Self::threads_with(1, GroupOptions::for_local_ranks(1))?.remove(0))
    }

    /// The sub-group that has only this rank. Needs no message to the other ranks.
    pub(crate) fn only_self(&self, label: &str, color: usize) -> Result<Self> {
        let engine = SharedState::new(0, 1, Arc::new(Control::create(1)?), Reach::Threads);
        let options = GroupOptions { link: None, ..self.options().clone() };
        let label = format!("{label}.{color}");
        let lineage = self.membership.lineage.sub_group(&label, &[self.rank()], None);
        let host_links = HostLinks::Threads(Arc::default());
        let (engine, transport) = (Engine::Shared(engine), self.membership.transport);
        self.like_this(Self::assemble(0, 1, engine, transport, host_links, options, lineage)?)
    }

    /// Meets the other processes of this host and forms a group with them that shares memory.
    /// Blocks until all `world_size` ranks have come, for at most `options.timeout`. Errors if some do not
    /// come, if a rank has a different secret or world size, or if memory cannot be shared.
    pub fn shm(
        rendezvous: &Rendezvous,
        rank: usize,
        world_size: usize,
        options: GroupOptions,
    ) -> Result<Self> {
        Self::rendezvous(rendezvous, Connect::Shm, rank, world_size, options)
    }

    /// Meets the other processes, on this host or others, and forms a group with them over TCP.
    /// `host` is the address of this host by which the others reach it.
    ///
    /// Has the errors of [`Group::shm`].
    pub fn tcp(
        rendezvous: &Rendezvous,
        host: &str,
        rank: usize,
        world_size: usize,
        options: GroupOptions,
    ) -> Result<Self> {
        Self::rendezvous(rendezvous, Connect::Tcp(host), rank, world_size, options)
    }

    /// Like [`Group::tcp`], but ranks of one host share memory. Every host has `local_world_size` ranks, with
    /// consecutive numbers.
    pub fn hybrid(
        rendezvous: &Rendezvous,
        host: &str,
        rank: usize,
        world_size: usize,
        local_world_size: usize,
        options: GroupOptions,
    ) -> Result<Self> {
        let by = Connect::Hybrid(host, local_world_size);
        Self::rendezvous(rendezvous, by, rank, world_size, options)
    }

    /// Forms a group of all ranks that an MPI launcher has started. The MPI library carries the bytes.
    ///
    /// The first group of a process starts MPI. Dropping
    /// the last group ends MPI, which waits for all ranks; after that, the process cannot form another
    /// group. So a rank that has failed should print its error before it drops its group. Or it should end the process
    /// without dropping the group, and the launcher then ends the other ranks. Errors if the library cannot be used.
    #[cfg(feature = "mpi")]
    pub fn mpi(options: GroupOptions) -> Result<Self> {
        let engine = Mpi::open()?;
        let (rank, world) = (engine.rank, engine.world);
        Self::check_world(rank, world)?;
        let (engine, transport) = (Engine::Mpi(engine), Transport::Mpi);
        let group = Self::assemble(
            rank,
            world,
            engine,
            transport,
            HostLinks::None,
            options.clone(),
            Lineage::world(),
        )?;
        group.barrier()?;
        group.emulate_if_asked(options.link)
    }

    /// Meets the other processes, connects to them and forms the group. The store may then be dropped:
    /// rank 0 answers the others for as long as its process lives.
    fn rendezvous(
        rendezvous: &Rendezvous,
        by: Connect,
        rank: usize,
        world_size: usize,
        options: GroupOptions,
    ) -> Result<Self> {
        Self::check_world(rank, world_size)?;
        let store = Store::open(rendezvous, rank, world_size, options.timeout)?;
        let listener = PeerListener::bind(store.key(), by.host(), rank, world_size)?;
        let addresses = store.exchange("address", listener.address())?;
        let lineage = Lineage::of_processes(listener.key());
        Self::form(&listener, &addresses, by, rank, options, lineage)
    }

    pub(crate) fn form(
        listener: &PeerListener,
        addresses: &[PeerAddress],
        by: Connect,
        rank: usize,
        options: GroupOptions,
        lineage: Lineage,
    ) -> Result<Self> {
        let world = addresses.len();
        let (engine, host_links, transport) = match by {
            Connect::Shm => {
                let (shared, links) =
                    Self::share_memory(listener, addresses, rank, &options, &lineage)?;
                (Engine::Shared(shared), links, Transport::Shm)
            }
            Connect::Tcp(host) => {
                let tcp = Tcp::connect(listener, addresses, host, rank, &options, |_| true)?;
                (Engine::Tcp(tcp), HostLinks::None, Transport::Tcp)
            }
            Connect::Hybrid(host, local_world) => {
                if local_world == 0 || !world.is_multiple_of(local_world) {
                    let reason = format!(
                        "needs the same number of ranks on every host, got {world} ranks with \
                         {local_world} on this one; use tcp"
                    );
                    return Err(CollectiveError::Buffers { rank, op: "hybrid", reason });
                }
                let first = rank / local_world * local_world;
                let here = first..first + local_world;
                let (shared, links) = Self::share_memory(
                    listener,
                    &addresses[here.clone()],
                    rank - first,
                    &options,
                    &lineage,
                )?;
                let is_remote = |peer: usize| !here.contains(&peer);
                let tcp = Tcp::connect(listener, addresses, host, rank, &options, is_remote);
                let tcp = tcp.inspect_err(|error| {
                    let missing = error.culprits();
                    if !missing.is_empty() {
                        // Other ranks of this host may be connected already, and wait for this rank.
                        shared.control().report_missing(&missing);
                    }
                })?;
                (Engine::Hybrid(Hybrid { local: shared, tcp }), links, Transport::Hybrid)
            }
        };
        let (link, algorithm) = (options.link, options.algorithm);
        let group = Self::assemble(rank, world, engine, transport, host_links, options, lineage)?;
        group.barrier()?;
        if algorithm == Algorithm::Auto && link.is_none() {
            group.choose_algorithm()?;
        }
        group.emulate_if_asked(link)
    }

    /// The memory that the ranks of this host share, and the connections over which they share it.
    fn share_memory(
        listener: &PeerListener,
        addresses: &[PeerAddress],
        rank: usize,
        options: &GroupOptions,
        lineage: &Lineage,
    ) -> Result<(SharedState, HostLinks)> {
        let links = Links::connect(listener, addresses, rank, options.timeout)?;
        let (memory, reach) = links.share_control(lineage.inherited.clone())?;
        let shared = SharedState::new(rank, addresses.len(), memory, reach);
        Ok((shared, HostLinks::Host { links, monitor: None }))
    }

    pub(crate) fn check_world(rank: usize, world_size: usize) -> Result<()> {
        if rank < world_size && world_size <= MAX_RANKS {
            return Ok(());
        }
        Err(CollectiveError::NoSuchRank { rank, world_size })
    }
}
