//! A group of ranks: how it forms, divides, and ends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use paceline_memory::{Allocator, Buffer, Category, DType, Mapping, Tensor};
use paceline_rendezvous::{PeerAddress, PeerListener, Rendezvous, Store};

use crate::core::Core;
use crate::cost::{Algorithm, Link};
use crate::engine::Engine;
use crate::hybrid::Hybrid;
#[cfg(feature = "mpi")]
use crate::mpi::Mpi;
use crate::pace::Pace;
use crate::record::OpRecord;
use crate::shared::links::{Links, Monitor};
use crate::shared::{Control, Fate, Reach, Shared};
use crate::tcp::{NEVER, Tcp};
use crate::watch::Watch;
use crate::worker::Worker;
use crate::{CollectiveError, GroupOptions, ReduceOp, Transport};

/// The most ranks that a group can have.
pub const MAX_RANKS: usize = 64;

/// One rank's membership in a group.
///
/// Every rank of a group calls the same operations in the same order; operations run in the order in
/// which they were submitted. Dropping the group finishes what was submitted and leaves it; peers
/// that still need this rank then get an error and do not hang.
#[derive(Debug)]
pub struct Group {
    // Ends first, so that what was submitted is finished while the peers can still be reached.
    worker: Option<Worker>,
    core: Arc<Core>,
    transport: Transport,
    options: GroupOptions,
    name: String,
    ties: Ties,
    num_splits: AtomicU32,
}

/// What ties the members together besides the engine.
#[derive(Debug)]
enum Ties {
    Threads(Arc<Hub>),
    /// Connections to the ranks of this host, and who watches them.
    Host {
        links: Links,
        monitor: Option<Monitor>,
    },
    /// The engine's own connections.
    None,
}

/// Where threads find the shared state of their sub-groups, by number of the split and colour, until
/// all members have taken it.
#[derive(Debug, Default)]
struct Hub(Mutex<HashMap<(u32, i64), (Lot, usize)>>);

/// What the threads of a group share.
type Lot = (Arc<Mapping>, Arc<Hub>);

impl Group {
    /// The groups of `world_size` ranks that are threads of this process, in rank order.
    ///
    /// Panics if `world_size` is zero or above [`MAX_RANKS`], or if there is no memory for it.
    pub fn threads(world_size: usize) -> Vec<Self> {
        Self::threads_with(world_size, GroupOptions::for_local_ranks(world_size))
    }

    /// As [`Group::threads`], with options. A link among them must be set by every rank itself, with
    /// [`Group::emulate`].
    pub fn threads_with(world_size: usize, options: GroupOptions) -> Vec<Self> {
        assert!((1..=MAX_RANKS).contains(&world_size), "1 to {MAX_RANKS} ranks");
        let memory = Arc::new(Control::create(0).expect("memory for the shared state of a group"));
        let hub = Arc::new(Hub::default());
        let rank = |rank| {
            let (memory, ties) = (memory.clone(), Ties::Threads(hub.clone()));
            let engine = Engine::Shared(Shared::new(rank, world_size, memory, Reach::Threads));
            let transport = Transport::Thread;
            Self::assemble(rank, world_size, engine, transport, ties, options.clone(), "world")
        };
        (0..world_size).map(rank).collect()
    }

    /// A group of one.
    pub fn single() -> Self {
        Self::threads(1).remove(0)
    }

    /// Meets the other processes of this host and forms a group with them that shares memory.
    ///
    /// Blocks until all `world_size` ranks have come, at most `options.timeout`. Errors when they
    /// do not, when one presents another secret or world size, or when memory cannot be shared.
    pub fn shm(
        rendezvous: &Rendezvous,
        rank: usize,
        world_size: usize,
        options: GroupOptions,
    ) -> Result<Self, CollectiveError> {
        let (listener, addresses) = Self::meet(rendezvous, None, rank, world_size, &options)?;
        Self::form_shm(&listener, &addresses, rank, options, "world")
    }

