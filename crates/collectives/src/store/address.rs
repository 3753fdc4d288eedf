//! Where a store's server can be reached: listening there, and connecting to it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{set_socket_keepalive, set_tcp_nodelay};

use super::socket::is_same_user;

/// How long a place may stay taken: the run before this one may be about to end.
const TAKEN_LIMIT: Duration = Duration::from_secs(3);
/// How long one attempt to connect may take. Firewalls often drop what they refuse.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// Where the server listens.
#[derive(Debug)]
pub(crate) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }

    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Listener::Unix(listener) => listener.set_nonblocking(true),
            Listener::Tcp(listener) => listener.set_nonblocking(true),
        }
    }

    /// A new connection, and who is at its other end, for messages; `None` if it is not our user.
    pub(crate) fn accept(&self) -> io::Result<(Option<OwnedFd>, String)> {
        match self {
            Listener::Unix(listener) => {
                let stream = listener.accept()?.0;
                if is_same_user(&stream) {
                    Ok((Some(stream.into()), "a process of this host".into()))
                } else {
                    Ok((None, "a process of another user".into()))
                }
            }
            Listener::Tcp(listener) => {
                let (stream, address) = listener.accept()?;
                set_tcp_nodelay(&stream, true)?;
                // A rank whose host is gone says nothing; its thread ends by this.
                set_socket_keepalive(&stream, true)?;
                Ok((Some(stream.into()), address.to_string()))
            }
        }
    }
}

/// One way to reach a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// An abstract Unix socket of this host.
    Local(String),
    /// A TCP port.
    Tcp(String, u16),
}

impl Address {
    /// Connects; a local socket must belong to our user.
    pub(crate) fn connect(&self, deadline: Instant) -> io::Result<OwnedFd> {
        match self {
            Address::Local(name) => {
                let stream = UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?)?;
                if is_same_user(&stream) {
                    return Ok(stream.into());
                }
                let reason = "the socket there belongs to another user";
                Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
            }
            Address::Tcp(host, port) => {
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

fn connect_tcp(address: SocketAddr, deadline: Instant) -> io::Result<OwnedFd> {
    let left = deadline.saturating_duration_since(Instant::now());
    let limit = left.clamp(Duration::from_millis(1), CONNECT_LIMIT);
    let stream = TcpStream::connect_timeout(&address, limit)?;
    // On one's own host, a socket that knocks at a port where nobody listens can meet itself.
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
pub(crate) fn listen_locally(name: &str, deadline: Instant) -> Result<Listener, String> {
    let taken = "another process of this host listens there already (another run with the same \
                 name or MASTER_PORT?)";
    let bind = || UnixListener::bind_addr(&UnixAddr::from_abstract_name(name)?);
    while_taken(bind, deadline, taken).map(Listener::Unix)
}

/// Listens at a TCP port: of the loopback device if `host` is that, of all interfaces otherwise.
/// Also gives the address by which this very host reaches it.
pub(crate) fn listen_by_tcp(
    host: &str,
    port: u16,
    deadline: Instant,
) -> Result<(Listener, Address), String> {
    // A name that this host cannot resolve may still mean it to others.
    let addresses = resolve(host, port).unwrap_or_default();
    let is_loopback = |address: &SocketAddr| address.ip().is_loopback();
    let places: Vec<IpAddr> = if !addresses.is_empty() && addresses.iter().all(is_loopback) {
        addresses.iter().map(SocketAddr::ip).collect()
    } else if !addresses.is_empty() && addresses.iter().all(SocketAddr::is_ipv4) {
        vec![Ipv4Addr::UNSPECIFIED.into()]
    } else {
        // The first of these takes IPv4 as well, where the host has IPv6 at all.
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
    let taken = format!(
        "port {port} of this host is in use by another program; choose another MASTER_PORT"
    );
    let listener = while_taken(bind, deadline, &taken)?;
    let own = listener.local_addr().map_err(|e| e.to_string())?;
    let ip = match own.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    Ok((Listener::Tcp(listener), Address::Tcp(ip.to_string(), own.port())))
}

/// Tries again for a while where a place is taken.
fn while_taken<T>(
    bind: impl Fn() -> io::Result<T>,
    deadline: Instant,
    taken: &str,
) -> Result<T, String> {
    let deadline = deadline.min(Instant::now() + TAKEN_LIMIT);
    loop {
        match bind() {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                return Err(format!("rank 0 cannot listen there: {error}"));
            }
            Err(_) if Instant::now() >= deadline => {
                return Err(format!("rank 0 cannot listen there: {taken}"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
