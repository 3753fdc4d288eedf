//! How a rank leaves a group, and why a wait can end before its phase completes.

use crate::call::Conflict;

/// How a rank's membership in the group ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The rank left in order: it dropped its group.
    Left = 1,
    /// The rank died.
    Lost = 2,
}

/// Why a wait ended before its phase completed, or before its wake-up came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitError {
    /// This peer is no longer in the group.
    Gone { peer: usize, fate: Fate },
    /// This rank's time limit has passed.
    TimedOut,
    /// Another rank stopped waiting first.
    GivenUp,
    /// Two calls do not match, so no rank can go on.
    Conflict(Conflict),
}
