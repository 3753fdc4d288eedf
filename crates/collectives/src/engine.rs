//! One type for all transports.
//!
//! Input: a call in its context. Output: the moment when all ranks had arrived, or an error. This module
//! does not know how a transport moves data.

use std::sync::atomic::Ordering;

use paceline_trace::now_ns;

use crate::call::Disagreement;
use crate::context::OpContext;
use crate::hybrid::Hybrid;
#[cfg(feature = "mpi")]
use crate::mpi::Mpi;
use crate::shared::{Fate, SharedState};
use crate::tcp::Tcp;
use crate::{OpKind, Result};

/// The transport that carries out the operations of a group.
#[derive(Debug)]
pub(crate) enum Engine {
    /// Threads of one process, or processes of one host.
    Shared(SharedState),
    /// Processes anywhere, over sockets.
    Tcp(Tcp),
    /// Shared memory within a host, sockets between hosts.
    Hybrid(Hybrid),
    /// An MPI library.
    #[cfg(feature = "mpi")]
    Mpi(Mpi),
}

impl Engine {
    /// The state that the ranks of this host share, if the transport uses shared memory.
    pub(crate) fn shared(&self) -> Option<&SharedState> {
        match self {
            Engine::Shared(shared) => Some(shared),
            Engine::Hybrid(hybrid) => Some(&hybrid.local),
            _ => None,
        }
    }

    /// Carries a call out. Returns the moment when the last rank had arrived, as far as this rank can tell.
    pub(crate) fn run(&self, context: &OpContext) -> Result<u64> {
        let call = context.call;
        if call.kind == OpKind::SendRecv && (call.root, call.from) == (context.rank, context.rank) {
            return send_to_self(context);
        }
        match self {
            Engine::Shared(shared) => shared.run(context),
            Engine::Tcp(tcp) => tcp.run(context),
            Engine::Hybrid(hybrid) => hybrid.run(context),
            #[cfg(feature = "mpi")]
            Engine::Mpi(mpi) => mpi.run(context),
        }
    }

    /// The rank that arrived last in the latest operation of all ranks, if the transport tells.
    pub(crate) fn slowest(&self) -> Option<usize> {
        let Engine::Shared(shared) = self else { return None };
        Some(shared.slowest.load(Ordering::Relaxed))
    }

    /// A rank of this host that is known to have died. The death of other ranks is noticed only in an operation.
    pub(crate) fn gone(&self) -> Option<usize> {
        let first = match self {
            Engine::Hybrid(hybrid) => hybrid.first_of_host(),
            _ => 0,
        };
        let (shared, is_lost) = (self.shared()?, |fate| fate == Some(Fate::Lost));
        let found = (0..shared.world).find(|peer| is_lost(shared.control().fate(*peer)));
        found.map(|peer| first + peer)
    }

    /// Ends this rank's part in the group after a panic in the middle of an operation.
    pub(crate) fn abandon(&self) {
        if let Some(shared) = self.shared() {
            shared.abandon();
        }
        match self {
            Engine::Tcp(tcp) => tcp.abandon(),
            Engine::Hybrid(hybrid) => hybrid.tcp.abandon(),
            _ => {}
        }
    }
}

fn send_to_self(context: &OpContext) -> Result<u64> {
    let (send, recv) = (context.call.send, context.call.recv);
    if send.len_bytes != recv.len_bytes {
        let reason = "sends itself another number of elements than it receives".into();
        return Err(context.disagreement(Disagreement::Counts(reason), |_| unreachable!()));
    }
    // SAFETY: both sides belong to this call, have the same length, and lie apart, which was checked when
    // the call was made.
    unsafe { std::ptr::copy_nonoverlapping(send.base, recv.base, send.len_bytes) };
    Ok(now_ns())
}
