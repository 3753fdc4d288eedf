//! Options of a group: how it reaches its members, how it waits for them, and what it logs.

use std::path::PathBuf;
use std::time::Duration;

use crate::cost::{Algorithm, Link};
use crate::flight_recorder::{COMM_LOG, CommLog, DUMP_FOLDER};
use crate::warning::warn;

/// How the ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Ranks are threads of one process.
    Thread,
    /// Ranks are processes of one host and share memory.
    Shm,
    /// Ranks are processes on any hosts and use sockets.
    Tcp,
    /// Shared memory within a host, sockets between hosts.
    Hybrid,
    /// An MPI library carries the bytes.
    Mpi,
    /// Cards send to each other by NCCL. The rest goes as with one of the others.
    Nccl,
}

impl Transport {
    /// The name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Thread => "thread",
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
            Transport::Hybrid => "hybrid",
            Transport::Mpi => "mpi",
            Transport::Nccl => "nccl",
        }
    }
}

/// How a group waits, and what it logs.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// The longest that any operation, or the rendezvous, may wait for other ranks.
    pub timeout: Duration,
    /// How long a blocking operation keeps its core busy before it sleeps. Zero is best if ranks share
    /// cores.
    pub spin: Duration,
    /// The same for operations that run during a computation, of each group of the rank. Zero is best if that would take
    /// a core from the computation.
    pub worker_spin: Duration,
    /// The all-reduce algorithm between processes that do not share memory.
    pub algorithm: Algorithm,
    /// A slower link to emulate.
    pub link: Option<Link>,
    /// How much of each operation is logged.
    pub log: CommLog,
    /// The folder to which the most recent operations are written when the group fails.
    pub dump_folder: Option<PathBuf>,
}

impl GroupOptions {
    /// [`GroupOptions::for_ranks_of`] ranks of one thread.
    pub fn for_local_ranks(local_ranks: usize) -> Self {
        Self::for_ranks_of(local_ranks, 1)
    }

    /// The default options for `local_ranks` ranks of `threads` threads each on this host: a time limit of 60
    /// seconds. Blocking operations spin for 50 us if each rank has a core; operations during a computation do so if each rank
    /// has a core more than its threads. The log level comes from the environment variable `PACELINE_COMM_LOG`; an invalid
    /// level gives a warning, and no log. The dump folder comes from `PACELINE_DUMP_FOLDER`.
    pub fn for_ranks_of(local_ranks: usize, threads: usize) -> Self {
        let cores = num_cores(local_ranks);
        let spin_of = |busy: usize| {
            if local_ranks.saturating_mul(busy) <= cores {
                Duration::from_micros(50)
            } else {
                Duration::ZERO
            }
        };
        let log = std::env::var(COMM_LOG).ok().and_then(|level| {
            let level = level.parse();
            level.inspect_err(|reason| warn(&format!("{COMM_LOG}: {reason}"))).ok()
        });
        Self {
            timeout: Duration::from_secs(60),
            spin: spin_of(1),
            worker_spin: spin_of(threads.saturating_add(1)),
            algorithm: Algorithm::default(),
            link: None,
            log: log.unwrap_or_default(),
            dump_folder: std::env::var_os(DUMP_FOLDER).map(PathBuf::from),
        }
    }
}

/// The number of cores for `local_ranks` ranks. If the launcher has bound this rank to one core, the others
/// have their own, provided that the host has as many.
fn num_cores(local_ranks: usize) -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    if allowed > 1 {
        return allowed;
    }
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let last = online.trim().rsplit(['-', ',']).next().and_then(|last| last.parse().ok());
    let online = last.map_or(1, |last: usize| last + 1);
    if online >= local_ranks { online } else { allowed }
}
