//! Starts the ranks of a run on this host, and ends them together.
//!
//! Each rank is a process in a process group of its own. When a rank fails, the others have 200 ms to notice the failure,
//! to write their last operations to a file and to exit by themselves. Then they get SIGTERM, and 300 ms later SIGKILL; 700
//! ms after the failure all ranks have ended. The launcher says which rank failed, how it ended, what it printed last, and
//! where the last operations are. Processes that ranks have left end with them; after a success they have `--grace` to end
//! by themselves.
//!
//! When the launcher is killed, even by a signal that it cannot catch, the ranks end too: each rank has
//! asked the kernel to kill it when its parent dies. A guard process notices the launcher's death when the pipe between
//! the two closes, and kills the process groups of the ranks. A process that has left its rank's group, as `setsid` does,
//! survives then.
//!
//! On several hosts, each has a launcher for its ranks. Launchers do not talk to each other: when a rank fails, the ranks
//! of the other hosts notice, and each launcher ends its own.

mod blame;
mod dumps;
mod elastic;
mod guard;
mod hosts;
mod orphans;
mod processes;
mod rank;
mod relay;
mod restarts;
mod signals;
mod start;
mod watch;

#[cfg(test)]
mod cluster_tests;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use paceline_collectives::MAX_RANKS;
use paceline_failure::outputs::check_folder;
use paceline_failure::{Failure, Result, usage};
use paceline_files::Printable;
use paceline_host::resources;
use paceline_host::text::warn;
use paceline_rendezvous::Rendezvous;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::environment::{self, Placement};
use crate::{LaunchArgs, StartFlags};

pub use elastic::{Elastic, join, join_from_env};
pub use guard::guard_groups;
pub use hosts::Hosts;
pub use restarts::launch_with_restarts;
pub use signals::last as asked_to_end;
pub use watch::{Ended, launch, launch_within};

/// Which attempt a launch is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    /// How many restarts there have been.
    pub made: usize,
    /// How many there may be.
    pub max: usize,
}