    /// Meets the other processes, on this host or others, and forms a group with them over TCP.
    /// `host` is the address of this host by which the others reach it.
    ///
    /// Errors as [`Group::shm`] does.
    pub fn tcp(
        rendezvous: &Rendezvous,
        host: &str,
        rank: usize,
        world_size: usize,
        options: GroupOptions,
    ) -> Result<Self, CollectiveError> {
        let (listener, addresses) = Self::meet(rendezvous, Some(host), rank, world_size, &options)?;
        Self::form_tcp(&listener, &addresses, host, rank, options, "world")
    }

    /// As [`Group::tcp`], but ranks of one host share memory. Ranks count through the hosts one after
    /// the other, `local_world_size` on each.
    pub fn hybrid(
        rendezvous: &Rendezvous,
        host: &str,
        rank: usize,
        world_size: usize,
        local_world_size: usize,
        options: GroupOptions,
    ) -> Result<Self, CollectiveError> {
        let (listener, addresses) = Self::meet(rendezvous, Some(host), rank, world_size, &options)?;
        Self::form_hybrid(&listener, &addresses, host, rank, local_world_size, options, "world")
    }

    /// Forms a group of all ranks that an MPI launcher has started, whose library carries the bytes.
    ///
    /// MPI itself knows the rank and the number of ranks. It is started by the first group, and ended
    /// by the last one of this process that is dropped, which waits for all ranks; after that, the
    /// process cannot form another one. So a rank that has failed by itself says why before it drops
    /// its group, or ends the process without that, and the launcher ends the others. Errors when the
    /// library cannot be used.
    #[cfg(feature = "mpi")]
    pub fn mpi(options: GroupOptions) -> Result<Self, CollectiveError> {
        let engine = Mpi::open()?;
        let (rank, world) = (engine.rank, engine.world);
        Self::check_world(rank, world)?;
        let (engine, transport) = (Engine::Mpi(engine), Transport::Mpi);
        let group =
            Self::assemble(rank, world, engine, transport, Ties::None, options.clone(), "world");
        group.barrier()?;
        group.emulate_if_asked(options.link)
    }

    /// Divides the group: ranks that pass the same colour form a new group, in which they keep their
    /// order. A collective call; ranks that pass `None` take part and get no group.
    ///
    /// The new group's operations are independent of this one's. It emulates the same link.
    pub fn split(&self, colour: Option<u32>) -> Result<Option<Self>, CollectiveError> {
        let group = self.divide(colour)?;
        if let (Some(group), Some(pace)) = (&group, self.core.pace.get()) {
            // The parent's transport was slow enough, and this one is no faster.
            group.set_pace(pace.link);
        }
        Ok(group)
    }

    /// As [`Group::split`], but the new group emulates no link.
    pub(crate) fn divide(&self, colour: Option<u32>) -> Result<Option<Self>, CollectiveError> {
        let split = self.num_splits.fetch_add(1, Ordering::Relaxed);
        let mut colours = vec![0i64; self.world_size()];
        let own = colour.map_or(-1, i64::from);
        self.all_gather_slice(&[own], &mut colours)?;
        let same = |rank: &usize| colours[*rank] == own;
        let members: Vec<usize> = (0..self.world_size()).filter(same).collect();
        let (rank, world) = (members.iter().filter(|&&m| m < self.rank()).count(), members.len());
        let name = format!("{}/{split}.{own}", self.name);
        let mut options = self.options.clone();
        options.link = None;
        let group = match (&self.ties, &self.core.engine) {
            (Ties::Threads(hub), _) => {
                if colour.is_none() {
                    return Ok(None);
                }
                let (memory, hub) = hub.meet((split, own), world)?;
                let engine = Shared::new(rank, world, memory, Reach::Threads);
                // Numbers of splits count within a group, so each has a hub of its own.
                let ties = Ties::Threads(hub);
                let (engine, transport) = (Engine::Shared(engine), self.transport);
                Self::assemble(rank, world, engine, transport, ties, options, &name)
            }
            #[cfg(feature = "mpi")]
            (_, Engine::Mpi(mpi)) => {
                // Members have their first one's number as colour: MPI's has fewer bits than ours.
                let Some(engine) = mpi.split(colour.map(|_| members[0]))? else { return Ok(None) };
                let (engine, transport) = (Engine::Mpi(engine), self.transport);
                Self::assemble(rank, world, engine, transport, Ties::None, options, &name)
            }
            (_, engine) => {
                let host = match engine {
                    Engine::Tcp(tcp) => Some(tcp.host()),
                    Engine::Hybrid(hybrid) => Some(hybrid.host()),
                    _ => None,
                };
                let listener = PeerListener::bind(host, self.rank(), self.world_size())?;
                let all = self.all_gather_object(listener.address())?;
                let addresses: Vec<PeerAddress> =
                    members.iter().map(|&member| all[member].clone()).collect();
                if colour.is_none() {
                    return Ok(None);
                }
                // A part of a hybrid group may lie on one host, or unevenly on several.
                let local = match engine {
                    Engine::Hybrid(hybrid) => hybrid.local_world(&members).filter(|&n| n > 1),
                    _ => None,
                };
                match (host, local) {
                    (None, _) => Self::form_shm(&listener, &addresses, rank, options, &name)?,
                    (_, Some(local)) if local == world => {
                        Self::form_shm(&listener, &addresses, rank, options, &name)?
                    }
                    (Some(host), Some(local)) => {
                        Self::form_hybrid(&listener, &addresses, host, rank, local, options, &name)?
                    }
                    (Some(host), None) => {
                        Self::form_tcp(&listener, &addresses, host, rank, options, &name)?
                    }
                }
            }
        };
        Ok(Some(group))
    }

