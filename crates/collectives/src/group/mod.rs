//! A group of ranks: its state, its properties, and how a rank leaves it.
//!
//! | file | purpose |
//! |---|---|
//! | `form` | forms a group of threads or processes |
//! | `split` | divides a group into sub-groups |
//! | `lineage` | a group's name, and the emulated network card that it shares |
//! | `host_links` | connections between the members that the engine does not use |
//! | `allocate` | allocates memory that operations use in place |
//! | `heap` | moves memory of other libraries to where operations use it in place |
//! | `calibrate` | measures the transport |
//! | `emulate` | slows the group down to an emulated link |
//! | `cards` | lets NCCL carry out the operations on cards |
//!
//! The operations themselves are methods of [`Group`] in `ops.rs`, `slices.rs` and `objects.rs`.

mod allocate;
mod calibrate;
mod cards;
mod emulate;
mod form;
mod heap;
mod host_links;
mod lineage;
mod split;

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub(crate) use form::Connect;
pub use heap::SharedHeap;
use host_links::HostLinks;
pub(crate) use lineage::Lineage;
use paceline_memory::{Allocator, DeviceStream};
use paceline_rendezvous::GenerationPlace;
use paceline_trace::lock;
use paceline_trace::runtime::{now, sleep};
use tracing::debug;

use crate::core::Core;
use crate::cost::Link;
use crate::engine::Engine;
use crate::flight_recorder::FlightRecorder;
use crate::record::{OpRecord, Purpose};
use crate::shared::links::PeerMonitor;
use crate::shared::{Fate, SharedState};
use crate::staging::Staging;
use crate::worker::{Fenced, Worker};
use crate::{CollectiveError, GroupOptions, Result, Transport};

/// How long a rank sleeps before it looks again whether others have left.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// A group of ranks, as one of them sees it.
///
/// Every rank of a group calls the same operations in the same order. They run in the order
/// of submission. A clone is a second handle to the same group. Dropping the last handle finishes
/// the submitted operations and then leaves the group; peers that still need this rank get an error.
///
/// Each operation ends with an error on every rank if the ranks call different ones, or if one of them has left.
///
/// ```
/// use std::thread;
///
/// use paceline_collectives::{Group, ReduceOp};
///
/// thread::scope(|scope| {
///     for group in Group::threads(3) {
///         scope.spawn(move || {
///             let mut sums = [group.rank() as f32, 1.0];
///             group.all_reduce_slice(&mut sums, ReduceOp::Sum).unwrap();
///             assert_eq!(sums, [3.0, 3.0]);
///         });
///     }
/// });
/// ```
#[derive(Clone, Debug)]
pub struct Group {
    membership: Arc<Membership>,
    /// The purpose of the operations that are submitted through this handle.
    pub(crate) purpose: Purpose,
}

#[derive(Debug)]
struct Membership {
    // Dropped first, so that submitted operations finish while the peers can still be reached.
    worker: Option<Worker>,
    core: Arc<Core>,
    transport: Transport,
    options: GroupOptions,
    lineage: Lineage,
    host_links: HostLinks,
    num_splits: AtomicU32,
    /// For operations on the memory of an accelerator.
    staging: OnceLock<Staging>,
}

impl Group {
    fn assemble(
        rank: usize,
        world: usize,
        engine: Engine,
        transport: Transport,
        mut host_links: HostLinks,
        options: GroupOptions,
        lineage: Lineage,
    ) -> Result<Self> {
        let (log, dump_folder) = (options.log, options.dump_folder.clone());
        let group = lineage.name.clone();
        let (number, records) = (lineage.number, lineage.rank.records.clone());
        let is_dumped = Mutex::default();
        let recorder =
            FlightRecorder { rank, world, log, dump_folder, group, number, records, is_dumped };
        let is_broken = lineage.rank.is_broken.clone();
        let core =
            Arc::new(Core::new(rank, world, engine, recorder, lineage.members.clone(), is_broken));
        if let HostLinks::Host { links, monitor } = &mut host_links {
            let core = core.clone();
            *monitor = Some(PeerMonitor::start(links, move |peer| core.lose(peer))?);
        }
        debug!("rank {rank} of {world} has formed {} over {transport:?}", lineage.name);
        let worker = Worker::new(core.clone(), &lineage.name, options.clone());
        lineage.rank.add_fence(worker.fenced());
        let num_splits = AtomicU32::new(0);
        let membership = Membership {
            worker: Some(worker),
            core,
            transport,
            options,
            lineage,
            host_links,
            num_splits,
            staging: OnceLock::new(),
        };
        Ok(Self { membership: Arc::new(membership), purpose: Purpose::Other })
    }

