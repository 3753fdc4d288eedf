//! Ranks that share memory: threads of one process, or processes of one host.
//!
//! All ranks share one [`Control`] block, which holds a barrier with two phases. After the first phase each rank
//! knows the calls of all others and where their data lie, and the ranks work on each other's memory directly.
//! Reductions are divided into chunks, which any rank may claim. In all other operations each rank copies what
//! it needs. Every element is reduced by the same tree over the ranks, so all transports give the same bits.
//!
//! Memory that peers cannot reach (a `Vec` of another process) goes through a staging area, one half at a
//! time: while peers read one half, the owner fills the other, so one barrier phase per piece is enough.

mod all_gather;
mod all_reduce;
mod all_to_all;
mod barrier;
mod broadcast;
mod control;
mod fate;
mod gather;
pub(crate) mod links;
mod mail;
#[cfg(all(test, loom))]
mod models;
mod phases;
mod point_to_point;
pub(crate) mod pull;
mod reduce;
mod reduce_scatter;
pub(crate) mod round;
mod scatter;
mod segment;
mod state;
mod sync;

pub(crate) use control::Control;
pub(crate) use fate::Fate;
pub(crate) use segment::{Inherited, Reach, SegmentPart, Segments};
pub(crate) use state::SharedState;

use crate::context::OpContext;
use crate::{OpKind, Result};

impl SharedState {
    /// Carries a call out. Returns the moment when the last rank arrived.
    pub(crate) fn run(&self, context: &OpContext) -> Result<u64> {
        match context.call.kind {
            OpKind::AllReduce => all_reduce::run(self, context),
            OpKind::ReduceScatter => reduce_scatter::run(self, context),
            OpKind::AllGather => all_gather::run(self, context),
            OpKind::Broadcast => broadcast::run(self, context),
            OpKind::Reduce => reduce::run(self, context),
            OpKind::Gather => gather::run(self, context),
            OpKind::Scatter => scatter::run(self, context),
            OpKind::AllToAll => all_to_all::run(self, context),
            OpKind::Send | OpKind::Recv | OpKind::SendRecv => point_to_point::run(self, context),
            OpKind::Barrier => barrier::run(self, context),
        }
    }

    /// Ends this rank's membership after a panic in the middle of an operation: the peers learn that it is lost.
    pub(crate) fn abandon(&self) {
        self.control().depart(self.rank, Fate::Lost);
    }
}
