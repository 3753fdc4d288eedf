//! Shared memory within a host, sockets between hosts.
//!
//! Ranks count through the hosts one after the other, the same number on each. Ranks with the same
//! place on their hosts form a *rail*: what concerns all hosts alike travels along the rails, each
//! carrying its share, and is spread within the hosts through shared memory. What goes from one rank
//! to one other goes there directly.
//!
//! Sums are handed from host to host as a running prefix, so that every element is still summed in
//! rank order.

mod copies;
mod rails;
mod reductions;
mod state;

pub(crate) use state::Hybrid;

use rails::Rails;

use crate::call::Call;
use crate::context::OpContext;
use crate::meet::meet;
use crate::tcp::inner::{Inner, give_up};
use crate::tcp::point_to_point;
use crate::{CollectiveError, OpKind};

impl Hybrid {
    /// Carries a call out. Returns when the last rank arrived, as far as this rank can tell.
    pub(crate) fn run(&self, context: &OpContext) -> Result<u64, CollectiveError> {
        let inner = &mut *self.tcp.inner();
        let outcome = self.dispatch(inner, context);
        if let Err(error) = &outcome {
            give_up(&mut inner.mesh, error);
        }
        outcome
    }

    fn dispatch(&self, inner: &mut Inner, context: &OpContext) -> Result<u64, CollectiveError> {
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

    /// The two halves of a point-to-point call may lie on different sides of the host's border.
    fn pair(&self, inner: &mut Inner, context: &OpContext) -> Result<u64, CollectiveError> {
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
