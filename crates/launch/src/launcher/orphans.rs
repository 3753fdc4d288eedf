//! The processes that ranks have started, and that go on without their rank, in any group or session.
//!
//! This process is their subreaper: when their parent ends, the kernel makes them children of this process. So they can
//! be found, signaled and reaped. This file does not know when they have to end.

use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpid};

use super::rank::Rank;

/// Distinguishes them from the other children of this process.
#[derive(Debug)]
pub(super) struct Orphans {
    /// The children that this process had before its ranks.
    others: Vec<Pid>,
}

impl Orphans {
    /// From now on, the orphans of this process's descendants become its children.
    pub(super) fn adopt() -> Self {
        // A system that refuses gives orphans to its first process, as it would without the call.
        let _ = set_child_subreaper(Some(getpid()));
        Self { others: children() }
    }

    /// The orphans that still run. The others are reaped.
    pub(super) fn running(&self, ranks: &[Rank]) -> Vec<Pid> {
        let is_rank = |pid: &Pid| ranks.iter().any(|r| r.ended.is_none() && r.group == *pid);
        let mut all = children();
        all.retain(|pid| !self.others.contains(pid) && !is_rank(pid));
        all.retain(|pid| matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None)));
        all
    }
}

/// The state of a process, as the kernel abbreviates it, and its parent.
pub(super) fn state(pid: Pid) -> Option<(char, i32)> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // They follow the name of the program, which may hold anything.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// The children of this process. Not every kernel lists them for a process, so all processes are asked.
fn children() -> Vec<Pid> {
    let own = getpid().as_raw_nonzero().get();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    pids.filter(|pid| state(*pid).is_some_and(|(_, parent)| parent == own)).collect()
}