    pub(crate) fn form_shm(
        listener: &PeerListener,
        addresses: &[PeerAddress],
        rank: usize,
        options: GroupOptions,
        name: &str,
    ) -> Result<Self, CollectiveError> {
        let world = addresses.len();
        let links = Links::connect(listener, addresses, rank, options.timeout)?;
        let (memory, reach) = links.share_control()?;
        let engine = Engine::Shared(Shared::new(rank, world, memory, reach));
        let ties = Ties::Host { links, monitor: None };
        let mut group =
            Self::assemble(rank, world, engine, Transport::Shm, ties, options.clone(), name);
        group.start_monitor()?;
        group.barrier()?;
        group.emulate_if_asked(options.link)
    }

    pub(crate) fn form_tcp(
        listener: &PeerListener,
        addresses: &[PeerAddress],
        host: &str,
        rank: usize,
        options: GroupOptions,
        name: &str,
    ) -> Result<Self, CollectiveError> {
        let world = addresses.len();
        let tcp = Tcp::connect(listener, addresses, host, rank, &options, |_| true)?;
        let engine = Engine::Tcp(tcp);
        let transport = Transport::Tcp;
        let group =
            Self::assemble(rank, world, engine, transport, Ties::None, options.clone(), name);
        group.barrier()?;
        if options.algorithm == Algorithm::Auto && options.link.is_none() {
            group.choose_algorithm()?;
        }
        group.emulate_if_asked(options.link)
    }

    pub(crate) fn form_hybrid(
        listener: &PeerListener,
        addresses: &[PeerAddress],
        host: &str,
        rank: usize,
        local_world: usize,
        options: GroupOptions,
        name: &str,
    ) -> Result<Self, CollectiveError> {
        let world = addresses.len();
        if local_world == 0 || !world.is_multiple_of(local_world) {
            let reason = format!(
                "needs the same number of ranks on every host, got {world} ranks with {local_world} \
                 on this one; use tcp"
            );
            return Err(CollectiveError::Buffers { rank, op: "hybrid", reason });
        }
        let (node, local_rank) = (rank / local_world, rank % local_world);
        let first = node * local_world;
        let here = &addresses[first..first + local_world];
        let links = Links::connect(listener, here, local_rank, options.timeout)?;
        let (memory, reach) = links.share_control()?;
        let shared = Shared::new(local_rank, local_world, memory, reach);
        let is_remote = |peer: usize| peer / local_world != node;
        let tcp = Tcp::connect(listener, addresses, host, rank, &options, is_remote)?;
        let engine = Engine::Hybrid(Hybrid::new(shared, tcp));
        let ties = Ties::Host { links, monitor: None };
        let transport = Transport::Hybrid;
        let mut group = Self::assemble(rank, world, engine, transport, ties, options.clone(), name);
        group.start_monitor()?;
        group.barrier()?;
        group.emulate_if_asked(options.link)
    }