/// The program to start as ranks, and how.
#[derive(Default)]
pub struct Launch {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// The number of ranks to start on this host.
    pub num_ranks: usize,
    /// The hosts, if there are several.
    pub hosts: Option<Hosts>,
    /// Which attempt this is.
    pub restarts: Restarts,
    /// How ranks come and go. `None`: the end of one ends all.
    pub elastic: Option<Elastic>,
    /// Additional environment variables for every rank.
    pub variables: Vec<(&'static str, OsString)>,
    /// Where their output goes.
    pub output: Output,
    /// Whether rank 0 reads our standard input.
    pub inherits_stdin: bool,
    /// How long ranks may take to end after a signal from the user.
    pub grace: Duration,
}

/// Where the output of ranks goes.
#[derive(Debug, Default)]
pub struct Output {
    /// Whether rank 0 writes to our standard output itself, to draw on a terminal. Output of other ranks is passed on line
    /// by line.
    pub rank_0_owns_stdout: bool,
    /// The folder of a log file for each rank, `rank_N.log`, which gets both of its streams. It exists.
    pub log_folder: Option<PathBuf>,
    /// Whether output that goes to log files is printed too.
    pub tee: bool,
    /// Where ranks write their last operations when the run fails. `None`: a new temporary folder, removed if it stays
    /// empty.
    pub dump_folder: Option<PathBuf>,
}

impl Launch {
    /// A launch of this program with these arguments and variables. Rank 0 owns standard output.
    pub fn of_own_program(
        args: impl IntoIterator<Item = OsString>,
        num_ranks: usize,
        variables: Vec<(&'static str, OsString)>,
    ) -> Result<Self> {
        let command = [own_program()?.into_os_string()].into_iter().chain(args).collect();
        let output = Output { rank_0_owns_stdout: true, ..Output::default() };
        let grace = StartFlags::default().grace();
        Ok(Self { command, num_ranks, variables, output, grace, ..Self::default() })
    }

    /// This host's first rank.
    fn first_rank(&self) -> usize {
        self.hosts.as_ref().map_or(0, |hosts| hosts.own * self.num_ranks)
    }

    /// Whether rank 0 writes to our standard output itself. Not if another process may be rank 0 later.
    fn rank_0_owns_stdout(&self) -> bool {
        self.output.rank_0_owns_stdout && self.elastic.is_none()
    }

    /// The ranks of all hosts, which have equally many.
    fn world_size(&self) -> usize {
        self.hosts.as_ref().map_or(1, |hosts| hosts.count) * self.num_ranks
    }
}

fn own_program() -> Result<PathBuf> {
    let own_program = std::env::current_exe();
    own_program.map_err(|e| Failure::io("cannot find the program to start ranks with", e))
}

/// `paceline launch`.
pub fn launch_command(args: &LaunchArgs) -> Result<u8> {
    if args.start.join.is_some() {
        return usage("--join is for paceline train; leave it out");
    }
    args.start.check_elastic(args.nproc)?;
    let hosts = Hosts::resolve(&args.start)?;
    let elastic = Elastic::resolve(&args.start)?;
    check_program("launch", &args.command)?;
    if args.tee && args.log_dir.is_none() {
        return usage("--tee prints what --log-dir DIR keeps; pass that too");
    }
    if let Some(folder) = &args.log_dir {
        check_folder("--log-dir", folder, "pass a folder that you can write to")?;
        std::fs::create_dir_all(folder).map_err(Failure::cannot("make the folder", folder))?;
        let first = hosts.as_ref().map_or(0, |hosts| hosts.own * args.nproc);
        for path in (first..first + args.nproc).map(|rank| start::log_path(folder, rank)) {
            paceline_files::check_own(&path).map_err(|e| {
                Failure::Usage(format!(
                    "--log-dir {}: {}: {e}",
                    folder.printable(),
                    path.printable()
                ))
            })?;
        }
    }
    warn_of_ignored_master_flags(&args.start);
    let attempt = || Launch {
        command: args.command.clone(),
        num_ranks: args.nproc,
        hosts: hosts.clone(),
        output: Output { log_folder: args.log_dir.clone(), tee: args.tee, ..Output::default() },
        // The ranks are in a process group of their own, which cannot read the terminal of another process group.
        inherits_stdin: !std::io::stdin().is_terminal(),
        grace: args.start.grace(),
        elastic: elastic.clone(),
        ..Launch::default()
    };
    // Every attempt is the same.
    launch_with_restarts(args.start.max_restarts, |_| Ok(attempt()))
}

/// Warns of flags that have no effect on a single host.
pub fn warn_of_ignored_master_flags(flags: &StartFlags) {
    if flags.elastic.is_none()
        && flags.nnodes == Some(1)
        && (flags.master_addr.is_some() || flags.master_port.is_some())
    {
        warn(
            "--nnodes 1: the ranks meet on this host at a port that the launcher chooses; \
             --master-addr and --master-port have no effect",
        );
    }
}

/// Checks that the program exists where `exec` will look for it, for the command `by`. Otherwise every rank would report a wrong
/// name.
pub fn check_program(by: &str, command: &[OsString]) -> Result<()> {
    let Some(program) = command.first() else {
        return usage(format!("{by}: no program to start; pass one after --"));
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
    usage(format!(
        "{by}: there is no program {}{place}; check its name and permissions",
        program.printable()
    ))
}

/// The number of ranks of a command: as many as another launcher has started; else `--nproc`; else 2, or 1 on a single
/// core.
pub fn num_ranks(nproc: Option<usize>, placement: Option<&Placement>) -> Result<usize> {
    match (nproc, placement) {
        (Some(nproc), Some(placement)) => usage(format!(
            "--nproc {nproc} starts ranks of its own, but another launcher has started {}; leave --nproc out, or {}",
            placement.place.world_size,
            placement.unset()
        )),
        (None, Some(placement)) if placement.place.world_size > MAX_RANKS => usage(format!(
            "a world size of {}: a run can have {MAX_RANKS} ranks at most",
            placement.place.world_size
        )),
        (None, Some(placement)) => Ok(placement.place.world_size),
        (nproc, None) => Ok(nproc.unwrap_or_else(|| resources::num_cores().min(2))),
    }
}

type Variables = Vec<(&'static str, String)>;

/// The variables of all ranks of an attempt, named as by torchrun; and the port at which they meet, held while they run, if
/// this launcher has chosen it. With several hosts, the ranks meet where the user states; otherwise the secret is fresh.
fn rank_variables(launch: &Launch) -> Result<(Variables, Option<OwnedFd>)> {
    let mut variables = vec![
        ("WORLD_SIZE", launch.world_size().to_string()),
        ("LOCAL_WORLD_SIZE", launch.num_ranks.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", launch.restarts.made.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", launch.restarts.max.to_string()),
    ];
    let (address, port, secret, held) = if let Some(hosts) = &launch.hosts {
        variables.push((environment::LAUNCH, Rendezvous::fresh_secret()?));
        variables.push(("GROUP_RANK", hosts.own.to_string()));
        variables.push(("GROUP_WORLD_SIZE", hosts.count.to_string()));
        let secret = Rendezvous::secret_of_restart(&hosts.secret, launch.restarts.made);
        (hosts.address.clone(), hosts.port, secret, None)
    } else if let Some(at) = launch.elastic.as_ref().and_then(|elastic| elastic.at.as_ref()) {
        (at.address.clone(), at.port, at.secret.clone(), None)
    } else {
        let (port, held) =
            held_port().map_err(|e| Failure::io("no free port for MASTER_PORT", e))?;
        (Ipv4Addr::LOCALHOST.to_string(), port, Rendezvous::fresh_secret()?, Some(held))
    };
    if launch.elastic.is_some() {
        variables.push((environment::MEMBERS, format!("{address}:{port}")));
    }
    variables.push(("MASTER_ADDR", address));
    variables.push(("MASTER_PORT", port.to_string()));
    variables.push((environment::SECRET, secret));
    Ok((variables, held))
}

/// A free port for `MASTER_PORT`, held so that no other program is given it. This socket does not listen, so a rank that
/// sets `SO_REUSEADDR`, as nearly all programs do, can.
fn held_port() -> rustix::io::Result<(u16, OwnedFd)> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    Ok((SocketAddrV4::try_from(getsockname(&socket)?)?.port(), socket))
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
        return usage("no program to start");
    };
    // This returns only if the program cannot be started.
    let error = Command::new(program).args(args).exec();
    usage(format!("cannot start {}: {error}", program.printable()))
}