    /// The streams through which operations reach the memory of an accelerator. `home` is a stream of the accelerator.
    pub(crate) fn staging(&self, home: &DeviceStream) -> Result<&Staging> {
        if let Some(staging) = self.membership.staging.get() {
            return Ok(staging);
        }
        let staging = Staging::new(home)?;
        Ok(self.membership.staging.get_or_init(|| staging))
    }

    /// Gives back the memory of operations that have failed. It is fenced until then, because a peer that does not know of
    /// the failure may still write there. Waits until all ranks that can reach this rank's memory have left the group or are
    /// lost, for at most the group's limit. Memory of an accelerator stays fenced.
    ///
    /// Errors, and gives nothing back, if a rank has not left by then, or if an MPI library or NCCL carries the bytes: neither
    /// reports that a rank has left.
    pub fn give_back_failed(&self) -> Result<()> {
        let begin = now();
        let still_there = |peers| {
            let (rank, waited) = (self.rank(), now() - begin);
            Err(CollectiveError::StillThere { rank, peers, waited })
        };
        #[cfg(feature = "mpi")]
        if let Engine::Mpi(_) = &self.membership.core.engine {
            return still_there(Vec::new());
        }
        if self.nccl_order().is_some() {
            return still_there(Vec::new());
        }
        // Over sockets, only this rank writes to its memory.
        if let Some(shared) = self.shared() {
            let others = || (0..shared.world).filter(|peer| *peer != shared.rank);
            let is_there = |peer: &usize| shared.control().fate(*peer).is_none();
            while others().any(|peer| is_there(&peer)) {
                if now() - begin >= self.membership.options.timeout {
                    return still_there(others().filter(is_there).collect());
                }
                sleep(LOOK_AGAIN);
            }
        }
        // SAFETY: all peers that can reach the memory have left the group, and with it its operations, or have ended.
        unsafe { self.worker().give_back() };
        Ok(())
    }

    /// The memory of failed operations of this group and of all that descend from the same, to be given back after this rank has left
    /// them.
    pub fn fence(&self) -> Fence {
        Fence(self.membership.lineage.rank.fences())
    }

    /// Private memory for operations on slices and objects.
    pub(crate) fn memory(&self) -> &Allocator {
        &self.membership.lineage.rank.memory
    }

    pub(crate) fn check_rank(&self, rank: usize) -> Result<()> {
        let world_size = self.world_size();
        if rank < world_size {
            return Ok(());
        }
        Err(CollectiveError::NoSuchRank { rank, world_size })
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.membership.core
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.membership.core.rank
    }