    fn assemble(
        rank: usize,
        world: usize,
        engine: Engine,
        transport: Transport,
        ties: Ties,
        options: GroupOptions,
        name: &str,
    ) -> Self {
        let (log, dump_folder) = (options.log, options.dump_folder.clone());
        let watch = Watch { log, dump_folder, group: name.into() };
        let core = Arc::new(Core::new(rank, world, engine, watch));
        let worker = Some(Worker::start(core.clone(), options.clone()));
        let (name, num_splits) = (name.to_owned(), AtomicU32::new(0));
        Self { worker, core, transport, options, name, ties, num_splits }
    }

    fn start_monitor(&mut self) -> Result<(), CollectiveError> {
        if let Ties::Host { links, monitor } = &mut self.ties {
            let core = self.core.clone();
            *monitor = Some(Monitor::start(links, move |peer| core.lose(peer))?);
        }
        Ok(())
    }

    /// This rank's own listener, and where all ranks can be reached. The store may close when this
    /// returns: rank 0 answers the others for as long as its process lives.
    fn meet(
        rendezvous: &Rendezvous,
        host: Option<&str>,
        rank: usize,
        world_size: usize,
        options: &GroupOptions,
    ) -> Result<(PeerListener, Vec<PeerAddress>), CollectiveError> {
        Self::check_world(rank, world_size)?;
        let store = Store::open(rendezvous, rank, world_size, options.timeout)?;
        let listener = PeerListener::bind(host, rank, world_size)?;
        let addresses = store.exchange("address", listener.address())?;
        Ok((listener, addresses))
    }

    pub(crate) fn check_world(rank: usize, world_size: usize) -> Result<(), CollectiveError> {
        if rank < world_size && world_size <= MAX_RANKS {
            return Ok(());
        }
        Err(CollectiveError::NoSuchRank { rank, world_size })
    }

    pub(crate) fn check_rank(&self, rank: usize) -> Result<(), CollectiveError> {
        let world_size = self.world_size();
        if rank < world_size {
            return Ok(());
        }
        Err(CollectiveError::NoSuchRank { rank, world_size })
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.core.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.core.world
    }

    /// How the ranks reach each other.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// The link that is emulated, if any.
    pub fn link(&self) -> Option<Link> {
        self.core.pace.get().map(|pace| pace.link)
    }

    /// How this group waits, and what it tells.
    pub fn options(&self) -> &GroupOptions {
        &self.options
    }

    /// Allocates zeroed memory on every rank that all operations use in place, without staging. A
    /// collective call: every rank passes the same size. The memory lives as long as the group.
    pub fn allocate(
        &self,
        allocator: &Allocator,
        len_bytes: usize,
        category: Category,
    ) -> Result<Buffer, CollectiveError> {
        let (Some(shared), Ties::Host { links, .. }) = (self.shared(), &self.ties) else {
            let buffer = allocator.host(len_bytes, category)?;
            let whole = Tensor::new(buffer.clone(), 0, DType::U8, [len_bytes])?;
            whole.write::<u8>()?.fill(0);
            return Ok(buffer);
        };
        let segment = links.share_segment(len_bytes)?;
        let start = segment.start_bytes + shared.rank * segment.part_bytes;
        let mapping = segment.mapping.clone();
        // SAFETY: this is the only buffer made of this rank's part of a new segment; peers touch it
        // during collective operations only, in ranges that are claimed here for that time.
        let buffer =
            unsafe { Buffer::window(mapping, start..start + len_bytes, category, allocator)? };
        shared.reach.add(segment);
        self.barrier()?;
        Ok(buffer)
    }

    /// Makes every later operation take as long as it would on this link. A collective call.
    ///
    /// The transport is measured first; a link that is not at least 1.25 times as slow is refused.
    pub fn emulate(&self, link: Link) -> Result<(), CollectiveError> {
        if !link.is_possible() {
            let (rank, link) = (self.rank(), link.to_string());
            return Err(CollectiveError::ImpossibleLink { rank, link });
        }
        for bytes in [4096, 4_000_000] {
            let measured = self.measure_all_reduce(bytes)?;
            let kind = crate::OpKind::AllReduce;
            let algorithm = self.options.algorithm;
            let algorithm = algorithm.recommended(kind, self.world_size(), bytes as u64, &link);
            let emulated = link.time(kind, algorithm, self.world_size(), bytes as u64);
            if self.world_size() > 1 && emulated < measured.mul_f64(1.25) {
                let link = link.to_string();
                return Err(CollectiveError::Link { link, bytes, emulated, measured });
            }
        }
        self.set_pace(link);
        Ok(())
    }

