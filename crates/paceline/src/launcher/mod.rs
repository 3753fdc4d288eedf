//! Starts the ranks of a run on this host, and ends them together.
//!
//! Each rank is a process in a process group of its own. When a rank fails, the others have 200 ms to
//! notice the failure, to write their last operations to a file and to exit by themselves. Then they get
//! SIGTERM, and 300 ms later SIGKILL; 700 ms after the failure all ranks have ended. The launcher says
//! which rank failed, how it ended, what it printed last, and where the last operations are.
//!
//! When the launcher is killed, even by a signal that it cannot catch, the ranks end too: each rank has
//! asked the kernel to kill it when its parent dies. The processes that the ranks have started are killed
//! by a guard process, which notices the launcher's death when the pipe between the two closes.

mod dumps;
mod guard;
mod ranks;
mod relay;

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use paceline_collectives::MAX_RANKS;
use paceline_rendezvous::Rendezvous;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::environment::Placement;
use crate::{Failure, Result, environment, resources};

pub use guard::guard_groups;
pub use ranks::{Ended, launch, launch_one_of_many};

/// The program to start as ranks, and how.
#[derive(Debug)]
pub struct Launch {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// The number of ranks to start.
    pub num_ranks: usize,
    /// Additional environment variables for every rank.
    pub variables: Vec<(&'static str, OsString)>,
    /// Whether rank 0 writes to our standard output itself, so that it can draw on a terminal. The
    /// output of other ranks is always passed on line by line.
    pub rank_0_owns_stdout: bool,
    /// The folder to which ranks write their last operations when the run fails. `None` means a new
    /// temporary folder, which is removed unless something was written to it.
    pub dump_folder: Option<PathBuf>,
}

impl Launch {
    /// A launch of this program itself with the given arguments and additional environment variables.
    /// Rank 0 owns standard output.
    pub fn of_own_program(
        args: impl IntoIterator<Item = OsString>,
        num_ranks: usize,
        variables: Vec<(&'static str, OsString)>,
    ) -> Result<Self> {
        let command = [own_program()?.into_os_string()].into_iter().chain(args).collect();
        Ok(Self { command, num_ranks, variables, rank_0_owns_stdout: true, dump_folder: None })
    }
}

fn own_program() -> Result<PathBuf> {
    let own_program = std::env::current_exe();
    own_program.map_err(|e| Failure::io("cannot find the program to start ranks with", e))
}

/// Runs `paceline launch`: starts `nproc` ranks of `command`, and returns the code to exit with.
pub fn launch_command(nproc: usize, command: &[OsString]) -> Result<u8> {
    check_num_ranks("--nproc", nproc)?;
    check_program(command)?;
    launch(&Launch {
        command: command.to_vec(),
        num_ranks: nproc,
        variables: Vec::new(),
        rank_0_owns_stdout: false,
        dump_folder: None,
    })
}

/// Checks that the program exists where `exec` will look for it. The launcher checks this once, so that a
/// wrong name is not reported by every rank.
fn check_program(command: &[OsString]) -> Result<()> {
    let Some(program) = command.first() else {
        return Err(Failure::Usage("launch: no program to start; pass one after --".into()));
    };
    let is_program = |path: &Path| {
        let metadata = path.metadata();
        metadata.is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    let has_folder = Path::new(program).components().count() > 1;
    let search = std::env::var_os("PATH").unwrap_or_default();
    let found = if has_folder {
        is_program(Path::new(program))
    } else {
        std::env::split_paths(&search).any(|folder| is_program(&folder.join(program)))
    };
    if found {
        return Ok(());
    }
    let place = if has_folder { "" } else { " in PATH" };
    Err(Failure::Usage(format!(
        "launch: there is no program {}{place}; check its name and permissions",
        program.display()
    )))
}

/// Returns the number of ranks of a command: the number that another launcher has started, or else that
/// of `--nproc`, or else 2 (1 if there is only one core).
pub fn num_ranks(nproc: Option<usize>, placement: Option<&Placement>) -> Result<usize> {
    let started = placement.map(|placement| placement.place.world_size);
    let (flag, num_ranks) = match (nproc, started) {
        (None, None) => return Ok(resources::num_cores().min(2)),
        (None, Some(started)) => ("WORLD_SIZE", started),
        (Some(nproc), None) => ("--nproc", nproc),
        (Some(nproc), Some(started)) => {
            return Err(Failure::Usage(format!(
                "--nproc {nproc} starts ranks of its own, but another launcher has started {started}; \
                 leave --nproc out, or unset RANK and WORLD_SIZE"
            )));
        }
    };
    check_num_ranks(flag, num_ranks)?;
    Ok(num_ranks)
}

/// Checks a number of ranks that the user gave by `flag`.
pub fn check_num_ranks(flag: &str, num_ranks: usize) -> Result<()> {
    if (1..=MAX_RANKS).contains(&num_ranks) {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "{flag} {num_ranks}: a host can have 1 to {MAX_RANKS} ranks; pass a number in that range"
    )))
}

/// The environment variables that tell a rank its place in the group.
fn rank_variables(rank: usize, world_size: usize, port: u16, secret: &str) -> Vec<(&str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", world_size.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", world_size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port.to_string()),
        (environment::SECRET, secret.into()),
    ]
}

/// A port that is free now, and a fresh secret.
fn rendezvous_point() -> Result<(u16, String)> {
    let free = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|l| l.local_addr());
    let port = free.map_err(|e| Failure::io("no free port for MASTER_PORT", e))?.port();
    Ok((port, Rendezvous::fresh_secret()?))
}

/// `paceline __rank`: asks to be killed when the launcher dies, then becomes the rank's program.
pub fn become_rank(parent: u32, command: &[OsString]) -> Result<u8> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| Failure::io("cannot tie this rank to its launcher", e))?;
    // The launcher may have ended before this request.
    if getppid().map(Pid::as_raw_nonzero).map(|pid| pid.get() as u32) != Some(parent) {
        return Err(Failure::Consequence("the launcher ended before its rank started".into()));
    }
    let Some((program, args)) = command.split_first() else {
        return Err(Failure::Usage("no program to start".into()));
    };
    // This returns only if the program cannot be started.
    let error = Command::new(program).args(args).exec();
    Err(Failure::Usage(format!("cannot start {}: {error}", program.display())))
}
