//! A small store of keys and values, through which ranks exchange addresses when they meet.
//!
//! Either rank 0 or torchrun's agent hosts the store. Every rank is a client. Opening the
//! store is the rendezvous itself: the call returns when all ranks have come. The store knows nothing of
//! groups or transports.
//!
//! | rendezvous | how the server is found | who may join |
//! |---|---|---|
//! | local | an abstract Unix socket | the same user, with the secret |
//! | tcp | rank 0's host and port | anybody who knows the secret |
//! | file | addresses in a file | the same user, or anybody who can read the secret in the file |
//! | agent | torchrun's host and port | anybody who can reach the port |
//!
//! At a store of ours, client and server prove to each other that they know the secret and never send it (`hello.rs`).
//! Nothing is encrypted, and what follows is not authenticated:
//! anybody who can read the network can read keys and values, and anybody who can change what hosts send each other can
//! change them. PyTorch's store knows no secret: anybody who can reach its port can read and write everything in it.

mod agent;
#[cfg(test)]
mod agent_tests;
mod client;
#[cfg(test)]
mod cluster_tests;
mod file;
#[cfg(feature = "fuzzing")]
#[path = "../../../../fuzz/checks/rendezvous.rs"]
pub mod fuzzing;
mod host;
mod server;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::Mutex;
use std::time::Duration;

use paceline_trace::lock;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::debug;

use self::client::Connection;
pub(crate) use self::client::Failed;
use self::host::{HostedStore, find_host};
use self::server::Server;
use self::wire::{MAX_KEY_BYTES, MAX_VALUE_BYTES, Request};
use crate::address::SocketAddress;
use crate::deadline::{Deadline, MAX_LIMIT};
use crate::hello::Who;
use crate::key::RunKey;
use crate::rendezvous::MAX_SECRET_BYTES;
use crate::{Rendezvous, RendezvousError, RendezvousPoint};

/// A rank's handle on the run's store.
///
/// The calls of one rank take turns: while one thread waits in [`Store::get`], its other threads wait too.
///
/// Rank 0 answers the other ranks for as long as its process lives, even after its own handle is dropped.
/// Ranks should pass a barrier before the first of them leaves, so that this process does not end too
/// early, as groups of `paceline-collectives` do when they form.
pub struct Store {
    rank: usize,
    world_size: usize,
    place: String,
    limit: Duration,
    key: RunKey,
    /// If a panic interrupts a request, the connection counts as lost.
    connection: Mutex<Backend>,
    /// On rank 0, the server that it hosts.
    server: Option<Server>,
}

enum Backend {
    Own(Connection),
    Agent(agent::Connection),
}

impl Store {
    /// Meets the other ranks, for at most `limit`. [`Store::get`] has the same limit.
    ///
    /// Returns when all ranks have come. Errors name the ranks that did not come, or say why this rank may
    /// not join: a different secret, a different world size, a rank that has already come, or a port in use.
    pub fn open(
        rendezvous: &Rendezvous,
        rank: usize,
        world_size: usize,
        limit: Duration,
    ) -> Result<Self, RendezvousError> {
        if rank >= world_size {
            return Err(RendezvousError::NoSuchRank { rank, world_size });
        }
        let place = rendezvous.place();
        let wrap = |failed: Failed| failed.error(rank, world_size, place.clone());
        if rendezvous.secret.len() > MAX_SECRET_BYTES {
            let reason = format!("the secret is longer than {MAX_SECRET_BYTES} bytes");
            return Err(wrap(Failed::Other(reason)));
        }
        debug!("rank {rank} of {world_size} goes to {place}");
        let limit = limit.min(MAX_LIMIT);
        let deadline = Deadline::after(limit);
        let mut host = None;
        let (backend, key) = match &rendezvous.point {
            RendezvousPoint::Agent { host, port, round } => {
                let address = SocketAddress::Tcp(host.clone(), *port);
                let (connection, secret) =
                    agent::rendezvous(&address, round, rank, world_size, &deadline)
                        .map_err(wrap)?;
                (Backend::Agent(connection), agent_key(&rendezvous.secret, &secret))
            }
            _ => {
                if rank == 0 {
                    let started = HostedStore::start(rendezvous, world_size, &deadline);
                    host = Some(started.map_err(|reason| wrap(Failed::Other(reason)))?);
                }
                let who = Who { rank, world: world_size, launch: rendezvous.launch };
                let find = || match &host {
                    Some(host) => Ok(host.candidates()),
                    None => find_host(rendezvous),
                };
                let (mut connection, key) = Connection::join(find, who, &deadline).map_err(wrap)?;
                let left = deadline.left();
                let arrived = connection.request(&Request::Arrive { limit: left }, left);
                arrived.map_err(|failed| {
                    if let Some(host) = &host {
                        host.server.give_up();
                    }
                    wrap(failed)
                })?;
                (Backend::Own(connection), key)
            }
        };
        let mut server = host.map(|host| host.server);
        if let Some(server) = &mut server {
            // The address is free again when this returns, for the next run or group.
            server.stop_listening();
        }
        debug!("rank {rank} has met all {world_size} ranks at {place}");
        let connection = Mutex::new(backend);
        Ok(Self { rank, world_size, place, limit, key, connection, server })
    }

