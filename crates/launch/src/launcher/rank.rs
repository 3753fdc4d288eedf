//! A rank of this host, as its launcher sees it, and the events of a launch.

use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Instant;

use paceline_rendezvous::MemberEvent;
use rustix::process::{Pid, Signal};

use super::relay::LastLines;

/// A rank that was started.
#[derive(Debug)]
pub(super) struct Rank {
    /// Its process, and its process group.
    pub(super) group: Pid,
    pub(super) last_lines: LastLines,
    pub(super) ended: Option<RankEnd>,
    /// The file in which it says why it has failed.
    pub(super) error_file: Option<PathBuf>,
    /// Its number in the list of members, in a run whose ranks come and go. `None` if it joins as a new member.
    pub(super) number: Option<u64>,
    /// The last signal by which the launcher has asked it to end.
    pub(super) asked: Option<Signal>,
}

impl Rank {
    pub(super) fn new(group: Pid, error_file: Option<PathBuf>) -> Self {
        let last_lines = LastLines::default();
        Self { group, last_lines, ended: None, error_file, number: None, asked: None }
    }
}

/// The end of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankEnd {
    pub(super) status: ExitStatus,
    pub(super) at: Instant,
    /// Whether it is the answer to a signal of the launcher.
    pub(super) was_asked: bool,
}

/// The events of a launch. A rank has its number on this host here.
#[derive(Debug)]
pub(super) enum LaunchEvent {
    Ended { local: usize, status: ExitStatus, at: Instant },
    Signal(i32),
    Member(MemberEvent),
}
