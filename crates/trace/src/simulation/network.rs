//! The network of a cluster: it carries the bytes of each connection, in their order and with a delay.
//!
//! A connection consists of two pairs of Unix sockets. One socket of each pair belongs to a process of the cluster, and the other to
//! the network. So the kernel's sockets decide how much they hold and how they end. Packets of one connection keep their order;
//! those of different connections do not.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use super::random::SplitMix;
use crate::runtime::PassiveSocket;

/// Bytes of one direction of a connection that are on their way. More wait in the sender's socket.
const WINDOW_BYTES: usize = 256 << 10;
const MS: u64 = 1_000_000;

/// A process and its host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site {
    pub(super) process: usize,
    pub(super) host: usize,
}

#[derive(Debug)]
struct ListenPoint {
    /// A name, or a colon and a port.
    name: String,
    site: Site,
    fd: RawFd,
    real: UnixAddr,
    /// Connections that have not been accepted.
    pending: VecDeque<usize>,
}

/// Bytes; none at the end of what a side sends. `None` if the side is gone.
type Packet = Option<Vec<u8>>;

#[derive(Debug)]
struct WireEnd {
    site: Site,
    /// The process's socket, once it has it.
    app: Option<RawFd>,
    /// The network's socket. `None` if this side has closed the connection.
    net: Option<UnixStream>,
    /// On the way to this side, with the times of arrival.
    incoming: VecDeque<(u64, Packet)>,
    has_sent_all: bool,
}

impl WireEnd {
    fn close(&mut self) {
        (self.net, self.app) = (None, None);
        self.incoming.clear();
    }
}

/// The address of a host.
fn address_of(host: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, 1 + host as u8])
}

#[derive(Debug)]
pub(super) struct SimulatedNetwork {
    points: Vec<ListenPoint>,
    connections: Vec<[WireEnd; 2]>,
    /// By host.
    pub(super) cut_until_ns: Vec<u64>,
    /// By host.
    pub(super) slow_by_ns: Vec<u64>,
    base_ns: u64,
    random: SplitMix,
    last_port: u16,
}

impl SimulatedNetwork {
    pub(super) fn new(num_hosts: usize, mut random: SplitMix) -> Self {
        Self {
            points: Vec::new(),
            connections: Vec::new(),
            cut_until_ns: vec![0; num_hosts],
            slow_by_ns: vec![0; num_hosts],
            base_ns: 20_000 + random.time_ns(2 * MS),
            random,
            last_port: 40_000,
        }
    }

    /// The host of an address, as seen from another one. An address that no host of the cluster has is another one of its own.
    pub(super) fn host_of(&self, to: IpAddr, from: usize) -> usize {
        let host = |ip| (0..self.slow_by_ns.len()).find(|host| address_of(*host) == ip);
        host(to).unwrap_or(from)
    }

    /// When a packet that leaves now arrives.
    pub(super) fn arrival_ns(&mut self, [from, to]: [usize; 2], now_ns: u64) -> u64 {
        if from == to {
            return now_ns + 5_000 + self.random.below(50_000);
        }
        let is_late = self.random.below(64) == 0;
        let jitter_ns = self.random.time_ns(if is_late { 40 * MS } else { MS });
        let leaves_ns = self.leaves_ns([from, to], now_ns);
        leaves_ns.saturating_add(self.base_ns + jitter_ns + self.slow_by_ns[from])
    }

    /// When a packet gets through between two hosts: a sender that is cut off tries again after times of its own.
    fn leaves_ns(&mut self, [from, to]: [usize; 2], now_ns: u64) -> u64 {
        let cut_ns = self.cut_until_ns[from].max(self.cut_until_ns[to]);
        let is_cut = from != to && cut_ns > now_ns;
        if is_cut { cut_ns.saturating_add(self.random.below(200 * MS)) } else { now_ns }
    }

    fn point(&mut self, name: &str, host: usize) -> Option<&mut ListenPoint> {
        self.points.iter_mut().find(|of| of.site.host == host && of.name == name)
    }

