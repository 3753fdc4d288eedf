//! The launcher's view of running processes: the kernel's, or in a test those of a simulated cluster.

use rustix::process::{Pid, Signal};

use super::rank::Rank;

/// The processes of a launch. A rank is named by its process group.
pub(super) trait Processes {
    /// Sends a signal to a rank and its group.
    fn signal(&self, rank: Pid, signal: Signal);

    /// The activity of a rank, in words.
    fn activity(&self, rank: Pid) -> &'static str;

    /// The processes that go on without their rank.
    fn orphans(&self, ranks: &[Rank]) -> Vec<Pid>;

    /// Tells the user.
    fn say(&self, text: &str);
}
