//! Ranks that are connected by sockets, on any hosts.
//!
//! Every operation begins with a header to and from every other rank. So all ranks see all
//! calls before they move data, and know when the last rank arrived. Each direction of a connection carries
//! the data of one operation after the other.
//!
//! Input: a call in its context. Output: the moment when all ranks had arrived, or an error. This transport
//! is for learning, small clusters and emulation; large clusters use NCCL or MPI.

pub(crate) mod blocks;
mod connect;
pub(crate) mod headers;
pub(crate) mod inner;
mod last_words;
pub(crate) mod point_to_point;
mod ring;
mod sharded;
pub(crate) mod wires;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use paceline_trace::lock;

use headers::Headers;
use inner::Sockets;
use last_words::LastWords;

use crate::context::OpContext;
use crate::header::Header;
use crate::meet::meet;
use crate::{OpKind, Result};

#[derive(Debug)]
pub(crate) struct Tcp {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    host: String,
    /// All-reduces of at least this many bytes use the ring.
    ring_from_bytes: AtomicU64,
    inner: Mutex<Sockets>,
}

/// A size that no message has, so that the ring is never used.
pub(crate) const NEVER: u64 = u64::MAX;

impl Tcp {
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// Sets the size in bytes from which an all-reduce uses the ring: the same on every rank.
    pub(crate) fn set_ring_from(&self, bytes: u64) {
        self.ring_from_bytes.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Sockets> {
        lock(&self.inner)
    }

    /// Carries a call out. Returns the moment when the last rank's header had arrived.
    pub(crate) fn run(&self, context: &OpContext) -> Result<u64> {
        let inner = &mut *self.inner();
        let outcome = self.dispatch(inner, context);
        outcome.map_err(|error| inner.give_up(context, error).0)
    }

    /// Lets the peers know that this rank gives up in the middle of an operation, by its own fault.
    pub(crate) fn abandon(&self) {
        self.inner().wires.give_up(&LastWords::Missing(vec![self.rank]));
    }

    fn dispatch(&self, inner: &mut Sockets, context: &OpContext) -> Result<u64> {
        let kind = context.call.kind;
        match kind {
            OpKind::Send | OpKind::Recv | OpKind::SendRecv => {
                return point_to_point::run(inner, context, || Ok(()));
            }
            _ => {}
        }
        let met = meet(&mut Headers(inner), context)?;
        match kind {
            OpKind::AllReduce => {
                let from_bytes = self.ring_from_bytes.load(Ordering::Relaxed);
                let has_neighbors = inner.wires.peers().next().is_some();
                if has_neighbors && context.call.message_bytes() as u64 >= from_bytes {
                    ring::all_reduce(inner, context)?;
                } else {
                    sharded::reduce(inner, context)?;
                }
            }
            OpKind::Broadcast => sharded::broadcast(inner, context)?,
            OpKind::Reduce => sharded::reduce(inner, context)?,
            OpKind::ReduceScatter => sharded::reduce_scatter(inner, context, &met.shares())?,
            OpKind::AllGather | OpKind::Gather | OpKind::Scatter | OpKind::AllToAll => {
                blocks::run(inner, context, &met.calls, &met.sent, || Ok(()))?;
            }
            OpKind::Barrier | OpKind::Send | OpKind::Recv | OpKind::SendRecv => {}
        }
        Ok(met.present_ns)
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.inner().wires.send_leave(&Header::Leaves.encode());
    }
}
