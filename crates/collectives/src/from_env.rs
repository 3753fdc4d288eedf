//! A group from the environment that the launcher has set: who the ranks are, where they meet, and which
//! transport suits them.
//!
//! Input: the environment. Output: a group. Before any connection is made, every rank writes to the store which
//! transport it was asked for and where it runs, so that all choose the same transport.
//! This module knows nothing of how transports work.

use paceline_rendezvous::{HostRoute, PeerListener, Placement, Rendezvous, Store};
use serde::{Deserialize, Serialize};

use crate::group::{Connect, Lineage};
use crate::{CollectiveError, Group, GroupOptions, Result, Transport};

/// The environment variable that names the transport, for ranks that a launcher has started.
pub const TRANSPORT: &str = "PACELINE_TRANSPORT";

/// A rank's transport and place, which the ranks compare before they choose a transport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spot {
    /// The transport that its environment names. Empty if it names no transport.
    pub(crate) wish: String,
    pub(crate) local_rank: usize,
    pub(crate) local_world: usize,
    pub(crate) route: HostRoute,
}

impl Group {
    /// The group of all ranks that a launcher has started: `paceline launch`, torchrun, mpirun, srun,
    /// or any other that sets RANK and WORLD_SIZE (see [`Placement`]). Without a launcher, a group of one.
    ///
    /// PACELINE_TRANSPORT, the same for all ranks, chooses how they reach each other: `shm`, `tcp`, `hybrid` or `mpi`. If it is
    /// not set, ranks of one host use `shm`. Ranks of several hosts use
    /// `hybrid` if every host has the same number of ranks and more than one, and `tcp` otherwise. If
    /// `options` is `None`, [`GroupOptions::for_local_ranks`] is used.
    ///
    /// Errors if the variables contradict each other, if the transport cannot connect these ranks, or if
    /// some ranks do not come within the time limit.
    pub fn from_env(options: Option<GroupOptions>) -> Result<Self> {
        let wish = wish(std::env::var(TRANSPORT).ok().as_deref())?;
        let Some(place) = Placement::from_env()? else {
            return Self::alone(options);
        };
        let options =
            options.unwrap_or_else(|| GroupOptions::for_local_ranks(place.local_world_size));
        if wish == Some(Transport::Mpi) {
            return Self::by_mpi(options);
        }
        let (rank, world) = (place.rank, place.world_size);
        Self::check_world(rank, world)?;
        if world == 1 && wish.is_none() {
            return Self::alone(Some(options));
        }
        let rendezvous = place.rendezvous()?;
        let own = Spot::of(&place, rendezvous, wish)?;
        let store = Store::open(rendezvous, rank, world, options.timeout)?;
        let spots: Vec<Spot> = store.exchange("spot", &own)?;
        let transport = choose(&spots, wish)?;
        let routes: Vec<HostRoute> = spots.iter().map(|spot| spot.route).collect();
        let host = HostRoute::address_of(&routes, rank).to_string();
        let by = match transport {
            Transport::Shm => Connect::Shm,
            Transport::Hybrid => Connect::Hybrid(&host, place.local_world_size),
            _ => Connect::Tcp(&host),
        };
        let listener = PeerListener::bind(store.key(), by.host(), rank, world)?;
        let addresses = store.exchange("address", listener.address())?;
        let lineage = Lineage::of_processes(store.key());
        Self::form(&listener, &addresses, by, rank, options, lineage)
    }

    fn alone(options: Option<GroupOptions>) -> Result<Self> {
        let mut options = options.unwrap_or_else(|| GroupOptions::for_local_ranks(1));
        let link = options.link.take();
        let group = Self::threads_with(1, options)?.remove(0);
        group.emulate_if_asked(link)
    }

    #[cfg(feature = "mpi")]
    fn by_mpi(options: GroupOptions) -> Result<Self> {
        Self::mpi(options)
    }

    #[cfg(not(feature = "mpi"))]
    fn by_mpi(_: GroupOptions) -> Result<Self> {
        let advice = "this program was built without it; build it with the cargo feature `mpi` of \
                      paceline-collectives, or unset the variable";
        Err(refusal("mpi", advice))
    }
}

impl Spot {
    fn of(place: &Placement, rendezvous: &Rendezvous, wish: Option<Transport>) -> Result<Self> {
        let route = HostRoute::to(rendezvous, place.rank, place.world_size)?;
        Ok(Self {
            wish: wish.map_or(String::new(), |wish| wish.name().into()),
            local_rank: place.local_rank,
            local_world: place.local_world_size,
            route,
        })
    }
}