    /// Sets a key of at most 1 KiB to a value of at most 16 MiB (8 MiB in an agent's store).
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        let mut connection = lock(&self.connection);
        let max_bytes = match *connection {
            Backend::Own(_) => MAX_VALUE_BYTES,
            Backend::Agent(_) => agent::MAX_VALUE_BYTES,
        };
        self.check_len("key", key.len(), MAX_KEY_BYTES)?;
        self.check_len("value", value.len(), max_bytes)?;
        let outcome = match &mut *connection {
            Backend::Own(connection) => {
                let request = Request::Set { key: key.into(), value: value.into() };
                connection.request(&request, self.limit).map(|_| ())
            }
            Backend::Agent(connection) => connection.set(key, value, &Deadline::after(self.limit)),
        };
        outcome.map_err(|failed| self.error("set", key, failed))
    }

    /// The value of a key. Waits until the key is set, at most for the limit given to [`Store::open`].
    /// A counter reads as decimal text.
    pub fn get(&self, key: &str) -> Result<Vec<u8>, RendezvousError> {
        self.check_len("key", key.len(), MAX_KEY_BYTES)?;
        let outcome = match &mut *lock(&self.connection) {
            Backend::Own(connection) => {
                let request = Request::Get { key: key.into(), limit: self.limit };
                connection.request(&request, self.limit)
            }
            Backend::Agent(connection) => connection.get(key, self.limit),
        };
        outcome.map_err(|failed| self.error("get", key, failed))
    }

    /// Adds to a counter, which starts at 0, and returns the new value.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, RendezvousError> {
        self.check_len("key", key.len(), MAX_KEY_BYTES)?;
        let outcome = match &mut *lock(&self.connection) {
            Backend::Own(connection) => {
                let request = Request::Add { key: key.into(), amount };
                connection.request(&request, self.limit).and_then(|sum| {
                    let sum = std::str::from_utf8(&sum).ok().and_then(|text| text.parse().ok());
                    sum.ok_or_else(|| Failed::Other("the sum is no number".into()))
                })
            }
            Backend::Agent(connection) => connection.add(key, amount, &Deadline::after(self.limit)),
        };
        outcome.map_err(|failed| self.error("add to", key, failed))
    }

    /// Gives every rank the values of all ranks, in rank order. Every rank calls this with the same
    /// `name`, once per store.
    pub fn exchange<T: Serialize + DeserializeOwned>(
        &self,
        name: &str,
        value: &T,
    ) -> Result<Vec<T>, RendezvousError> {
        self.set(&format!("{name}/{}", self.rank), &postcard::to_stdvec(value)?)?;
        let of = |peer| {
            let value = self.get(&format!("{name}/{peer}")).map_err(|mut error| {
                if let RendezvousError::Failed { missing, .. } = &mut error
                    && missing.is_empty()
                {
                    missing.push(peer);
                }
                if let Some(server) = &self.server {
                    server.give_up();
                }
                error
            });
            Ok(postcard::from_bytes(&value?)?)
        };
        (0..self.world_size).map(of).collect()
    }

    /// The key that all ranks of this attempt have, for connections that ranks open to each other afterward.
    pub fn key(&self) -> &RunKey {
        &self.key
    }

    fn check_len(&self, what: &str, len: usize, max_bytes: usize) -> Result<(), RendezvousError> {
        if len <= max_bytes {
            return Ok(());
        }
        let reason = format!("a {what} of {len} bytes is too long (at most {max_bytes})");
        Err(Failed::Other(reason).error(self.rank, self.world_size, self.place.clone()))
    }

    fn error(&self, action: &str, key: &str, failed: Failed) -> RendezvousError {
        let failed = match failed {
            Failed::TimedOut(_) => {
                Failed::Other(format!("nobody has set the key {key:?} within {:?}", self.limit))
            }
            Failed::Other(reason) => {
                Failed::Other(format!("cannot {action} the key {key:?}: {reason}"))
            }
            no_host => no_host,
        };
        failed.error(self.rank, self.world_size, self.place.clone())
    }
}

/// The key of ranks that meet at an agent: of the secret in its store, and of the user's own, which may be empty.
fn agent_key(own: &str, stored: &str) -> RunKey {
    RunKey::of_secret(&format!("{own}/{stored}"))
}

/// Leaves out the key, which must not appear in a log.
impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl Failed {
    /// The error of a rank that did not meet the others at `place`.
    pub(crate) fn error(self, rank: usize, world_size: usize, place: String) -> RendezvousError {
        let (reason, missing) = match self {
            Failed::TimedOut(ranks) if ranks.is_empty() => {
                ("not all ranks came in time".into(), ranks)
            }
            Failed::TimedOut(ranks) => (format!("ranks {ranks:?} did not come in time"), ranks),
            Failed::NoHost(reason) => (reason, vec![0]),
            Failed::Overtaken(ahead) => {
                return RendezvousError::Overtaken { rank, world_size, place, ahead };
            }
            Failed::Other(reason) => (reason, Vec::new()),
        };
        RendezvousError::Failed { rank, world_size, place, reason, missing }
    }
}
