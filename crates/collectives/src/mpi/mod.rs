//! The transport in which an MPI library carries the bytes.
//!
//! Every operation begins with headers between all ranks that take part in it (`headers`), so that they
//! see each other's calls and know when the last one arrived. Then the library's own collective
//! operation follows. Copies are nonblocking: they are begun and then tested until the time limit.
//! Reductions are blocking, since those are much faster (`reductions`), without a time limit.
//!
//! | operation | steps and bytes | order of summation |
//! |---|---|---|
//! | all-reduce, reduce, reduce-scatter | chosen by the MPI library | chosen by the MPI library |
//! | broadcast, all-gather, gather, scatter, all-to-all | chosen by the MPI library | - |
//! | send, receive | 1, `S` | - |
//! | barrier | 1 | - |
//!
//! The headers add one step and 88 bytes to each other rank. For an all-to-all they add another step, of
//! 16 bytes per rank to each other rank.
//!
//! MPI does not promise an order of summation, so sums of floats may differ in their last bits from those
//! of the other transports, and may change with the number of ranks, the length and the library. Otherwise,
//! f16 and bf16 are combined in f32, sent as f32, and rounded once; a mean is
//! a sum divided once; integers wrap; the minimum or maximum of floats is NaN if any of them is NaN.
//!
//! MPI cannot cancel a transfer, so an operation that fails with a transfer in flight leaves the engine's own memory to the
//! library for good, and claimed memory stays claimed. A rank that has left looks like one that is late.

mod copies;
mod flight;
mod headers;
mod inner;
mod point_to_point;
mod reductions;
mod runtime;

use std::sync::Mutex;

use paceline_trace::lock;

use flight::Comm;
use headers::Headers;
use inner::Buffers;
use runtime::Runtime;

use crate::context::OpContext;
use crate::meet::meet;
use crate::{CollectiveError, OpKind, Result};

/// One rank's membership in a communicator.
#[derive(Debug)]
pub(crate) struct Mpi {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    state: Mutex<MpiState>,
}

#[derive(Debug)]
struct MpiState {
    /// `None` after the group has been dropped.
    comm: Option<Comm>,
    inner: Buffers,
}

impl Mpi {
    /// The engine for all ranks that the launcher has started.
    pub(crate) fn open() -> Result<Self> {
        let fail = |reason| CollectiveError::Mpi { rank: 0, op: "init", seq: 0, reason };
        let comm = Runtime::open().and_then(Comm::world).map_err(fail)?;
        Self::new(comm).map_err(fail)
    }

    fn new(comm: Comm) -> Result<Self, String> {
        let (rank, world) = comm.place()?;
        let state = MpiState { comm: Some(comm), inner: Buffers::default() };
        Ok(Self { rank, world, state: Mutex::new(state) })
    }

    /// The engine for the ranks that pass the same color. All ranks call this after they have met, since
    /// the library waits for all of them without a time limit.
    pub(crate) fn split(&self, color: Option<usize>) -> Result<Option<Self>> {
        let fail = |reason| CollectiveError::Mpi { rank: self.rank, op: "split", seq: 0, reason };
        let state = lock(&self.state);
        let comm = state.comm.as_ref().expect("a group that is used has its communicator");
        let part = comm.split(color, self.rank).map_err(fail)?;
        part.map(Self::new).transpose().map_err(fail)
    }

    /// Frees the communicator. The records of its operations can still be read afterward.
    pub(crate) fn close(&self) {
        lock(&self.state).comm = None;
    }

    /// Carries a call out. Returns the moment when the last rank's header had arrived.
    pub(crate) fn run(&self, context: &OpContext) -> Result<u64> {
        let MpiState { comm, inner } = &mut *lock(&self.state);
        let comm = comm.as_mut().expect("a group that is used has its communicator");
        let outcome = dispatch(comm, inner, context);
        if let Err(error) = &outcome {
            // In a collective call, a mismatch is found after all headers have arrived, with nothing in flight.
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

fn dispatch(comm: &Comm, inner: &mut Buffers, context: &OpContext) -> Result<u64> {
    let kind = context.call.kind;
    if kind.is_point_to_point() {
        return point_to_point::run(comm, inner, context);
    }
    let met = meet(&mut Headers { comm, inner }, context)?;
    match kind {
        OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter => {
            reductions::run(comm, inner, context, &met)?;
        }
        OpKind::Broadcast => copies::broadcast(comm, context)?,
        OpKind::AllGather | OpKind::Gather => copies::gather(comm, inner, context, &met)?,
        OpKind::Scatter => copies::scatter(comm, inner, context, &met)?,
        OpKind::AllToAll => copies::all_to_all(comm, inner, context, &met)?,
        OpKind::Barrier | OpKind::Send | OpKind::Recv | OpKind::SendRecv => {}
    }
    Ok(met.present_ns)
}
