//! Joins this process, one rank of several, to its group over any transport.

use std::sync::mpsc::channel;
use std::time::Duration;

use paceline_collectives::{Dumper, Group};
use paceline_rendezvous::{HostRoute, Placement, Rendezvous};

use crate::TransportName;
use crate::comm::CommConfig;
use crate::pinning;
use crate::stop::{self, StopRequest};
use paceline_failure::{Failure, Result, usage};

/// The exit code of a Rust program that panics.
const EXIT_PANICKED: i32 = 101;

/// How long a rank that panics may take to write its last operations. The panicking thread may hold a lock that the writing
/// needs.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// Meets the other ranks and forms the group. With `pinned_threads`, this rank first gets processors of its own for so many
/// compute threads, if there are enough. From then on, SIGTERM makes it write its last operations to the dump folder before it
/// ends, or before it asks for the end of the run.
pub fn connect(
    transport: TransportName,
    comm: &CommConfig,
    rendezvous: &Rendezvous,
    place: &Placement,
    pinned_threads: Option<usize>,
    request: Option<StopRequest>,
) -> Result<Group> {
    let (rank, world) = (place.rank, place.world_size);
    // The options depend on the cores of all ranks, so they come before pinning, and the group's threads after it.
    let options = comm.options(place.local_world_size);
    if let Some(threads) = pinned_threads {
        pinning::pin(place.local_rank, place.local_world_size, threads)?;
    }
    // The transport for the groups that NCCL does not carry.
    let rest = match (place.is_one_host(), place.local_world_size) {
        (true, _) => TransportName::Shm,
        (false, 1) => TransportName::Tcp,
        (false, _) => TransportName::Hybrid,
    };
    let group = match if transport == TransportName::Nccl { rest } else { transport } {
        TransportName::Thread => {
            return usage("--transport thread connects no processes");
        }
        TransportName::Shm | TransportName::Nccl => Group::shm(rendezvous, rank, world, options)?,
        TransportName::Tcp => {
            Group::tcp(rendezvous, &host_address(comm, rendezvous, place)?, rank, world, options)?
        }
        TransportName::Hybrid => {
            let host = host_address(comm, rendezvous, place)?;
            let local = place.local_world_size;
            let local = if place.is_one_host() { local / comm.hosts } else { local };
            Group::hybrid(rendezvous, &host, rank, world, local, options)?
        }
        #[cfg(feature = "mpi")]
        TransportName::Mpi => Group::mpi(options)?,
        #[cfg(not(feature = "mpi"))]
        TransportName::Mpi => return usage(crate::comm::WITHOUT_MPI),
    };
    stop::listen(Some(group.dumper()), request)?;
    end_when_panicking(Some(group.dumper()));
    Ok(group)
}

/// The address at which other ranks reach this host: that of `--host`, or else of the interface that leads to the rendezvous.
fn host_address(comm: &CommConfig, rendezvous: &Rendezvous, place: &Placement) -> Result<String> {
    if let Some(host) = &comm.host {
        return Ok(host.clone());
    }
    if place.is_one_host() {
        return Ok("127.0.0.1".into());
    }
    let route = HostRoute::to(rendezvous, place.rank, place.world_size).map_err(|error| {
        Failure::Usage(format!("{error}; set MASTER_ADDR to an address that this host can reach"))
    })?;
    let own = Some(route.own).filter(|ip| !ip.is_loopback());
    own.map(|ip| ip.to_string()).ok_or_else(|| {
        Failure::Usage(
            "cannot tell by which address the other hosts reach this one; pass --host ADDRESS"
                .into(),
        )
    })
}

/// Makes a rank end at once when any of its threads panics, so that others do not wait until their time limit. Before that, `dumper`
/// writes its last operations.
pub fn end_when_panicking(dumper: Option<Dumper>) {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        if let Some(dumper) = dumper.clone() {
            let cause = panic.to_string();
            let (sender, written) = channel();
            let dump = move || {
                dumper.dump(&cause);
                sender.send(())
            };
            // If no thread can be started, the rank ends without its last words.
            let _ = paceline_trace::thread_builder("last words").spawn(dump);
            let _ = written.recv_timeout(LAST_WORDS);
        }
        std::process::exit(EXIT_PANICKED);
    }));
}
