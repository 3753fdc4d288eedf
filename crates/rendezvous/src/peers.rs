//! How ranks connect to each other after the rendezvous: each rank listens, publishes its address,
//! and accepts the ranks that prove that they have the key of the attempt.
//!
//! Input: the addresses of all ranks, exchanged through the store or within an existing group. Output: sockets.
//! This module does not know what the connections are used for.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use paceline_trace::runtime::before_join;
use paceline_trace::thread_builder;
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use crate::address::{ListenSocket, SocketAddress, listen_by_tcp, listen_locally};
use crate::deadline::{Deadline, MAX_LIMIT};
use crate::hello::{
    HELLO_LIMIT, Hello, HelloAnswer, Incoming, MAX_STRANGERS, Refusal, Who, reason, say_hello,
};
use crate::key::RunKey;
use crate::socket::poll_until;
use crate::store::Failed;
use crate::warning::Warnings;
use crate::{Rendezvous, RendezvousError};

/// Where a rank can be reached. A field is empty if the rank does not listen there.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PeerAddress {
    /// The name of an abstract socket of the rank's host.
    local: String,
    /// The rank's host and port.
    pub(crate) tcp: (String, u16),
    /// A random name. The key for this listener is made of it and of the attempt's key.
    pub(crate) name: String,
}

/// The sockets on which a rank listens while the others connect.
#[derive(Debug)]
pub struct PeerListener {
    local: ListenSocket,
    tcp: Option<ListenSocket>,
    address: PeerAddress,
    /// The key of the attempt.
    key: RunKey,
    /// Nobody waits for others any more once it is set.
    over: Option<Arc<AtomicBool>>,
}

/// The kind of sockets by which ranks connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketKind {
    /// Unix sockets, between processes of one host.
    Local,
    /// TCP, between any hosts.
    Tcp,
}

impl PeerListener {
    /// Listens within the host and, if `host` is given, on a TCP port of that address. `key` is that of the
    /// attempt.
    pub fn bind(
        key: &RunKey,
        host: Option<&str>,
        rank: usize,
        world_size: usize,
    ) -> Result<Self, RendezvousError> {
        let fail =
            |reason| Failed::Other(reason).error(rank, world_size, "its own listener".into());
        let now = Deadline::after(Duration::ZERO);
        let name = Rendezvous::fresh_secret()?;
        let socket = format!("paceline-{}", Rendezvous::fresh_secret()?);
        let local = listen_locally(&socket, &now).map_err(fail)?;
        let mut address = PeerAddress { local: socket, name, ..PeerAddress::default() };
        let tcp = match host {
            Some(host) => {
                let (listener, own) = listen_by_tcp(host, 0, &now).map_err(fail)?;
                address.tcp = (host.to_owned(), own.port());
                Some(listener)
            }
            None => None,
        };
        Ok(Self { local, tcp, address, key: key.clone(), over: None })
    }

    /// This listener, which waits for nobody any more once `over` is set: a rank has gone that would never come.
    pub fn unless(self, over: Option<Arc<AtomicBool>>) -> Self {
        Self { over, ..self }
    }

    /// The key of the attempt.
    pub fn key(&self) -> &RunKey {
        &self.key
    }

    /// Where the others reach this rank.
    pub fn address(&self) -> &PeerAddress {
        &self.address
    }

