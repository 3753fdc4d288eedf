//! An MPI library carries the bytes.
//!
//! Every operation begins with headers between each two ranks that have to do with each other
//! (`headers`), so that all ranks see what all others called and know when the last one arrived. Then the
//! library's own collective operation follows. Copies are begun and then tested until the time limit;
//! reductions block, since those are much faster (`reductions`): for them the limit holds for the
//! meeting of the ranks alone.
//!
//! | operation | steps and bytes | order of summation |
//! |---|---|---|
//! | all-reduce, reduce, reduce-scatter | chosen by the MPI library | chosen by the MPI library |
//! | broadcast, all-gather, gather, scatter, all-to-all | chosen by the MPI library | - |
//! | send, receive | 1, `S` | - |
//! | barrier | 1 | - |
//!
//! To that come the headers: one step, 88 bytes to each other rank (and for an all-to-all another one,
//! of 16 bytes per rank).
//!
//! MPI does not promise an order of summation, so sums of floats may differ in their last bits from
//! those of the other transports, and from one number of ranks, length or library to another. What
//! holds as everywhere: f16 and bf16 are combined in f32, which also travels, and rounded once; a mean
//! is a sum divided once; integers wrap; the smallest and largest of floats are NaN if any is NaN.
//!
//! Memory that a caller has only lent is staged, and an operation that fails with a transfer in the air
//! leaves its staging memory to the library for good, since MPI cannot take a transfer back. What was
//! claimed stays claimed then. A rank that leaves is not told apart from one that is late.

mod copies;
mod flight;
mod headers;
mod inner;
mod point_to_point;
mod reductions;
mod runtime;

use std::sync::{Mutex, MutexGuard, PoisonError};

use flight::Comm;
use headers::Headers;
use inner::Inner;
use runtime::Runtime;

use crate::context::OpContext;
use crate::meet::meet;
use crate::{CollectiveError, OpKind};

/// One rank's membership in a communicator.
#[derive(Debug)]
pub(crate) struct Mpi {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None once the group has been dropped.
    comm: Option<Comm>,
    inner: Inner,
}

impl Mpi {
    /// All ranks that the launcher has started.
    pub(crate) fn open() -> Result<Self, CollectiveError> {
        let fail = |reason| CollectiveError::Mpi { rank: 0, op: "init", seq: 0, reason };
        let comm = Runtime::open().and_then(Comm::world).map_err(fail)?;
        Self::new(comm).map_err(fail)
    }

    fn new(comm: Comm) -> Result<Self, String> {
        let (rank, world) = comm.place()?;
        let state = State { comm: Some(comm), inner: Inner::default() };
        Ok(Self { rank, world, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ranks that pass the same colour. All ranks call this after they have met, since the library
    /// waits for them without a limit here.
    pub(crate) fn split(&self, colour: Option<usize>) -> Result<Option<Self>, CollectiveError> {
        let fail = |reason| CollectiveError::Mpi { rank: self.rank, op: "split", seq: 0, reason };
        let state = self.state();
        let comm = state.comm.as_ref().expect("a group that is used has its communicator");
        let part = comm.split(colour, self.rank).map_err(fail)?;
        part.map(Self::new).transpose().map_err(fail)
    }

    /// Gives the communicator back. The records of its operations can still be read after that.
    pub(crate) fn close(&self) {
        self.state().comm = None;
    }

    /// Carries a call out. Returns when the last rank arrived, as far as its header tells.
    pub(crate) fn run(&self, context: &OpContext) -> Result<u64, CollectiveError> {
        let State { comm, inner } = &mut *self.state();
        let comm = comm.as_mut().expect("a group that is used has its communicator");
        let outcome = dispatch(comm, inner, context);
        if let Err(error) = &outcome {
            // Headers of all ranks that do not fit together have all arrived: nothing is in the air.
            let is_found =
                matches!(error, CollectiveError::Mismatch { .. } | CollectiveError::Counts { .. });
            if !is_found || context.call.kind.is_point_to_point() {
                std::mem::forget(std::mem::take(inner));
                comm.abandon();
            }
        }
        outcome
    }
}

fn dispatch(comm: &Comm, inner: &mut Inner, context: &OpContext) -> Result<u64, CollectiveError> {
    let kind = context.call.kind;
    if kind.is_point_to_point() {
        return point_to_point::run(comm, inner, context);
    }
    let met = meet(&mut Headers { comm, inner }, context)?;
    match kind {
        OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter => {
            reductions::run(comm, inner, context, &met)?;
        }
        OpKind::Broadcast => copies::broadcast(comm, inner, context)?,
        OpKind::AllGather | OpKind::Gather => copies::gather(comm, inner, context, &met)?,
        OpKind::Scatter => copies::scatter(comm, inner, context, &met)?,
        OpKind::AllToAll => copies::all_to_all(comm, inner, context, &met)?,
        OpKind::Barrier | OpKind::Send | OpKind::Recv | OpKind::SendRecv => {}
    }
    Ok(met.present_ns)
}
