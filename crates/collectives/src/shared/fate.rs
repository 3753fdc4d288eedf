//! How a rank's part in a group ends, and why a wait ends without its gate opening.

use crate::call::Verdict;

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It dropped its group.
    Left = 1,
    /// It died.
    Lost = 2,
}

/// Why a wait ended without its gate opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitError {
    Gone {
        peer: usize,
        fate: Fate,
    },
    TimedOut,
    /// Another rank stopped waiting first.
    GivenUp,
    /// Two calls do not fit together, so nobody can go on.
    Conflict(Verdict),
}