    /// Makes `N` connections between `rank` and each of its `peers`: connects to the lower ranks, and accepts connections of
    /// the higher ranks. Both sides have them in the same order. `addresses` and the result have an entry for every rank,
    /// in rank order. Takes at most `limit`. If some ranks cannot be reached, `farewell` is called
    /// with the connections to each other rank, to let it know which ranks are missing.
    pub fn connect<const N: usize>(
        &self,
        network: SocketKind,
        addresses: &[PeerAddress],
        rank: usize,
        peers: &[usize],
        limit: Duration,
        farewell: impl Fn(&[OwnedFd; N], &[usize]),
    ) -> Result<Vec<Option<[OwnedFd; N]>>, RendezvousError> {
        let deadline = Deadline::after(limit).unless(self.over.clone());
        let world_size = addresses.len();
        let (lower, higher): (Vec<usize>, Vec<usize>) =
            peers.iter().partition(|&&peer| peer < rank);
        let mut connections: Vec<Vec<OwnedFd>> = (0..world_size).map(|_| Vec::new()).collect();
        // The store has checked which launchers the ranks have.
        let who = Who { rank, world: world_size, launch: None };
        let listener = match network {
            SocketKind::Local => Some(&self.local),
            SocketKind::Tcp => self.tcp.as_ref(),
        };
        let mut missed = Vec::new();
        // A rank that waits for an unreachable peer must still be there for the others, which would report it as missing.
        std::thread::scope(|scope| {
            let start = |&peer: &usize| {
                let deadline = deadline.clone();
                let body = move || self.reach(network, &addresses[peer], peer, who, N, &deadline);
                (peer, thread_builder("connect").spawn_scoped(scope, body))
            };
            let threads: Vec<_> = lower.iter().map(start).collect();
            let accepted = listener.map_or(Ok(()), |listener| {
                self.accept_all(listener, &higher, N, &mut connections, &deadline)
            });
            for (peer, thread) in threads {
                let end = |thread: ScopedJoinHandle<'_, _>| {
                    before_join(thread.thread());
                    thread.join()
                };
                match thread.map(end) {
                    Ok(Ok(Ok(sockets))) => connections[peer] = sockets,
                    Ok(Ok(Err(unreached))) => missed.push(unreached),
                    Ok(Err(panic)) => std::panic::resume_unwind(panic),
                    Err(error) => missed.push(Missed {
                        place: format!("the listener of rank {peer}"),
                        reason: format!("the system refuses a thread: {error}"),
                        missing: Vec::new(),
                    }),
                }
            }
            missed.extend(accepted.err());
        });
        let connections: Vec<Option<[OwnedFd; N]>> =
            connections.into_iter().map(|sockets| sockets.try_into().ok()).collect();
        let Some(Missed { place, reason, missing }) = missed.into_iter().reduce(Missed::and) else {
            return Ok(connections);
        };
        connections.iter().flatten().for_each(|sockets| farewell(sockets, &missing));
        Err(RendezvousError::Failed { rank, world_size, place, reason, missing })
    }

    /// Makes `times` connections to a peer.
    fn reach(
        &self,
        network: SocketKind,
        PeerAddress { local, tcp, name }: &PeerAddress,
        peer: usize,
        who: Who,
        times: usize,
        deadline: &Deadline,
    ) -> Result<Vec<OwnedFd>, Missed> {
        let key = self.key.of_listener(name);
        let mut place = format!("the listener of rank {peer}");
        let address = match network {
            SocketKind::Local => SocketAddress::Local(local.clone()),
            SocketKind::Tcp => {
                place += &format!(", {}:{}", tcp.0, tcp.1);
                SocketAddress::Tcp(tcp.0.clone(), tcp.1)
            }
        };
        let connect = |_| connect_to_peer(&address, who, &key, deadline);
        let connected: Result<Vec<OwnedFd>, String> = (0..times).map(connect).collect();
        connected.map_err(|reason| Missed { place, reason, missing: vec![peer] })
    }

    /// Accepts connections until all ranks in `awaited` have connected `times` times.
    fn accept_all(
        &self,
        listener: &ListenSocket,
        awaited: &[usize],
        times: usize,
        connections: &mut [Vec<OwnedFd>],
        deadline: &Deadline,
    ) -> Result<(), Missed> {
        let missed = |reason, missing| Missed { place: "its own listener".into(), reason, missing };
        let own = |error: &dyn std::fmt::Display| missed(error.to_string(), Vec::new());
        let keys = [self.key.of_listener(&self.address.name)];
        let world_size = connections.len();
        let warnings = Warnings::default();
        // All at once, so that a stranger who says nothing delays no rank.
        let mut strangers: Vec<(Incoming, String)> = Vec::new();
        loop {
            let absent: Vec<usize> =
                awaited.iter().copied().filter(|&rank| connections[rank].len() < times).collect();
            if absent.is_empty() {
                return Ok(());
            }
            let listening = listener.as_fd();
            let sockets = strangers.iter().map(|(incoming, _)| incoming.socket.as_fd());
            let mut fds: Vec<PollFd> = [listening]
                .into_iter()
                .chain(sockets)
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            match poll_until(&mut fds, Some(deadline)) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(own(&error)),
                Ok(0) if deadline.has_passed() => {
                    let reason = format!("ranks {absent:?} did not come in time");
                    return Err(missed(reason, absent));
                }
                Ok(_) => {}
            }
            if !fds[0].revents().is_empty() {
                let (socket, who) = listener.accept().map_err(|e| own(&e))?;
                match socket {
                    Some(socket) if strangers.len() < MAX_STRANGERS => {
                        let incoming = Incoming::new(socket, HELLO_LIMIT).map_err(|e| own(&e))?;
                        strangers.push((incoming, who));
                    }
                    // A rank tries again.
                    Some(_) => {}
                    // A stranger is turned away and does not end the run.
                    None => warnings.warn(&format!("turned away {who}")),
                }
            }
            for (mut incoming, who) in std::mem::take(&mut strangers) {
                let Hello { rank, answer, .. } = match incoming.advance(&keys, world_size) {
                    Ok(Some(hello)) => hello,
                    Ok(None) => {
                        strangers.push((incoming, who));
                        continue;
                    }
                    Err(error) => {
                        warnings.warn(&format!("turned away {who}: {}", reason(&error)));
                        continue;
                    }
                };
                let is_absent = awaited.contains(&rank) && connections[rank].len() < times;
                let answer = match answer {
                    HelloAnswer::Welcome if !is_absent => HelloAnswer::RankTaken,
                    answer => answer,
                };
                if incoming.answer(answer).is_ok() && answer == HelloAnswer::Welcome {
                    connections[rank].push(incoming.socket);
                } else {
                    warnings.warn(&format!("turned away {who} as rank {rank}: {answer:?}"));
                }
            }
        }
    }
}

/// Why this rank is not connected to some of the others.
struct Missed {
    place: String,
    reason: String,
    missing: Vec<usize>,
}

impl Missed {
    fn and(mut self, other: Self) -> Self {
        self.missing.extend(other.missing);
        self.reason += &format!("; {}: {}", other.place, other.reason);
        self
    }
}

/// Connects to a peer; both prove that they have the key of its listener. The peer listened before it published its address, so
/// this tries again after a refusal that may be temporary, until the deadline.
pub(crate) fn connect_to_peer(
    address: &SocketAddress,
    who: Who,
    key: &RunKey,
    deadline: &Deadline,
) -> Result<OwnedFd, String> {
    loop {
        let refused = match address.connect(deadline).map_err(Refusal::not_yet) {
            // Only the peer listens there. If it is stopped or slow, another connection would be no faster, and the peer
            // would have to turn away each abandoned one.
            Ok(socket) => match say_hello(&socket, who, key, MAX_LIMIT, deadline) {
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
            refused => return Err(refused.reason(who)),
        }
    }
}
