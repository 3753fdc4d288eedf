//! Runs the ranks of a configuration as processes. They get the same command line as this process, and an
//! environment variable with their job.
//!
//! Rank 0 writes its results to a file in this process's memory, which has no name in any folder.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use paceline_failure::{Failure, Result};
use paceline_launch::TransportName;
use paceline_launch::environment::Placement;
use paceline_launch::launcher::{self, Ended, Launch};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::reporter::Reporter;
use super::result::Row;

/// The environment variable with the [`RankJob`] of the ranks, as JSON.
const JOB: &str = "PACELINE_BENCH";

/// The job of the ranks of a configuration.
#[derive(Serialize, Deserialize)]
pub(super) struct RankJob {
    pub(super) transport: TransportName,
    pub(super) sizes: Vec<u64>,
    /// Whether rank 0 prints nothing.
    pub(super) is_quiet: bool,
    /// The file to which rank 0 appends a line for each result.
    lines: PathBuf,
}

impl RankJob {
    /// The job of this process, if `paceline bench` has started it as a rank.
    pub(super) fn from_env(placement: Option<&Placement>) -> Result<Option<Self>> {
        let text = std::env::var(JOB).ok().filter(|_| placement.is_some());
        let job = text.map(|text| serde_json::from_str(&text)).transpose();
        job.map_err(|e| Failure::Usage(format!("{JOB} in the environment: {e}")))
    }

    /// Opens the file to which rank 0 reports.
    pub(super) fn file(&self) -> Result<File> {
        let opened = File::options().append(true).open(&self.lines);
        opened.map_err(|e| Failure::io("cannot pass rows on", e))
    }
}

/// Starts ranks with these arguments of `paceline`. Returns their results, and how the launch ended.
pub(super) fn launch(
    args: impl IntoIterator<Item = OsString>,
    transport: TransportName,
    sizes: &[u64],
    nproc: usize,
    is_quiet: bool,
) -> Result<(Reporter, Ended)> {
    let (file, lines) = memory_file("rows")?;
    let job = RankJob { transport, sizes: sizes.to_vec(), is_quiet, lines };
    let job = serde_json::to_string(&job).map_err(|e| Failure::io("cannot write a job", e))?;
    let variables = vec![(JOB, job.into())];
    let ended = launcher::launch(&Launch::of_own_program(args, nproc, variables)?)?;
    let mut reporter = Reporter::default();
    for line in BufReader::new(file).lines() {
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

/// A file in memory, and the name by which other processes open it.
pub(super) fn memory_file(name: &str) -> Result<(File, PathBuf)> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC)
        .map_err(|e| Failure::io(format!("no memory for the {name}"), e))?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file.into(), path.into()))
}

/// The reason of a failure, from the launcher's exit code; `None` if the ranks did not fail. The ranks
/// have printed the details themselves.
fn why_failed(code: u8) -> Option<String> {
    let how = match code {
        0 => return None,
        // Shells use 128 plus the number of the signal.
        129.. => format!("was killed by signal {}", code - 128),
        _ => format!("exited with code {code}"),
    };
    Some(format!("a rank {how}; its messages are on standard error"))
}

/// Measures for another command, and prints nothing. `args` is a command line of `paceline bench`.
pub fn rows_of(
    args: &[impl AsRef<OsStr>],
    transport: TransportName,
    sizes: &[u64],
    nproc: usize,
) -> Result<Vec<Row>> {
    let args = args.iter().map(|arg| arg.as_ref().to_owned());
    let (reporter, ended) = launch(args, transport, sizes, nproc, true)?;
    match reporter.failed {
        // Ranks that refuse a link do so together, and exit with 0.
        Some(reason) if ended.code == 0 => Err(Failure::Link(reason)),
        Some(reason) => Err(Failure::Run(reason)),
        None => Ok(reporter.rows),
    }
}
