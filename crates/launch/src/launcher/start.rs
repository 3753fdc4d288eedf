//! Starting a rank: a process in a process group of its own, whose output is passed on and whose end is
//! reported.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use paceline_collectives::DUMP_FOLDER;
use paceline_rendezvous::{ERROR_FILE, LAUNCH};
use paceline_trace::runtime::now;
use rustix::process::{Pid, Signal, kill_process_group};
use tracing::debug;

use super::rank::{LaunchEvent, Rank};
use super::relay::{OutputRoute, RankStream};
use super::{Launch, Restarts};
use crate::environment::{MEMBER, MEMBERS};

/// Variables of another launcher. If torchrun has started this process, the new ranks must not use torchrun's store or files.
const OTHERS: [&str; 8] = [
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    LAUNCH,
    ERROR_FILE,
    MEMBERS,
    MEMBER,
];

/// Starts ranks of a launch. `own_program` becomes a rank's program.
#[derive(Clone, Copy)]
pub(super) struct Starter<'a> {
    pub(super) launch: &'a Launch,
    /// The variables that all ranks get.
    pub(super) variables: &'a [(&'static str, String)],
    pub(super) own_program: &'a Path,
    /// Without it, ranks write neither their last operations nor why they failed.
    pub(super) dump_folder: Option<&'a Path>,
    pub(super) events: &'a Sender<LaunchEvent>,
}

impl Starter<'_> {
    /// Starts a rank, given its number on this host and, if it has one, in the list of members. `restarts` says how often it has
    /// been started before.
    pub(super) fn start(
        &self,
        local: usize,
        number: Option<u64>,
        restarts: Restarts,
    ) -> io::Result<Rank> {
        let Self { launch, dump_folder, .. } = *self;
        let rank = launch.first_rank() + local;
        let owns_stdout = launch.rank_0_owns_stdout() && rank == 0;
        let log = launch.output.log_folder.as_deref();
        let log = log.map(|folder| log_file(folder, rank, restarts)).transpose()?;
        let mut command = Command::new(self.own_program);
        OTHERS.iter().for_each(|name| {
            command.env_remove(name);
        });
        let error_file = dump_folder.map(|folder| folder.join(format!("rank_{rank}.error.json")));
        if let (Some(folder), Some(file)) = (dump_folder, &error_file) {
            // An earlier run with the same folder may have left one.
            let _ = std::fs::remove_file(file);
            command.env(DUMP_FOLDER, folder).env(ERROR_FILE, file);
        }
        let child = command
            .arg("__rank")
            .arg(std::process::id().to_string())
            .arg("--")
            .args(&launch.command)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", local.to_string())
            .envs(number.map(|number| (MEMBER, number.to_string())))
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .envs(launch.variables.iter().map(|(name, value)| (name, value)))
            .stdin(if launch.inherits_stdin && rank == 0 {
                Stdio::inherit()
            } else {
                Stdio::null()
            })
            .stdout(if owns_stdout { Stdio::inherit() } else { Stdio::piped() })
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let program = launch.command.first().map(|program| program.to_string_lossy());
        debug!("rank {rank} is process {}, {}", child.id(), program.unwrap_or_default());
        let started = Rank { number, ..Rank::new(Pid::from_child(&child), error_file) };
        let route = OutputRoute {
            rank,
            is_printed: launch.output.log_folder.is_none() || launch.output.tee,
            has_prefix: !launch.output.rank_0_owns_stdout,
            log: log.map(|file| Arc::new(Mutex::new(Some(file)))),
        };
        attend(&started, child, local, &route, self.events)?;
        Ok(started)
    }
}

/// The path of a rank's log file.
pub(super) fn log_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank_{rank}.log"))
}

/// The log file of a rank: a new one, or after a restart the one of the attempts before, with a line that says so.
fn log_file(folder: &Path, rank: usize, restarts: Restarts) -> io::Result<File> {
    let path = log_path(folder, rank);
    if restarts.made == 0 {
        return paceline_files::create(&path);
    }
    let mut file = paceline_files::open_or_create(&path)?;
    // A process of an earlier attempt that still writes must not write over this one's lines.
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::APPEND)?;
    writeln!(file, "paceline: restart {} of {}", restarts.made, restarts.max)?;
    Ok(file)
}

/// Starts the threads that pass on the output of a rank and wait for its end. If one is refused, the rank is killed.
fn attend(
    started: &Rank,
    mut child: Child,
    local: usize,
    route: &OutputRoute,
    events: &Sender<LaunchEvent>,
) -> io::Result<()> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let relays = || {
        let lines = &started.last_lines;
        stdout.map_or(Ok(()), |from| lines.relay(from, RankStream::Stdout, route.clone()))?;
        stderr.map_or(Ok(()), |from| lines.relay(from, RankStream::Stderr, route.clone()))
    };
    let events = events.clone();
    let child = Arc::new(Mutex::new(child));
    let waited = child.clone();
    let outcome = relays().and_then(|()| {
        let wait = paceline_trace::thread_builder(format!("wait-{}", route.rank));
        wait.spawn(move || wait_for(local, &waited, &events)).map(drop)
    });
    outcome.inspect_err(|_| {
        let _ = kill_process_group(started.group, Signal::KILL);
        let _ = child.lock().map(|mut child| child.wait());
    })
}

/// Waits until a rank ends. Processes that it has started may go on: see [`super::orphans`].
fn wait_for(local: usize, child: &Mutex<Child>, events: &Sender<LaunchEvent>) {
    let Ok(mut child) = child.lock() else { return };
    if let Ok(status) = child.wait() {
        // No one receives this event once the launcher has decided to end.
        let _ = events.send(LaunchEvent::Ended { local, status, at: now() });
    }
}