    pub(crate) fn set_pace(&self, link: Link) {
        // A second link would be refused here; the first one stays.
        let _ = self.core.pace.set(Pace::new(link, self.options.algorithm));
    }

    pub(crate) fn emulate_if_asked(self, link: Option<Link>) -> Result<Self, CollectiveError> {
        if let Some(link) = link {
            self.emulate(link)?;
        }
        Ok(self)
    }

    /// Measures both algorithms and uses rings from the size on from which they are faster.
    fn choose_algorithm(&self) -> Result<(), CollectiveError> {
        let Engine::Tcp(tcp) = &self.core.engine else { return Ok(()) };
        let mut from = NEVER;
        for bytes in [16_000_000, 1_000_000, 64_000] {
            tcp.set_ring_from(NEVER);
            let direct = self.measure_all_reduce(bytes)?;
            tcp.set_ring_from(0);
            let ring = self.measure_all_reduce(bytes)?;
            if ring >= direct {
                break;
            }
            from = bytes as u64;
        }
        tcp.set_ring_from(from);
        Ok(())
    }

    /// The best of a few all-reduces in place, as the slowest rank saw it: the same answer on every
    /// rank.
    fn measure_all_reduce(&self, bytes: usize) -> Result<Duration, CollectiveError> {
        let buffer = self.allocate(&Allocator::new(), bytes, Category::Communication)?;
        let data = Tensor::new(buffer, 0, DType::F32, [bytes / 4])?;
        let mut best = f64::INFINITY;
        // Small messages are done before a busy host has looked round, so they get more chances.
        let rounds = if bytes < 100_000 { 100 } else { 6 };
        for _ in 0..rounds {
            let times = self.all_reduce(&data, ReduceOp::Sum)?;
            best = best.min(times.move_ns() as f64);
        }
        let mut slowest = [best];
        self.all_reduce_slice(&mut slowest, ReduceOp::Max)?;
        Ok(Duration::from_nanos(slowest[0] as u64))
    }

    /// Adds the records of operations finished since the last call to the end of `out`, the thousand
    /// most recent ones at most, and returns how many more there were.
    pub fn fresh_records(&self, out: &mut Vec<OpRecord>) -> u64 {
        self.core.fresh_records(out)
    }

    /// What can write this group's most recent operations out from another thread, when the process
    /// is told to end.
    pub fn dumper(&self) -> Dumper {
        Dumper(self.core.clone())
    }

    pub(crate) fn worker(&self) -> &Worker {
        self.worker.as_ref().expect("the worker is taken when the group is dropped, not before")
    }

    pub(crate) fn shared(&self) -> Option<&Shared> {
        self.core.engine.shared()
    }
}

/// Writes a group's most recent operations to its dump folder.
#[derive(Clone, Debug)]
pub struct Dumper(Arc<Core>);

impl Dumper {
    /// Writes the group's operations out, with `cause` as the reason, unless that has happened before.
    pub fn dump(&self, cause: &str) {
        self.0.dump(cause);
    }
}

impl Hub {
    /// What the sub-group of `key` shares, which the first of its `world` members makes.
    fn meet(&self, key: (u32, i64), world: usize) -> Result<Lot, CollectiveError> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (lot, missing) = match waiting.remove(&key) {
            Some((lot, missing)) => (lot, missing - 1),
            None => ((Arc::new(Control::create(0)?), Arc::default()), world - 1),
        };
        if missing > 0 {
            waiting.insert(key, (lot.clone(), missing));
        }
        Ok(lot)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        drop(self.worker.take());
        #[cfg(feature = "mpi")]
        if let Engine::Mpi(mpi) = &self.core.engine {
            mpi.close();
        }
        if let Some(shared) = self.shared() {
            shared.control().depart(shared.rank, Fate::Left);
        }
        if let Ties::Host { links, monitor } = &mut self.ties
            && let Some(monitor) = monitor.take()
        {
            monitor.stop(links);
        }
    }
}