    /// Listens at a name, or at a port; the port 0 stands for a free one, which this returns.
    pub(super) fn listen(&mut self, name: &str, site: Site) -> io::Result<(PassiveSocket, u16)> {
        static NAMES: AtomicU64 = AtomicU64::new(0);
        self.last_port += 1;
        let name = if name == ":0" { format!(":{}", self.last_port) } else { name.to_owned() };
        if self.point(&name, site.host).is_some() {
            return Err(ErrorKind::AddrInUse.into());
        }
        let number = NAMES.fetch_add(1, Ordering::Relaxed);
        let real = format!("paceline-simulation-{}-{number}", std::process::id());
        let real = UnixAddr::from_abstract_name(real)?;
        let listener = UnixListener::bind_addr(&real)?;
        let (fd, pending) = (listener.as_raw_fd(), VecDeque::new());
        let port = name.strip_prefix(':').and_then(|port| port.parse().ok());
        self.points.push(ListenPoint { name, site, fd, real, pending });
        Ok((listener.into(), port.unwrap_or(0)))
    }

    /// The address is free again.
    pub(super) fn close(&mut self, listener: &PassiveSocket) {
        self.points.retain(|of| of.fd != listener.as_fd().as_raw_fd());
    }

    /// Connects to a host. Returns the sockets of the side that connects, and of the listener.
    pub(super) fn dial(
        &mut self,
        name: &str,
        host: usize,
        from: Site,
    ) -> io::Result<(OwnedFd, RawFd)> {
        let number = self.connections.len();
        let of = self.point(name, host).ok_or(ErrorKind::ConnectionRefused)?;
        let (app, near) = UnixStream::pair()?;
        let far = UnixStream::connect_addr(&of.real)?;
        let end = |site, app, net: UnixStream| {
            net.set_nonblocking(true)?;
            let (incoming, has_sent_all) = (VecDeque::new(), false);
            Ok::<_, io::Error>(WireEnd { site, app, net: Some(net), incoming, has_sent_all })
        };
        let ends = [end(from, Some(app.as_raw_fd()), near)?, end(of.site, None, far)?];
        of.pending.push_back(number);
        let dialed = (app.into(), of.fd);
        self.connections.push(ends);
        Ok(dialed)
    }

    pub(super) fn accept(
        &mut self,
        listener: &PassiveSocket,
    ) -> io::Result<(OwnedFd, Option<SocketAddr>)> {
        let socket = rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?;
        let fd = listener.as_fd().as_raw_fd();
        let of = self.points.iter_mut().find(|of| of.fd == fd);
        let of = of.ok_or(ErrorKind::NotFound)?;
        let number = of.pending.pop_front().ok_or(ErrorKind::NotFound)?;
        let is_local = !of.name.starts_with(':');
        let [near, far] = &mut self.connections[number];
        far.app = Some(socket.as_raw_fd());
        let from = SocketAddr::new(address_of(near.site.host), number as u16);
        Ok((socket, (!is_local).then_some(from)))
    }

    fn sides(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        (0..self.connections.len()).flat_map(|number| [(number, 0), (number, 1)])
    }

    /// Closes all sockets of a process that has ended.
    pub(super) fn end_process(&mut self, process: usize, now_ns: u64) {
        self.points.retain(|of| of.site.process != process);
        for at @ (number, side) in self.sides() {
            let of = &self.connections[number][side];
            if of.site.process == process && of.net.is_some() {
                // The kernel sends what the process has written.
                self.collect(at, now_ns, usize::MAX);
                // It resets a connection if it held bytes that the process has not read.
                let end = if self.random.below(4) == 0 { None } else { Some(Vec::new()) };
                self.send(at, end, now_ns);
                self.connections[number][side].close();
            }
        }
    }

    /// Sends a packet of this side to the other one.
    fn send(&mut self, (number, side): (usize, usize), packet: Packet, now_ns: u64) {
        let hosts = [side, 1 - side].map(|side| self.connections[number][side].site.host);
        let arrival_ns = self.arrival_ns(hosts, now_ns);
        let back_ns = self.arrival_ns([hosts[1], hosts[0]], arrival_ns);
        let ends = &mut self.connections[number];
        let target = &mut ends[1 - side];
        if target.net.is_some() {
            let last_ns = target.incoming.back().map_or(0, |(due_ns, _)| *due_ns);
            target.incoming.push_back((arrival_ns.max(last_ns), packet));
        } else if packet.is_some_and(|bytes| !bytes.is_empty()) {
            // The host answers for a side that is gone.
            ends[side].incoming.push_back((back_ns, None));
        }
    }

