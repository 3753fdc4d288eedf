//! How this process, one rank of several, joins its group over any transport.

use std::net::UdpSocket;
use std::sync::mpsc::channel;
use std::time::Duration;

use paceline_collectives::{Dumper, Group, Meeting, MeetingPoint, Placement};
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

use crate::cli::TransportName;
#[cfg(not(feature = "mpi"))]
use crate::comm;
use crate::comm::CommConfig;
use crate::{Failure, Result, resources};

/// What a process that is ended by a signal exits with, by the custom of shells.
const EXIT_TERMINATED: i32 = 128 + SIGTERM;

/// What a program exits with that panics, as Rust has it.
const EXIT_PANICKED: i32 = 101;

/// How long a rank that panics may take to write its operations: it may hold what that needs.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// Meets the others and forms the group; before that, gives this rank so many cores of its own, if
/// asked. From then on, a polite request to end makes this rank write its last operations to the
/// dump folder first.
pub(crate) fn connect(
    transport: TransportName,
    comm: &CommConfig,
    meeting: &Meeting,
    place: &Placement,
    pinned_threads: Option<usize>,
) -> Result<Group> {
    let (rank, world) = (place.rank, place.world_size);
    // How ranks wait depends on the cores that all of them have, so pinning comes after this, and
    // before the group starts its threads.
    let options = comm.options(place.local_world_size);
    if let Some(threads) = pinned_threads {
        resources::pin(place.local_rank, threads)?;
    }
    let group = match transport {
        TransportName::Thread => {
            return Err(Failure::Usage("--transport thread connects no processes".into()));
        }
        TransportName::Shm => Group::shm(meeting, rank, world, options)?,
        TransportName::Tcp => {
            Group::tcp(meeting, &host_address(comm, meeting, place)?, rank, world, options)?
        }
        TransportName::Hybrid => {
            let host = host_address(comm, meeting, place)?;
            let local = place.local_world_size;
            let local = if place.is_one_host() { local / comm.hosts } else { local };
            Group::hybrid(meeting, &host, rank, world, local, options)?
        }
        #[cfg(feature = "mpi")]
        TransportName::Mpi => Group::mpi(options)?,
        #[cfg(not(feature = "mpi"))]
        TransportName::Mpi => return Err(Failure::Usage(comm::WITHOUT_MPI.into())),
    };
    dump_when_ended(group.dumper())?;
    end_when_panicking(group.dumper());
    Ok(group)
}

/// The address by which the other ranks reach this host: the one given, or that of the interface
/// towards the meeting point.
fn host_address(comm: &CommConfig, meeting: &Meeting, place: &Placement) -> Result<String> {
    if let Some(host) = &comm.host {
        return Ok(host.clone());
    }
    if place.is_one_host() {
        return Ok("127.0.0.1".into());
    }
    let towards = match &meeting.point {
        MeetingPoint::Tcp { host, port } | MeetingPoint::Agent { host, port, .. } => {
            // Connecting a datagram socket sends nothing; it only asks for the way.
            let socket = UdpSocket::bind(("0.0.0.0", 0)).and_then(|socket| {
                socket.connect((host.as_str(), *port))?;
                socket.local_addr()
            });
            socket.ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback())
        }
        MeetingPoint::Local { .. } | MeetingPoint::File(_) => None,
    };
    towards.map(|ip| ip.to_string()).ok_or_else(|| {
        Failure::Usage(
            "cannot tell by which address the other hosts reach this one; pass --host ADDRESS"
                .into(),
        )
    })
}

/// Waits for the signal by which launchers end ranks, in a thread of its own: the main one may be
/// blocked in an operation that nobody will finish.
fn dump_when_ended(dumper: Dumper) -> Result<()> {
    let mut signals = Signals::new([SIGTERM])
        .map_err(|e| Failure::io("cannot listen for the signal to end", e))?;
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            dumper.dump("ended by the launcher");
            std::process::exit(EXIT_TERMINATED);
        }
    });
    Ok(())
}

/// A rank that panics ends at once, whichever of its threads it was: the others would otherwise wait
/// for it until their time limit.
fn end_when_panicking(dumper: Dumper) {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        let (cause, dumper) = (panic.to_string(), dumper.clone());
        let (sender, written) = channel();
        std::thread::spawn(move || {
            dumper.dump(&cause);
            sender.send(())
        });
        let _ = written.recv_timeout(LAST_WORDS);
        std::process::exit(EXIT_PANICKED);
    }));
}
