//! How ranks that have met connect to each other: each rank listens, tells the others its address,
//! and accepts those that know its secret.
//!
//! Input: the addresses of all ranks, exchanged through the store or within an existing group. Output:
//! sockets. This module knows nothing of what the connections are used for.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use crate::address::{Address, Listener, listen_by_tcp, listen_locally};
use crate::deadline::Deadline;
use crate::hello::{Refusal, Verdict, answer_hello, read_hello, say_hello};
use crate::socket::poll_until;
use crate::warning::warn;
use crate::{Rendezvous, RendezvousError};

/// How long a stranger may take to say hello before the next connection is handled.
const HELLO_LIMIT: Duration = Duration::from_millis(500);

/// Where a rank can be reached. A field is empty if the rank does not listen there.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PeerAddress {
    /// The name of an abstract socket of the rank's host.
    local: String,
    /// The rank's host and port.
    pub(crate) tcp: (String, u16),
    /// The secret to present there.
    pub(crate) secret: String,
}

/// What a rank listens on while the others connect to it.
#[derive(Debug)]
pub struct PeerListener {
    local: Listener,
    tcp: Option<Listener>,
    address: PeerAddress,
}

/// The kind of sockets by which ranks connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Unix sockets, between processes of one host.
    Local,
    /// TCP, between any hosts.
    Tcp,
}

impl PeerListener {
    /// Listens within the host. If `host` is given, also listens on a TCP port of that address.
    pub fn bind(
        host: Option<&str>,
        rank: usize,
        world_size: usize,
    ) -> Result<Self, RendezvousError> {
        let fail = |reason| RendezvousError::Failed {
            rank,
            world_size,
            place: "its own listener".into(),
            reason,
            missing: Vec::new(),
        };
        let now = Deadline::after(Duration::ZERO);
        let secret = Rendezvous::fresh_secret()?;
        let name = format!("paceline-{}", Rendezvous::fresh_secret()?);
        let local = listen_locally(&name, &now).map_err(fail)?;
        let mut address = PeerAddress { local: name, secret, ..PeerAddress::default() };
        let tcp = match host {
            Some(host) => {
                let (listener, own) = listen_by_tcp(host, 0, &now).map_err(fail)?;
                address.tcp = (host.to_owned(), own.port());
                Some(listener)
            }
            None => None,
        };
        Ok(Self { local, tcp, address })
    }

    /// Where the others reach this rank.
    pub fn address(&self) -> &PeerAddress {
        &self.address
    }

    /// Makes `N` connections from `rank` to each of several other ranks: accepts connections from the ranks in
    /// `accept_from`, and connects to the ranks in `connect_to`. Both sides have the `N` connections in the same order.
    /// `addresses` has an entry for every rank, in rank order, and so has the result. Takes at most `limit`.
    pub fn connect<const N: usize>(
        &self,
        network: Network,
        addresses: &[PeerAddress],
        rank: usize,
        accept_from: &[usize],
        connect_to: &[usize],
        limit: Duration,
    ) -> Result<Vec<Option<[OwnedFd; N]>>, RendezvousError> {
        let deadline = Deadline::after(limit);
        let world_size = addresses.len();
        let fail = |place: String, reason, missing| RendezvousError::Failed {
            rank,
            world_size,
            place,
            reason,
            missing,
        };
        let mut connections: Vec<Vec<OwnedFd>> = (0..world_size).map(|_| Vec::new()).collect();
        for &peer in connect_to {
            let PeerAddress { local, tcp, secret } = &addresses[peer];
            let (address, place) = match network {
                Network::Local => {
                    (Address::Local(local.clone()), format!("the listener of rank {peer}"))
                }
                Network::Tcp => (
                    Address::Tcp(tcp.0.clone(), tcp.1),
                    format!("the listener of rank {peer}, {}:{}", tcp.0, tcp.1),
                ),
            };
            for _ in 0..N {
                let connected = connect_to_peer(&address, rank, world_size, secret, &deadline);
                let connected =
                    connected.map_err(|reason| fail(place.clone(), reason, vec![peer]))?;
                connections[peer].push(connected);
            }
        }
        let listener = match network {
            Network::Local => Some(&self.local),
            Network::Tcp => self.tcp.as_ref(),
        };
        if let Some(listener) = listener {
            self.accept_all(listener, accept_from, N, &mut connections, &deadline)
                .map_err(|(reason, missing)| fail("its own listener".into(), reason, missing))?;
        }
        Ok(connections.into_iter().map(|sockets| sockets.try_into().ok()).collect())
    }

    /// Accepts connections until all ranks in `awaited` have connected `times` times.
    fn accept_all(
        &self,
        listener: &Listener,
        awaited: &[usize],
        times: usize,
        connections: &mut [Vec<OwnedFd>],
        deadline: &Deadline,
    ) -> Result<(), (String, Vec<usize>)> {
        let own = |error: &dyn std::fmt::Display| (error.to_string(), Vec::new());
        loop {
            let absent: Vec<usize> =
                awaited.iter().copied().filter(|&rank| connections[rank].len() < times).collect();
            if absent.is_empty() {
                return Ok(());
            }
            let listening = listener.as_fd();
            let mut fds = [PollFd::new(&listening, PollFlags::IN)];
            match poll_until(&mut fds, Some(deadline)) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(own(&error)),
                Ok(0) if deadline.has_passed() => {
                    return Err((format!("ranks {absent:?} did not come in time"), absent));
                }
                Ok(0) => continue,
                Ok(_) => {}
            }
            let (socket, who) = listener.accept().map_err(|e| own(&e))?;
            // A stranger is turned away and does not end the run.
            let Some(socket) = socket else {
                warn(&format!("turned away {who}"));
                continue;
            };
            let hello_deadline = Deadline::after(HELLO_LIMIT);
            let world_size = connections.len();
            let hello = match read_hello(&socket, world_size, &self.address.secret, &hello_deadline)
            {
                Ok(hello) => hello,
                Err(error) => {
                    warn(&format!("turned away {who}: {error}"));
                    continue;
                }
            };
            let verdict = match hello.verdict {
                Verdict::Welcome if !absent.contains(&hello.rank) => Verdict::RankTaken,
                verdict => verdict,
            };
            if answer_hello(&socket, verdict, &hello_deadline).is_ok()
                && verdict == Verdict::Welcome
            {
                connections[hello.rank].push(socket);
            } else {
                warn(&format!("turned away {who}: {verdict:?}"));
            }
        }
    }
}

/// Connects to a peer and presents its secret. The peer began to listen before it published its address, so
/// after a refusal that may be temporary this tries again until the deadline.
fn connect_to_peer(
    address: &Address,
    rank: usize,
    world_size: usize,
    secret: &str,
    deadline: &Deadline,
) -> Result<OwnedFd, String> {
    loop {
        let refused = match address.connect(deadline).map_err(Refusal::not_yet) {
            Ok(socket) => match say_hello(&socket, rank, world_size, secret) {
                Ok(()) => return Ok(socket),
                Err(refused) => refused,
            },
            Err(refused) => refused,
        };
        match refused {
            // The peer's queue of connections may be full, or its answer slow.
            Refusal::NotYet(_) if !deadline.has_passed() => {
                deadline.pause(Duration::from_millis(5));
            }
            refused => return Err(refused.reason(rank, world_size)),
        }
    }
}
