//! Addresses on this host and on the network: listening at them, and connecting to them.
//! This module does not know who connects, or what is sent.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use paceline_trace::runtime::{self, connect_local, connect_tcp};
use rustix::net::sockopt::set_socket_keepalive;

use crate::deadline::{Deadline, MAX_LIMIT};
use crate::socket::is_same_user;

/// How long to wait for an address that is in use, perhaps by a run that is about to end.
const IN_USE_LIMIT: Duration = Duration::from_secs(3);
/// How long one attempt to connect may take. Firewalls often drop packets without an answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// A socket that listens.
#[derive(Debug)]
pub(crate) struct ListenSocket(runtime::PassiveSocket);

impl ListenSocket {
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        self.0.set_nonblocking()
    }

    /// Accepts a new connection, unless the other process belongs to another user. Also returns a description of the other end,
    /// for messages.
    pub(crate) fn accept(&self) -> io::Result<(Option<OwnedFd>, String)> {
        let (socket, from) = self.0.accept()?;
        if let Some(address) = from {
            // A rank whose host has crashed sends nothing. This ends the thread that reads from it.
            set_socket_keepalive(&socket, true)?;
            return Ok((Some(socket), address.to_string()));
        }
        if is_same_user(&socket) {
            Ok((Some(socket), "a process of this host".into()))
        } else {
            Ok((None, "a process of another user".into()))
        }
    }
}

/// An address to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SocketAddress {
    /// An abstract Unix socket of this host.
    Local(String),
    /// A TCP port.
    Tcp(String, u16),
}

impl SocketAddress {
    /// Connects. A local socket must belong to the same user as this process.
    pub(crate) fn connect(&self, deadline: &Deadline) -> io::Result<OwnedFd> {
        match self {
            SocketAddress::Local(name) => {
                let socket = connect_local(name)?;
                if is_same_user(&socket) {
                    return Ok(socket);
                }
                let reason = "the socket there belongs to another user";
                Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
            }
            SocketAddress::Tcp(host, port) => {
                let mut last = io::Error::other(format!("{host} has no address"));
                // A slow name server counts.
                for address in deadline.wait(MAX_LIMIT, || resolve(host, *port))? {
                    let limit = deadline.left().clamp(Duration::from_millis(1), CONNECT_LIMIT);
                    match deadline.wait(limit, || connect_tcp(address, limit)) {
                        Ok(socket) => return Ok(socket),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }
}

fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let addresses = (host.trim_start_matches('[').trim_end_matches(']'), port).to_socket_addrs();
    let addresses = addresses.map_err(|e| io::Error::other(format!("unknown host {host}: {e}")))?;
    Ok(addresses.collect())
}

/// Listens at an abstract Unix socket of this host.
pub(crate) fn listen_locally(name: &str, deadline: &Deadline) -> Result<ListenSocket, String> {
    let in_use = "another process of this host listens there already (another run with the same \
                 name or MASTER_PORT?)";
    while_in_use(|| runtime::PassiveSocket::local(name), deadline, in_use).map(ListenSocket)
}

/// Listens at a TCP port: on the loopback device if `host` is a loopback address, otherwise on all
/// interfaces. Port 0 takes any free port. Also returns the address by which this host reaches the listener.
pub(crate) fn listen_by_tcp(
    host: &str,
    port: u16,
    deadline: &Deadline,
) -> Result<(ListenSocket, SocketAddr), String> {
    // This host may have a name that only other hosts can resolve.
    let addresses = resolve(host, port).unwrap_or_default();
    let is_loopback = |address: &SocketAddr| address.ip().is_loopback();
    let places: Vec<IpAddr> = if !addresses.is_empty() && addresses.iter().all(is_loopback) {
        addresses.iter().map(SocketAddr::ip).collect()
    } else if !addresses.is_empty() && addresses.iter().all(SocketAddr::is_ipv4) {
        vec![Ipv4Addr::UNSPECIFIED.into()]
    } else {
        // If the host has IPv6, the first of these also accepts IPv4.
        vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()]
    };
    let bind = || {
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for place in &places {
            match runtime::PassiveSocket::tcp(*place, port) {
                Ok(listening) => return Ok(listening),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(error),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let in_use = format!(
        "port {port} of this host is in use by another program; choose another MASTER_PORT"
    );
    let (listener, own) = while_in_use(bind, deadline, &in_use)?;
    let ip = match own.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    Ok((ListenSocket(listener), SocketAddr::new(ip, own.port())))
}

/// Binds. While the address is in use, tries again for a while, and then errors with `in_use`.
fn while_in_use<T>(
    bind: impl Fn() -> io::Result<T>,
    deadline: &Deadline,
    in_use: &str,
) -> Result<T, String> {
    deadline.within(IN_USE_LIMIT, |deadline| {
        loop {
            match bind() {
                Ok(listener) => return Ok(listener),
                Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                    return Err(format!("cannot listen there: {error}"));
                }
                Err(_) if deadline.has_passed() => {
                    return Err(format!("cannot listen there: {in_use}"));
                }
                Err(_) => deadline.pause(Duration::from_millis(20)),
            }
        }
    })
}
