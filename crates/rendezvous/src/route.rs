//! Finds the address at which other hosts reach this one.
//!
//! The kernel knows which of this host's addresses it would use on the way to the rendezvous. This module
//! does not know what will listen there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use serde::{Deserialize, Serialize};

use crate::store::Failed;
use crate::{Rendezvous, RendezvousError, RendezvousPoint};

/// The network route from this host to the rendezvous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRoute {
    /// This host's address on that route.
    pub own: IpAddr,
    /// The address of the rendezvous, as this host sees it.
    pub rendezvous: IpAddr,
}

impl HostRoute {
    /// Asks the kernel for the route, without a packet. For a rendezvous that is not a network address (a
    /// local socket or a file), the result is the loopback address. `rank` and `world_size` are for the error.
    pub fn to(
        rendezvous: &Rendezvous,
        rank: usize,
        world_size: usize,
    ) -> Result<Self, RendezvousError> {
        let fail = |reason| Failed::Other(reason).error(rank, world_size, rendezvous.place());
        Self::find(rendezvous).map_err(fail)
    }

    fn find(rendezvous: &Rendezvous) -> Result<Self, String> {
        let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
        let (host, port) = match &rendezvous.point {
            RendezvousPoint::Tcp { host, port } | RendezvousPoint::Agent { host, port, .. } => {
                (host, *port)
            }
            RendezvousPoint::Local { .. } | RendezvousPoint::File(_) => {
                return Ok(Self { own: loopback, rendezvous: loopback });
            }
        };
        let through = |target: SocketAddr| {
            let any = match target {
                SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect(target)?;
            Ok::<_, std::io::Error>(Self {
                own: socket.local_addr()?.ip(),
                rendezvous: target.ip(),
            })
        };
        let mut last = "the name has no address".to_owned();
        for target in (host.as_str(), port).to_socket_addrs().map_err(|e| e.to_string())? {
            match through(target) {
                Ok(found) => return Ok(found),
                Err(error) => last = error.to_string(),
            }
        }
        Err(format!("this host has no route to {host}: {last}"))
    }

    /// The address at which the other ranks reach `rank`, given all ranks' routes in rank order.
    ///
    /// The host of the rendezvous may know itself only by a loopback address from its own file of
    /// host names. The other hosts know an address that they can reach.
    pub fn address_of(routes: &[Self], rank: usize) -> IpAddr {
        let own = routes[rank].own;
        let from_outside = routes.iter().map(|route| route.rendezvous).find(|ip| !ip.is_loopback());
        if own.is_loopback() { from_outside.unwrap_or(own) } else { own }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn a_host_that_knows_itself_by_loopback_only_is_seen_from_outside() {
        let outside = IpAddr::from([10, 0, 0, 1]);
        let mut routes = [HostRoute { own: HERE, rendezvous: HERE }; 2];
        assert_eq!(HostRoute::address_of(&routes, 0), HERE);
        routes[1] = HostRoute { own: [10, 0, 0, 2].into(), rendezvous: outside };
        assert_eq!(HostRoute::address_of(&routes, 0), outside);
        assert_eq!(HostRoute::address_of(&routes, 1), IpAddr::from([10, 0, 0, 2]));
    }

    #[test]
    fn a_rendezvous_of_this_host_is_reached_by_loopback() {
        let expected = Ok(HostRoute { own: HERE, rendezvous: HERE });
        assert_eq!(HostRoute::to(&Rendezvous::by_tcp("127.0.0.1", 9, ""), 0, 1), expected);
        assert_eq!(HostRoute::to(&Rendezvous::by_port(9, ""), 0, 1), expected);
    }
}