    /// Takes what this side has sent. Returns whether there was something.
    fn collect(&mut self, at: (usize, usize), now_ns: u64, window_bytes: usize) -> bool {
        let mut found = false;
        loop {
            let way = &self.connections[at.0][1 - at.1].incoming;
            let num_bytes: usize = way.iter().flat_map(|(_, of)| of).map(Vec::len).sum();
            let of = &mut self.connections[at.0][at.1];
            let Some(net) = of.net.as_mut().filter(|_| !of.has_sent_all) else { return found };
            if num_bytes >= window_bytes {
                return found;
            }
            let mut bytes = vec![0; 64 << 10];
            let packet = match net.read(&mut bytes) {
                Ok(count) => Some(bytes[..count].to_vec()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return found,
                Err(_) => None,
            };
            of.has_sent_all = packet.as_ref().is_none_or(Vec::is_empty);
            self.send(at, packet, now_ns);
            found = true;
        }
    }

    /// Gives this side what has arrived. Returns whether there was something.
    fn deliver(&mut self, (number, side): (usize, usize), now_ns: u64) -> bool {
        let hosts = [side, 1 - side].map(|side| self.connections[number][side].site.host);
        let mut found = false;
        loop {
            let again_ns = self.leaves_ns(hosts, now_ns);
            let of = &mut self.connections[number][side];
            let Some((due_ns, packet)) = of.incoming.front_mut().filter(|of| of.0 <= now_ns) else {
                return found;
            };
            if again_ns > now_ns {
                *due_ns = again_ns;
                return found;
            }
            let (Some(net), Some(bytes)) = (&mut of.net, packet) else {
                of.close();
                return true;
            };
            match if bytes.is_empty() {
                net.shutdown(Shutdown::Write).map(|()| 0)
            } else {
                net.write(bytes)
            } {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return found,
                // The process may have closed its socket meanwhile.
                outcome => drop(bytes.drain(..outcome.unwrap_or(bytes.len()))),
            }
            if bytes.is_empty() {
                of.incoming.pop_front();
            }
            found = true;
        }
    }

    /// Moves all bytes that can move now. Returns the sockets on which something has happened.
    pub(super) fn move_bytes(&mut self, now_ns: u64) -> Vec<RawFd> {
        let end = |(number, side): (usize, usize)| &self.connections[number][side];
        let open: Vec<_> = self.sides().filter(|at| end(*at).net.is_some()).collect();
        let events =
            |of: &WireEnd| if of.has_sent_all { PollFlags::empty() } else { PollFlags::IN };
        let nets =
            open.iter().map(|at| end(*at)).flat_map(|of| Some((of.net.as_ref()?, events(of))));
        let mut fds: Vec<PollFd> = nets.map(|(net, events)| PollFd::new(net, events)).collect();
        rustix::event::poll(&mut fds, Some(&Timespec::default())).expect("these are sockets");
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        let mut moved = Vec::new();
        for (at, flags) in open.into_iter().zip(ready).filter(|(_, flags)| !flags.is_empty()) {
            if self.collect(at, now_ns, WINDOW_BYTES) {
                moved.extend(self.connections[at.0][at.1].app);
            }
            let of = &mut self.connections[at.0][at.1];
            // Both directions are shut down: the process has closed its socket.
            if flags.contains(PollFlags::HUP) && of.has_sent_all {
                of.close();
            }
        }
        for at in self.sides() {
            let app = self.connections[at.0][at.1].app;
            if self.deliver(at, now_ns) {
                moved.extend(app);
            }
        }
        moved
    }

    /// When the next packet arrives.
    pub(super) fn next_arrival_ns(&self, now_ns: u64) -> u64 {
        let fronts = self.connections.iter().flatten().filter_map(|side| side.incoming.front());
        fronts.map(|of| of.0).filter(|due_ns| *due_ns > now_ns).min().unwrap_or(u64::MAX)
    }
}
