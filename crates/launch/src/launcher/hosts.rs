//! The hosts of a run that this program's own launchers start, one launcher per host.
//!
//! The launchers know nothing of each other: only their ranks do.

use std::net::ToSocketAddrs;
use std::time::Duration;

use paceline_failure::{Failure, Result, usage};
use paceline_rendezvous::{Launcher, MAX_SECRET_BYTES, Rendezvous};

use crate::StartFlags;
use crate::environment::{Placement, SECRET};

/// The most hosts: more than any group can have.
const MAX_HOSTS: usize = 1 << 16;

/// The hosts of a run. They cannot be printed: the secret must not appear in a log.
#[derive(Clone)]
pub struct Hosts {
    /// How many there are: two or more.
    pub count: usize,
    /// Which of them this is.
    pub own: usize,
    /// The host of rank 0.
    pub address: String,
    /// The port of that host where the ranks meet.
    pub port: u16,
    /// The secret of all ranks. Empty if the user has set none: then anybody who can reach the port may join, and rank
    /// 0 warns.
    pub secret: String,
    /// How long all ranks of this host may be stopped. Ranks of other hosts wait for them about as long.
    pub patience: Duration,
}

/// The patience with programs whose time limit is unknown: the default of `--timeout`.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

impl Hosts {
    /// The hosts of the flags; `None` for a single one.
    pub fn resolve(flags: &StartFlags) -> Result<Option<Self>> {
        let StartFlags { nnodes, node_rank, master_addr, master_port, .. } = flags;
        let given = [
            ("--node-rank", node_rank.is_some()),
            ("--master-addr", master_addr.is_some()),
            ("--master-port", master_port.is_some()),
        ];
        let Some(count) = *nnodes else {
            return match given.iter().find(|(_, is_given)| *is_given) {
                Some((flag, _)) => usage(format!(
                    "{flag} is about several hosts; pass their number, --nnodes, too, or leave it out"
                )),
                None => Ok(None),
            };
        };
        if !(1..=MAX_HOSTS).contains(&count) {
            return usage(format!("--nnodes {count}: pass the number of hosts, 1 to {MAX_HOSTS}"));
        }
        if let Some(own) = node_rank.filter(|&own| own >= count) {
            return usage(format!(
                "--node-rank {own}: with --nnodes {count}, the hosts have the numbers 0 to {}; pass one of \
                 these, another one on each host",
                count - 1
            ));
        }
        let port = master_port.map(check_port).transpose()?;
        if count == 1 {
            return Ok(None);
        }
        let missing = |flag: &str, fix: &str| {
            Failure::Usage(format!("--nnodes {count} needs {flag} too: {fix}"))
        };
        let own = node_rank.ok_or_else(|| {
            missing("--node-rank", &format!("which of the hosts this is, 0 to {}", count - 1))
        })?;
        let address = master_addr.clone().ok_or_else(|| {
            missing("--master-addr", "the name or address of host 0, the same on all hosts")
        })?;
        let port = port.ok_or_else(|| {
            missing("--master-port", "a free port of host 0, the same on all hosts")
        })?;
        check_address(&address, port)?;
        let secret = read_secret()?;
        Ok(Some(Self { count, own, address, port, secret, patience: PATIENCE }))
    }

    /// The place of this host's first rank, if every host has `nproc` ranks.
    pub fn place(&self, nproc: usize) -> Placement {
        let Self { count, own, address, port, secret, .. } = self;
        let place = paceline_rendezvous::Placement {
            rank: own * nproc,
            world_size: count * nproc,
            local_rank: 0,
            local_world_size: nproc,
            node: Some(*own),
            launcher: Launcher::Paceline,
            variables: Vec::new(),
            rendezvous: Some(Rendezvous::by_tcp(address.clone(), *port, secret.clone())),
        };
        Placement { place, run_folder: None, is_started: false, is_launcher: true }
    }
}

/// The secret that the user has set, or an empty text.
pub(super) fn read_secret() -> Result<String> {
    let secret = std::env::var_os(SECRET).unwrap_or_default();
    match secret.into_string() {
        Ok(secret) if secret.len() <= MAX_SECRET_BYTES => Ok(secret),
        _ => usage(format!(
            "{SECRET}: this is no text of at most {MAX_SECRET_BYTES} bytes; set it to a shorter random text, \
             the same on all hosts"
        )),
    }
}

pub(super) fn check_port(port: usize) -> Result<u16> {
    let of_host = u16::try_from(port).ok().filter(|port| *port > 0);
    let no_port = || usage(format!("--master-port {port}: pass a free port of host 0, 1 to 65535"));
    of_host.map_or_else(no_port, Ok)
}

pub(super) fn check_address(address: &str, port: u16) -> Result<()> {
    let bare = address.trim_start_matches('[').trim_end_matches(']');
    let reason = match (bare, port).to_socket_addrs() {
        Ok(addresses) if addresses.len() > 0 => return Ok(()),
        Ok(_) => "it has no address".to_owned(),
        Err(error) => error.to_string(),
    };
    usage(format!(
        "--master-addr {address}: this host cannot find that host ({reason}); pass a name or an address by \
         which all hosts reach host 0"
    ))
}
