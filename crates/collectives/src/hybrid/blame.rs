//! Which ranks an error is about when hosts can no longer reach each other.
//!
//! A rank waits for the ranks of its host and of its rail. If another host falls silent, some ranks wait for a
//! rank of their own host, which itself waits for a rank of the silent host. All of them must name the latter.
//! So a rank whose wait on its rail has failed reports to the ranks of its host which ranks it has waited
//! for. A rank that has waited only for ranks that are alive looks up these reports.

use std::time::Duration;

use paceline_trace::now_ns;
use paceline_trace::runtime::sleep;

use super::Hybrid;
use crate::CollectiveError;
use crate::OpKind;
use crate::context::{OpContext, Waited};

/// How much later another rank of this host may notice that the same host is silent.
const REPORT_LIMIT: Duration = Duration::from_millis(120);

impl Hybrid {
    /// The error of a failed operation, which names the ranks that caused the failure. `alive` are the ranks of the rail that
    /// have given up too.
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
        let mut remote = error.culprits();
        // A dead rank stays in the list: the end of its connection does not show that it is alive.
        let is_lost = matches!(error, CollectiveError::PeerLost { .. });
        remote.retain(|rank| !here.contains(rank) && (is_lost || !alive.contains(rank)));
        if !remote.is_empty() {
            self.local.control().report_missing(&remote);
            return error;
        }
        if is_lost {
            return error;
        }
        let mut waited = Waited::begin(now_ns());
        while self.local.control().missing_remote_ranks().is_empty()
            && waited.until(now_ns()) < REPORT_LIMIT
        {
            sleep(Duration::from_millis(1));
        }
        match self.local.control().missing_remote_ranks() {
            // A rank of this host is missing, or no rank knows more.
            missing if missing.is_empty() => error,
            missing => context.given_up(missing),
        }
    }
}
