//! The reports of a group while it runs: a log of its operations, and, when it fails, a file with the rank's most
//! recent operations, in this group and in related groups.
//!
//! Input: calls and records. Output: lines on standard error, and a file of JSON lines.
//! This module knows nothing of how operations work.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use paceline_files::Printable;
use paceline_trace::lock;
use serde::Serialize;
use tracing::{Level, debug, enabled, trace};

use crate::call::Call;
use crate::record::{OpRecord, OpTimes, RecentRecords};

/// How much of the communication is logged on standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CommLog {
    /// Nothing.
    #[default]
    Off,
    /// Every operation, when it is finished, with its times.
    Info,
    /// Also when it starts.
    Trace,
}

impl std::str::FromStr for CommLog {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" | "off" => Ok(CommLog::Off),
            "info" => Ok(CommLog::Info),
            "trace" => Ok(CommLog::Trace),
            _ => Err(format!("{text:?} is no level of logging; use off, info or trace")),
        }
    }
}

/// The environment variable that holds the log level.
pub const COMM_LOG: &str = "PACELINE_COMM_LOG";
/// The environment variable that names the dump folder, for the most recent operations of a group that fails.
pub const DUMP_FOLDER: &str = "PACELINE_DUMP_FOLDER";

#[derive(Debug)]
pub(crate) struct FlightRecorder {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) log: CommLog,
    pub(crate) dump_folder: Option<PathBuf>,
    /// The group's name: `world`, or `world/1.0` for the ranks of color 0 in its second split.
    pub(crate) group: String,
    /// The group's number on this rank.
    pub(crate) number: u32,
    /// The operations of all groups of this rank that descend from the same group.
    pub(crate) records: Arc<Mutex<RecentRecords>>,
    /// Whether the records have been written. The lock is held while they are.
    pub(crate) is_dumped: Mutex<bool>,
}

/// One line of a dump. `group` is the number of the group on this rank, as in the first line of its own dump.
#[derive(Serialize)]
struct DumpLine {
    group: u32,
    seq: u32,
    op: &'static str,
    bytes: usize,
    state: &'static str,
    submitted_ns: u64,
    started_ns: u64,
    present_ns: u64,
    finished_ns: u64,
}

/// The first line of a dump.
#[derive(Serialize)]
struct DumpHead<'a> {
    rank: usize,
    world_size: usize,
    group: &'a str,
    number: u32,
    process: u32,
    cause: &'a str,
    dumped_ns: u64,
}

impl FlightRecorder {
    pub(crate) fn begins(&self, call: &Call, seq: u32, times: OpTimes) {
        lock(&self.records).begin(call.record((self.number, self.world), seq, times));
        self.log(CommLog::Trace, || {
            format!("rank {} {} #{seq} {} starts", self.rank, self.group, call.describe())
        });
    }

    pub(crate) fn ends(&self, call: &Call, seq: u32, times: OpTimes) {
        lock(&self.records).end(self.number, times);
        self.log(CommLog::Info, || {
            let us = |ns: u64| ns as f64 / 1e3;
            format!(
                "rank {} {} #{seq} {} queued {:.1} us, waited {:.1} us, moved {} bytes in {:.1} us",
                self.rank,
                self.group,
                call.describe(),
                us(times.queue_ns()),
                us(times.wait_ns()),
                call.message_bytes(),
                us(times.move_ns()),
            )
        });
    }

    /// Writes the records to the dump folder, unless they have been written before.
    pub(crate) fn dump(&self, cause: &str) {
        let mut is_dumped = lock(&self.is_dumped);
        if !*is_dumped {
            *is_dumped = true;
            self.write_records(cause, lock(&self.records).iter());
        }
    }

    /// Writes the records again, so that they include the operation that failed.
    pub(crate) fn dump_again(&self, cause: &str) {
        *lock(&self.is_dumped) = false;
        self.dump(cause);
    }

    fn write_records<'a>(&self, cause: &str, records: impl Iterator<Item = &'a OpRecord>) {
        self.log(CommLog::Info, || format!("rank {} {} failed: {cause}", self.rank, self.group));
        let Some(path) = self.path() else { return };
        let head = DumpHead {
            rank: self.rank,
            world_size: self.world,
            group: &self.group,
            number: self.number,
            process: std::process::id(),
            cause,
            dumped_ns: paceline_trace::now_ns(),
        };
        let mut text = serde_json::to_string(&head).unwrap_or_default();
        for record in records {
            let OpTimes { submitted_ns, started_ns, present_ns, finished_ns, .. } = record.times;
            let state = if finished_ns == 0 { "running" } else { "finished" };
            let line = DumpLine {
                group: record.group,
                seq: record.seq,
                op: record.kind.name(),
                bytes: record.bytes,
                state,
                submitted_ns,
                started_ns,
                present_ns,
                finished_ns,
            };
            let _ = write!(text, "\n{}", serde_json::to_string(&line).unwrap_or_default());
        }
        text.push('\n');
        // The folder may be gone or full. The error that is being reported matters more.
        if let Err(error) = replace(&path, |file| file.write_all(text.as_bytes())) {
            self.say(format!("cannot write {}: {error}", path.printable()));
        }
    }

    pub(crate) fn withdraw(&self) {
        let was_dumped = std::mem::take(&mut *lock(&self.is_dumped));
        if let Some(path) = self.path().filter(|_| was_dumped) {
            let _ = std::fs::remove_file(path);
        }
    }

    fn path(&self) -> Option<PathBuf> {
        let name = format!("{}-rank{}.jsonl", self.group.replace('/', "-"), self.rank);
        Some(self.dump_folder.as_ref()?.join(name))
    }

    /// Logs a line as an event, and on standard error if the options of the group ask for it.
    fn log(&self, level: CommLog, line: impl FnOnce() -> String) {
        let is_event = match level {
            CommLog::Trace => enabled!(Level::TRACE),
            _ => enabled!(Level::DEBUG),
        };
        if !is_event && self.log < level {
            return;
        }
        let line = line();
        match level {
            CommLog::Trace => trace!("{line}"),
            _ => debug!("{line}"),
        }
        if self.log >= level {
            self.say(line);
        }
    }

    fn say(&self, line: String) {
        // A closed standard error must not stop the communication.
        let line = paceline_files::printable_lines(&line);
        let _ = writeln!(std::io::stderr().lock(), "comm: {line}");
    }
}

impl Drop for FlightRecorder {
    fn drop(&mut self) {
        // An operation that failed counts as running as long as the group exists.
        lock(&self.records).forget(self.number);
    }
}

/// Replaces a file by the output of `write`, or leaves the old file: another thread may be ending the process.
fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}", std::process::id()));
    let partial = PathBuf::from(partial);
    let written = paceline_files::create(&partial)
        .and_then(|mut file| write(&mut file))
        .and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        // Nothing stays of a file that a full disk has cut off.
        let _ = std::fs::remove_file(&partial);
    }
    written
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_dump_that_is_cut_off_leaves_the_one_from_before_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("world-rank0.jsonl");
        replace(&path, |file| file.write_all(b"before\n")).unwrap();
        let cut = |file: &mut File| {
            file.write_all(b"aft")?;
            Err(io::ErrorKind::StorageFull.into())
        };
        assert_eq!(replace(&path, cut).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "before\n");
        // A folder of that name refuses the last operation.
        let occupied = folder.path().join("world-rank1.jsonl");
        std::fs::create_dir(&occupied).unwrap();
        replace(&occupied, |file| file.write_all(b"after\n")).unwrap_err();
        replace(&folder.path().join("gone/world-rank2.jsonl"), |_| Ok(())).unwrap_err();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
