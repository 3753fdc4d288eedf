//! A group of ranks: its state, the questions that it answers, and how it ends.
//!
//! | file | what it does |
//! |---|---|
//! | `form` | forms a group of threads or processes |
//! | `split` | divides a group into sub-groups |
//! | `origin` | a group's name, and the emulated network card that it shares |
//! | `ties` | the connections between the members besides the engine's |
//! | `allocate` | allocates memory that operations use in place |
//! | `calibrate` | measures the transport |
//! | `emulate` | slows the group down to an emulated link |
//!
//! The operations themselves are methods of [`Group`] in `ops.rs`, `slices.rs` and `objects.rs`.

mod allocate;
mod calibrate;
mod emulate;
mod form;
mod origin;
mod split;
mod ties;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

pub(crate) use origin::Origin;
use ties::Ties;

use crate::core::Core;
use crate::cost::Link;
use crate::engine::Engine;
use crate::flight_recorder::FlightRecorder;
use crate::record::OpRecord;
use crate::shared::links::Monitor;
use crate::shared::{Fate, Shared};
use crate::worker::Worker;
use crate::{CollectiveError, GroupOptions, Transport};

/// One rank's membership in a group.
///
/// Every rank of a group calls the same operations in the same order. Operations run in the order in which
/// they were submitted. A clone is a second handle of the same membership. Dropping the last handle finishes
/// the submitted operations and then leaves the group; peers that still need this rank get an error and do
/// not hang.
#[derive(Clone, Debug)]
pub struct Group(Arc<Membership>);

#[derive(Debug)]
struct Membership {
    // Dropped first, so that submitted operations finish while the peers can still be reached.
    worker: Option<Worker>,
    core: Arc<Core>,
    transport: Transport,
    options: GroupOptions,
    origin: Origin,
    ties: Ties,
    num_splits: AtomicU32,
}

impl Group {
    fn assemble(
        rank: usize,
        world: usize,
        engine: Engine,
        transport: Transport,
        mut ties: Ties,
        options: GroupOptions,
        origin: Origin,
    ) -> Result<Self, CollectiveError> {
        let (log, dump_folder) = (options.log, options.dump_folder.clone());
        let group = origin.name.clone();
        let flight_recorder =
            FlightRecorder { rank, world, log, dump_folder, group, number: origin.number };
        let core = Arc::new(Core::new(rank, world, engine, flight_recorder, &origin));
        if let Ties::Host { links, monitor } = &mut ties {
            let core = core.clone();
            *monitor = Some(Monitor::start(links, move |peer| core.lose(peer))?);
        }
        let worker = Some(Worker::new(core.clone(), options.clone()));
        let num_splits = AtomicU32::new(0);
        let membership = Membership { worker, core, transport, options, origin, ties, num_splits };
        Ok(Self(Arc::new(membership)))
    }

    /// The origin of the sub-group that has only this rank.
    fn sub_origin(&self, label: &str, colour: usize) -> Origin {
        self.0.origin.sub_group(&format!("{label}.{colour}"), &[self.rank()], None)
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
        self.0.core.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.0.core.world
    }

    /// How the ranks reach each other.
    pub fn transport(&self) -> Transport {
        self.0.transport
    }

    /// The link that is emulated, if any.
    pub fn link(&self) -> Option<Link> {
        self.0.core.emulator.get().map(|emulator| emulator.link)
    }

    /// How this group waits, and what it logs.
    pub fn options(&self) -> &GroupOptions {
        &self.0.options
    }

    /// The name of the group: `world`, or `world/1.0` for the ranks of color 0 in its second split. It is the same on
    /// every member. The groups of a [`Mesh`](crate::Mesh) are named after their axes: `world/dp.0`.
    pub fn name(&self) -> &str {
        &self.0.origin.name
    }

    /// The number of the group on this rank: 0 for the group from which the others descend, then counted in the
    /// order in which this rank joined them. [`OpRecord::group`] is this number.
    pub fn number(&self) -> u32 {
        self.0.origin.number
    }

    /// The number of `rank` of this group in the group from which this one descends. Errors name ranks by that
    /// number.
    pub fn outermost_rank(&self, rank: usize) -> usize {
        self.0.origin.outermost(rank)
    }

    /// Appends to `out` the records of the operations that have finished since the last call: at most the
    /// thousand most recent ones. Returns how many older ones were lost. A group, the groups split from it and
    /// the group that it was split from keep one record for each rank, so any of them returns the operations of
    /// all of them, in the order in which they finished, and each operation once.
    pub fn fresh_records(&self, out: &mut Vec<OpRecord>) -> u64 {
        self.0.core.fresh_records(out)
    }

    /// A handle by which another thread can write out this rank's most recent operations, for example when
    /// the process is told to end.
    pub fn dumper(&self) -> Dumper {
        Dumper(self.0.core.clone())
    }

    pub(crate) fn worker(&self) -> &Worker {
        self.0.worker.as_ref().expect("the worker is taken when the group is dropped, not before")
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn engine(&self) -> &Engine {
        &self.0.core.engine
    }

    pub(crate) fn shared(&self) -> Option<&Shared> {
        self.0.core.engine.shared()
    }
}

/// Writes a rank's most recent operations, of all its groups, to the dump folder of a group.
#[derive(Clone, Debug)]
pub struct Dumper(Arc<Core>);

impl Dumper {
    /// Writes the operations out, with `cause` as the reason, unless they have been written before.
    pub fn dump(&self, cause: &str) {
        self.0.dump(cause);
    }

    /// Removes what [`Dumper::dump`] has written: the group has ended in order after all.
    pub fn withdraw(&self) {
        self.0.withdraw();
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
        if let Ties::Host { links, monitor } = &mut self.ties
            && let Some(monitor) = monitor.take()
        {
            monitor.stop(links);
        }
    }
}
