//! Shared memory within a host, sockets between hosts.
//!
//! Every host has the same number of ranks, with consecutive numbers. Ranks with the same local rank on
//! their hosts form a *rail*. Data for all hosts travel along the rails. Each rail carries its share.
//! Then shared memory spreads the data within each host. Data from one rank to one other rank go there directly.
//!
//! Hosts exchange partial sums that are nodes of the tree over all ranks ([`paceline_numeric::tree`]), so every element
//! is summed in the same order as by any other transport.
//!
//! Input: a call in its context. Output: the moment when all ranks had arrived, or an error.

mod blame;
mod copies;
pub(crate) mod plan;
mod rails;
mod reductions;
mod state;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use state::Hybrid;

use rails::Rails;

use crate::call::Call;
use crate::context::OpContext;
use crate::meet::meet;
use crate::tcp::inner::Sockets;
use crate::tcp::point_to_point;
use crate::{OpKind, Result};

impl Hybrid {
    /// Carries a call out. Returns the moment when the last rank arrived, as far as this rank can tell.
    pub(crate) fn run(&self, context: &OpContext) -> Result<u64> {
        let inner = &mut *self.tcp.inner();
        let outcome = self.dispatch(inner, context);
        outcome.map_err(|error| {
            let (error, alive) = inner.give_up(context, error);
            self.blame(context, error, &alive)
        })
    }

    fn dispatch(&self, inner: &mut Sockets, context: &OpContext) -> Result<u64> {
        match context.call.kind {
            OpKind::Send | OpKind::Recv | OpKind::SendRecv => return self.pair(inner, context),
            OpKind::Barrier => {
                return Ok(meet(&mut Rails { hybrid: self, inner }, context)?.present_ns);
            }
            _ => {}
        }
        let met = meet(&mut Rails { hybrid: self, inner }, context)?;
        match context.call.kind {
            OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter => {
                self.reduce(inner, context, &met)?;
            }
            OpKind::Broadcast => self.broadcast(inner, context)?,
            OpKind::AllGather => self.all_gather(inner, context, &met)?,
            _ => self.direct(inner, context, &met)?,
        }
        Ok(met.present_ns)
    }

    /// Send, receive, and both at once. One peer may be on this host and the other on another host.
    fn pair(&self, inner: &mut Sockets, context: &OpContext) -> Result<u64> {
        let here = self.ranks_of(self.node());
        let call = context.call;
        let local_send = call.sending().filter(|(to, _)| here.contains(to));
        let local_recv = call.receiving().filter(|(from, _)| here.contains(from));
        let kind = match (local_send.is_some(), local_recv.is_some()) {
            (true, true) => OpKind::SendRecv,
            (true, false) => OpKind::Send,
            (false, true) => OpKind::Recv,
            (false, false) => return point_to_point::run(inner, context, || Ok(())),
        };
        let place = |rank: usize| rank - here.start;
        let (root, from) = match kind {
            OpKind::Recv => (place(local_recv.map_or(0, |half| half.0)), 0),
            OpKind::Send => (place(call.root), 0),
            _ => (place(call.root), place(call.from)),
        };
        let within = Call { kind, root, from, ..call.clone() };
        let mut present_ns = 0;
        let remote_ns = point_to_point::run(inner, context, || {
            present_ns = self.local.run(&self.within_host(context, &within))?;
            Ok(())
        })?;
        Ok(present_ns.max(remote_ns))
    }
}
