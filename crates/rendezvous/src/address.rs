//! Addresses on this host and on the network: listening at them, and connecting to them.
//! This module does not know who connects, or what is sent.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::Duration;

use rustix::net::sockopt::{set_socket_keepalive, set_tcp_nodelay};

use crate::deadline::Deadline;
use crate::socket::is_same_user;

/// How long to wait for an address that is in use, perhaps by a run that is about to end.
const IN_USE_LIMIT: Duration = Duration::from_secs(3);
/// How long one attempt to connect may take. Firewalls often drop packets without an answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// A socket that listens.
#[derive(Debug)]
pub(crate) enum ListenSocket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl ListenSocket {
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            ListenSocket::Unix(listener) => listener.as_fd(),
            ListenSocket::Tcp(listener) => listener.as_fd(),
        }
    }

    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            ListenSocket::Unix(listener) => listener.set_nonblocking(true),
            ListenSocket::Tcp(listener) => listener.set_nonblocking(true),
        }
    }

    /// Accepts a new connection, unless the other process belongs to another user. Also returns a description of the other end,
    /// for messages.
    pub(crate) fn accept(&self) -> io::Result<(Option<OwnedFd>, String)> {
        match self {
            ListenSocket::Unix(listener) => {
                let stream = listener.accept()?.0;
                if is_same_user(&stream) {
                    Ok((Some(stream.into()), "a process of this host".into()))
                } else {
                    Ok((None, "a process of another user".into()))
                }
            }
            ListenSocket::Tcp(listener) => {
                let (stream, address) = listener.accept()?;
                set_tcp_nodelay(&stream, true)?;
                // A rank whose host has crashed sends nothing. This ends the thread that reads from it.
                set_socket_keepalive(&stream, true)?;
                Ok((Some(stream.into()), address.to_string()))
            }
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
                let stream = UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?)?;
                if is_same_user(&stream) {
                    return Ok(stream.into());
                }
                let reason = "the socket there belongs to another user";
                Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
            }
            SocketAddress::Tcp(host, port) => {
                let mut last = io::Error::other(format!("{host} has no address"));
                for address in resolve(host, *port)? {
                    match connect_tcp(address, deadline) {
                        Ok(socket) => return Ok(socket),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }
}

fn connect_tcp(address: SocketAddr, deadline: &Deadline) -> io::Result<OwnedFd> {
    let limit = deadline.left().clamp(Duration::from_millis(1), CONNECT_LIMIT);
    let stream = TcpStream::connect_timeout(&address, limit)?;
    // Within one host, a socket that connects to a port on which nobody listens can be connected to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream.into())
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
    let bind = || UnixListener::bind_addr(&UnixAddr::from_abstract_name(name)?);
    while_in_use(bind, deadline, in_use).map(ListenSocket::Unix)
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
            match TcpListener::bind((*place, port)) {
                Ok(listener) => return Ok(listener),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(error),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let in_use = format!(
        "port {port} of this host is in use by another program; choose another MASTER_PORT"
    );
    let listener = while_in_use(bind, deadline, &in_use)?;
    let own = listener.local_addr().map_err(|e| e.to_string())?;
    let ip = match own.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    Ok((ListenSocket::Tcp(listener), SocketAddr::new(ip, own.port())))
}

/// Binds. While the address is in use, tries again for a while, and then errors with `in_use`.
fn while_in_use<T>(
    bind: impl Fn() -> io::Result<T>,
    deadline: &Deadline,
    in_use: &str,
) -> Result<T, String> {
    let deadline = Deadline::after(deadline.left().min(IN_USE_LIMIT));
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
}
