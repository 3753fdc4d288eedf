//! Which ranks an error is about when hosts can no longer reach each other.
//!
//! A rank waits for the ranks of its host, and for those of its rail. If a host falls silent, some ranks wait for a rank
//! of their own host, which waits for the silent one. They must name the silent one. So whoever waits on its rail in
//! vain tells the ranks of its host for whom, and a rank that has only waited for ranks that are alive asks there.

use std::time::Duration;

use paceline_trace::now_ns;

use super::Hybrid;
use crate::CollectiveError;
use crate::OpKind;
use crate::context::OpContext;

/// How much later another rank of this host may notice the same silence.
const HEARSAY: Duration = Duration::from_millis(120);

impl Hybrid {
    /// The error of a failed operation, with the ranks that it is about. `alive` are the ranks on the rail that have given up
    /// as well.
    pub(super) fn blame(
        &self,
        context: &OpContext,
        error: CollectiveError,
        alive: &[usize],
    ) -> CollectiveError {
        // A message concerns two ranks only, and the others go on.
        let concerns_all =
            !matches!(context.call.kind, OpKind::Send | OpKind::Recv | OpKind::SendRecv);
        let is_wait = matches!(
            error,
            CollectiveError::TimedOut { .. }
                | CollectiveError::Broken { .. }
                | CollectiveError::PeerLost { .. }
        );
        if !concerns_all || !is_wait {
            return error;
        }
        let here = self.ranks_of(self.node());
        let mut beyond = error.culprits();
        // The connection to a dead rank has ended too, and that is not a sign of life.
        let is_lost = matches!(error, CollectiveError::PeerLost { .. });
        beyond.retain(|rank| !here.contains(rank) && (is_lost || !alive.contains(rank)));
        if !beyond.is_empty() {
            self.local.control().tell_beyond(&beyond);
            return error;
        }
        if is_lost {
            return error;
        }
        let deadline = now_ns() + HEARSAY.as_nanos() as u64;
        while self.local.control().beyond().is_empty() && now_ns() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        match self.local.control().beyond() {
            // A rank of this host is missing, or nobody knows more.
            missing if missing.is_empty() => error,
            missing => context.given_up(missing),
        }
    }
}