/// The transport that the value of the variable names, if any.
pub(crate) fn wish(value: Option<&str>) -> Result<Option<Transport>> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    match value {
        "shm" => Ok(Some(Transport::Shm)),
        "tcp" => Ok(Some(Transport::Tcp)),
        "hybrid" => Ok(Some(Transport::Hybrid)),
        "mpi" => Ok(Some(Transport::Mpi)),
        "thread" => Err(refusal(
            value,
            "it connects the threads of one process, and these ranks are processes; use shm, tcp, \
             hybrid or mpi",
        )),
        _ => Err(refusal(value, "there is no such transport; use shm, tcp, hybrid or mpi")),
    }
}

pub(crate) fn refusal(value: &str, advice: &str) -> CollectiveError {
    CollectiveError::TransportVariable { value: value.into(), advice: advice.into() }
}

/// The transport for ranks at these spots: the same answer, or the same error, on all of them.
pub(crate) fn choose(spots: &[Spot], wish: Option<Transport>) -> Result<Transport> {
    let other = spots.iter().position(|spot| spot.wish != spots[0].wish);
    if let Some(other) = other {
        let advice = format!(
            "rank 0 has {:?} and rank {other} has {:?} there; set the same for all, or for none",
            spots[0].wish, spots[other].wish
        );
        return Err(refusal(&spots[other].wish, &advice));
    }
    let world = spots.len();
    let is_one_host = spots.iter().all(|spot| spot.local_world == world);
    let local = spots[0].local_world;
    let is_even = world.is_multiple_of(local)
        && spots
            .iter()
            .enumerate()
            .all(|(rank, spot)| spot.local_world == local && spot.local_rank == rank % local);
    match wish {
        Some(Transport::Shm) if !is_one_host => Err(refusal(
            "shm",
            "the ranks are on several hosts, which share no memory; use hybrid or tcp",
        )),
        Some(Transport::Hybrid) if !is_even => Err(refusal(
            "hybrid",
            "it needs the same number of ranks on every host, counted host by host; use tcp",
        )),
        Some(wish) => Ok(wish),
        None if is_one_host => Ok(Transport::Shm),
        None if is_even && local > 1 => Ok(Transport::Hybrid),
        None => Ok(Transport::Tcp),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    /// The ranks of hosts that have these numbers of ranks.
    fn spots(hosts: &[usize]) -> Vec<Spot> {
        let on = |&local_world: &usize| {
            (0..local_world).map(move |local_rank| Spot {
                wish: String::new(),
                local_rank,
                local_world,
                route: HostRoute { own: LOOPBACK, rendezvous: LOOPBACK },
            })
        };
        hosts.iter().flat_map(on).collect()
    }

    #[test]
    fn the_hosts_decide_unless_the_variable_does() {
        assert_eq!(choose(&spots(&[3]), None).unwrap(), Transport::Shm);
        assert_eq!(choose(&spots(&[2, 2, 2]), None).unwrap(), Transport::Hybrid);
        assert_eq!(choose(&spots(&[1, 1]), None).unwrap(), Transport::Tcp);
        assert_eq!(choose(&spots(&[3, 1]), None).unwrap(), Transport::Tcp);
        assert_eq!(choose(&spots(&[3]), Some(Transport::Tcp)).unwrap(), Transport::Tcp);
        // Ranks dealt out to the hosts in turn are not consecutive within a host.
        let dealt: Vec<Spot> = [0, 2, 1, 3].map(|rank| spots(&[2, 2])[rank].clone()).into();
        assert_eq!(choose(&dealt, None).unwrap(), Transport::Tcp);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_way_out() {
        let says = |outcome: Result<_>| outcome.unwrap_err().to_string();
        let error = says(choose(&spots(&[2, 2]), Some(Transport::Shm)));
        assert!(error.contains("PACELINE_TRANSPORT=\"shm\"") && error.contains("use hybrid"));
        let error = says(choose(&spots(&[3, 1]), Some(Transport::Hybrid)));
        assert!(error.contains("same number of ranks"), "{error}");
        let mut torn = spots(&[2]);
        torn[1].wish = "tcp".into();
        let error = says(choose(&torn, None));
        assert!(error.contains("rank 0 has \"\" and rank 1 has \"tcp\""), "{error}");
        assert!(wish(Some("thread")).unwrap_err().to_string().contains("use shm"));
        assert!(wish(Some("pigeon")).unwrap_err().to_string().contains("no such transport"));
        assert_eq!((wish(None).unwrap(), wish(Some("")).unwrap()), (None, None));
    }
}