    /// The number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.membership.core.world
    }

    /// How the ranks reach each other.
    pub fn transport(&self) -> Transport {
        if self.nccl_order().is_some() { Transport::Nccl } else { self.membership.transport }
    }

    /// Whether an operation of this rank has failed, of this group or of one that descends from the same.
    pub fn is_broken(&self) -> bool {
        self.membership.lineage.rank.is_broken.load(Ordering::Relaxed)
    }

    /// The link that is emulated, if any.
    pub fn link(&self) -> Option<Link> {
        self.membership.core.emulator.get().map(|emulator| emulator.link)
    }

    /// How this group waits, and what it logs.
    pub fn options(&self) -> &GroupOptions {
        &self.membership.options
    }

    /// The name of the group: `world`, or `world/1.0` for the ranks of color 0 in the second split of `world`. It is the
    /// same on every member. The groups of a [`Mesh`](crate::Mesh) are named after their axes: `world/dp.0`.
    pub fn name(&self) -> &str {
        &self.membership.lineage.name
    }

    /// The number of the group on this rank: 0 for the outermost group, from which the others descend, in the order in which
    /// this rank joined them. [`OpRecord::group`] is this number.
    pub fn number(&self) -> u32 {
        self.membership.lineage.number
    }

    /// The number of `rank` in the outermost group, from which this group descends. Errors name ranks by this number.
    pub fn outermost_rank(&self, rank: usize) -> usize {
        self.membership.lineage.outermost(rank)
    }

    /// Appends to `out` the records of the operations that have finished since the last call, at most the thousand
    /// most recent. Returns how many older records were lost.
    ///
    /// All groups that descend from the same group keep one list of records, so any of them returns
    /// the operations of all of them, in the order in which they finished.
    pub fn fresh_records(&self, out: &mut Vec<OpRecord>) -> u64 {
        lock(&self.membership.core.recorder.records).fresh_into(out)
    }

    /// A handle to the same group that records this purpose for its operations:
    /// `group.for_purpose(Purpose::Loss).all_reduce_async(..)`.
    pub fn for_purpose(&self, purpose: Purpose) -> Self {
        Self { membership: self.membership.clone(), purpose }
    }

    /// A handle for another thread, which can write this rank's most recent operations to a file, for example when
    /// the process must end.
    pub fn dumper(&self) -> Dumper {
        Dumper(self.membership.core.clone())
    }

    /// The sockets of the group, without those of its sub-groups. A forked child of this process closes them: the
    /// peers do not notice the death of this process while a copy is open elsewhere.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut all = Vec::new();
        if let HostLinks::Host { links, .. } = &self.membership.host_links {
            all.extend(links.descriptors());
        }
        match &self.membership.core.engine {
            Engine::Tcp(tcp) => all.extend(tcp.inner().wires.descriptors()),
            Engine::Hybrid(hybrid) => all.extend(hybrid.tcp.inner().wires.descriptors()),
            _ => {}
        }
        all
    }

    pub(crate) fn worker(&self) -> &Worker {
        self.membership.worker.as_ref().expect("the worker is taken by the last handle to go")
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn engine(&self) -> &Engine {
        &self.membership.core.engine
    }

    pub(crate) fn shared(&self) -> Option<&SharedState> {
        self.membership.core.engine.shared()
    }
}

/// Memory of failed operations of groups that this rank has left.
#[derive(Debug)]
pub struct Fence(Vec<Arc<Mutex<Fenced>>>);

impl Fence {
    /// Gives the memory back. The groups were those of the generation before this place, all of whose members that
    /// are left called [`RunMember::regroup`](paceline_rendezvous::RunMember::regroup) after they had dropped their groups.
    pub fn give_back(self, _place: &GenerationPlace) {
        for fenced in self.0 {
            // SAFETY: there is a place in a generation only once the other members of the last one are ready for it, and so have
            // left their groups, or have ended. One on another host that does not answer cannot reach this memory.
            unsafe { Fenced::give_back(&fenced) };
        }
    }
}

/// Writes a rank's most recent operations, of all its groups, to the dump folder of a group.
#[derive(Clone, Debug)]
pub struct Dumper(Arc<Core>);

impl Dumper {
    /// Writes the operations to a file, with `cause` as the reason, unless this has been done before.
    pub fn dump(&self, cause: &str) {
        self.0.recorder.dump(cause);
    }

    /// Removes the file that [`Dumper::dump`] has written. For a group that has ended in order after all.
    pub fn withdraw(&self) {
        self.0.recorder.withdraw();
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        drop(self.worker.take());
        #[cfg(feature = "mpi")]
        if let Engine::Mpi(mpi) = &self.core.engine {
            mpi.close();
        }
        if let Some(shared) = self.core.engine.shared() {
            shared.control().depart(shared.rank, Fate::Left);
        }
        if let HostLinks::Host { links, monitor } = &mut self.host_links
            && let Some(monitor) = monitor.take()
        {
            monitor.stop(links);
        }
    }
}
