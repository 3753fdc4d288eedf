//! Starts the ranks of a run on this host, and ends them together.
//!
//! Each rank is a process in a group of its own. When one fails, the others have 200 ms to notice, to
//! write their last operations down and to end by themselves; then they are asked to, 350 ms later
//! made to, and 700 ms after the failure all are gone. The launcher says which rank it was, how it
//! ended, what it said last, and where the operations are. When the launcher is killed,
//! even by a signal that it cannot catch, the ranks end too: each asks the kernel to be killed with
//! its parent, and a guard process, which waits for the launcher's end of a pipe to close, kills what
//! the ranks may have started.

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

use crate::cli::LaunchArgs;
use crate::{Failure, Result, environment};

pub use guard::guard_groups;
pub use ranks::{Ended, launch, launch_one_of_many};

/// What to start, how often.
#[derive(Debug)]
pub struct Launch {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// How many ranks.
    pub num_ranks: usize,
    /// More variables for every rank.
    pub variables: Vec<(&'static str, OsString)>,
    /// Rank 0 writes to our standard output itself, so that it can draw on a terminal; otherwise all
    /// ranks' output is passed on line by line.
    pub rank_0_owns_stdout: bool,
    /// Where ranks write their last operations when the run fails. Without one, a folder is made for
    /// that among the system's temporary ones; it stays only if something was written to it.
    pub dump_folder: Option<PathBuf>,
}

/// `paceline launch`.
pub fn launch_command(args: &LaunchArgs) -> Result<u8> {
    check_num_ranks("--nproc", args.nproc)?;
    check_program(&args.command)?;
    launch(&Launch {
        command: args.command.clone(),
        num_ranks: args.nproc,
        variables: Vec::new(),
        rank_0_owns_stdout: false,
        dump_folder: None,
    })
}

/// Looks a program up as starting it would, so that a wrong name is said once and not by every rank.
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

/// Checks a number of ranks that the user gave by `flag`.
pub fn check_num_ranks(flag: &str, num_ranks: usize) -> Result<()> {
    if (1..=MAX_RANKS).contains(&num_ranks) {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "{flag} {num_ranks}: a host can have 1 to {MAX_RANKS} ranks; pass a number in that range"
    )))
}

/// The variables by which a rank knows its place.
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
    // The launcher may have died before the kernel was asked.
    if getppid().map(Pid::as_raw_nonzero).map(|pid| pid.get() as u32) != Some(parent) {
        return Err(Failure::Consequence("the launcher ended before its rank started".into()));
    }
    let Some((program, args)) = command.split_first() else {
        return Err(Failure::Usage("no program to start".into()));
    };
    // Returns only if the program cannot be started.
    let error = Command::new(program).args(args).exec();
    Err(Failure::Usage(format!("cannot start {}: {error}", program.display())))
}
