//! A configuration whose ranks are processes of their own. They run the same command line as this
//! process, and learn from a variable what they are to measure.
//!
//! Rank 0 writes what it finds to a memory file of this process, which has no name in any folder.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::reporter::Reporter;
use super::result::Row;
use crate::environment::Placement;
use crate::launcher::{self, Ended, Launch};
use crate::run::named::TransportName;
use crate::{Failure, Result};

/// The variable with the [`Job`] of the ranks.
const JOB: &str = "PACELINE_BENCH";

/// What the ranks of a configuration are to do.
#[derive(Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) transport: TransportName,
    pub(super) sizes: Vec<u64>,
    /// Whether rank 0 prints nothing.
    pub(super) is_quiet: bool,
    /// Where rank 0 adds a line for everything it finds.
    lines: PathBuf,
}

impl Job {
    /// The job of this process, if `paceline bench` has started it as a rank.
    pub(super) fn from_env(placement: Option<&Placement>) -> Result<Option<Self>> {
        let text = std::env::var(JOB).ok().filter(|_| placement.is_some());
        let job = text.map(|text| serde_json::from_str(&text)).transpose();
        job.map_err(|e| Failure::Usage(format!("{JOB} in the environment: {e}")))
    }

    /// Where rank 0 reports.
    pub(super) fn file(&self) -> Result<File> {
        let opened = File::options().append(true).open(&self.lines);
        opened.map_err(|e| Failure::io("cannot pass rows on", e))
    }
}

/// Starts ranks with these arguments of `paceline`: what they find, and how the launch ended.
pub(super) fn launch(
    args: impl IntoIterator<Item = OsString>,
    transport: TransportName,
    sizes: &[u64],
    nproc: usize,
    is_quiet: bool,
) -> Result<(Reporter, Ended)> {
    let lines = memfd_create("rows", MemfdFlags::CLOEXEC)
        .map_err(|e| Failure::io("no memory for the rows", e))?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), lines.as_raw_fd());
    let job = Job { transport, sizes: sizes.to_vec(), is_quiet, lines: path.into() };
    let job = serde_json::to_string(&job).map_err(|e| Failure::io("a job is no text", e))?;
    let variables = vec![(JOB, job.into())];
    let ended = launcher::launch_one_of_many(&Launch::of_own_program(args, nproc, variables)?)?;
    let mut reporter = Reporter::default();
    for line in BufReader::new(File::from(lines)).lines() {
        let line = line.map_err(|e| Failure::io("cannot read the rows", e))?;
        // A rank that is killed may leave half a line.
        if let Ok(found) = serde_json::from_str(&line) {
            reporter.report(found)?;
        }
    }
    if reporter.failed.is_none() {
        reporter.failed = why_failed(ended.code);
    }
    Ok((reporter, ended))
}

/// Why the ranks failed, if they did. They have said more themselves.
fn why_failed(code: u8) -> Option<String> {
    let how = match code {
        0 => return None,
        // By the custom of shells.
        129.. => format!("was killed by signal {}", code - 128),
        _ => format!("exited with code {code}"),
    };
    Some(format!("a rank {how}; what it said is on standard error"))
}

/// Measures `args`, a command line of `paceline bench`, for other commands, and prints nothing.
pub(crate) fn rows_of(
    args: &[impl AsRef<OsStr>],
    transport: TransportName,
    sizes: &[u64],
    nproc: usize,
) -> Result<Vec<Row>> {
    let args = args.iter().map(|arg| arg.as_ref().to_owned());
    let (reporter, ended) = launch(args, transport, sizes, nproc, true)?;
    match reporter.failed {
        // All ranks refuse a link together, and end well.
        Some(reason) if ended.code == 0 => Err(Failure::Link(reason)),
        Some(reason) => Err(Failure::Run(reason)),
        None => Ok(reporter.rows),
    }
}
