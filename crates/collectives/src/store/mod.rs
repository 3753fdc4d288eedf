//! A small store of keys and values, by which ranks exchange addresses when they meet.
//!
//! Rank 0 hosts it, or torchrun's agent does; every rank, rank 0 included, is a client. Opening it
//! is the meeting itself: it returns when all ranks have come. The store knows nothing of groups,
//! transports, or what its keys mean.
//!
//! | meeting | how the server is found | who may join |
//! |---|---|---|
//! | local | an abstract Unix socket | the same user, with the secret |
//! | tcp | rank 0's host and port | who has the secret |
//! | file | addresses in a file | the same user, or who could read the secret in the file |
//! | agent | torchrun's host and port | who reaches the port |
//!
//! Nothing is encrypted: over TCP, secret and values can be read on the way. Networks between hosts
//! of a run are trusted in that.

mod address;
mod agent;
#[cfg(test)]
mod agent_tests;
mod client;
mod file;
mod hello;
mod host;
mod server;
mod socket;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::client::{Connection, Failed};
use self::host::{Host, find_host};
use self::server::Server;
use self::wire::{MAX_KEY_BYTES, MAX_VALUE_BYTES, Request};
use crate::{CollectiveError, Meeting, MeetingPoint};

pub(crate) use self::address::{Address, Listener, listen_by_tcp, listen_locally};
pub(crate) use self::hello::{Refusal, Verdict, answer_hello, read_hello, say_hello};

/// A rank's handle on the run's store.
///
/// The calls of one rank take turns: while one thread waits in [`Store::get`], the others of this
/// rank wait for it.
///
/// Rank 0 answers the others for as long as its process lives, also after its own handle is dropped.
/// So that its process does not end too early, ranks should pass a barrier before the first of them
/// leaves; a group does so when it is formed.
pub struct Store {
    rank: usize,
    world_size: usize,
    place: String,
    limit: Duration,
    secret: String,
    connection: Mutex<Backend>,
    /// Rank 0's, where it hosts one.
    _server: Option<Server>,
}

enum Backend {
    Own(Connection),
    Agent(agent::Connection),
}

impl Store {
    /// Meets the other ranks, at most for `limit`, which is also the longest that [`Store::get`]
    /// waits.
    ///
    /// Returns when all ranks have come. Errors name the ranks that did not, or say why this one may
    /// not join: another secret, another world size, a rank that is there already, a port in use.
    pub fn open(
        meeting: &Meeting,
        rank: usize,
        world_size: usize,
        limit: Duration,
    ) -> Result<Self, CollectiveError> {
        if rank >= world_size {
            return Err(CollectiveError::NoSuchRank { rank, world_size });
        }
        let place = meeting.place();
        let wrap =
            |reason| CollectiveError::Meeting { rank, world_size, place: place.clone(), reason };
        if meeting.secret.len() > hello::SECRET_BYTES {
            let reason = format!("the secret is longer than {} bytes", hello::SECRET_BYTES);
            return Err(wrap(reason));
        }
        let limit = limit.min(client::MAX_LIMIT);
        let deadline = Instant::now() + limit;
        let mut host = None;
        let (backend, secret) = match &meeting.point {
            MeetingPoint::Agent { host, port, round } => {
                let address = Address::Tcp(host.clone(), *port);
                let (connection, secret) = agent::meet(&address, round, rank, world_size, deadline)
                    .map_err(|failed| wrap(failed.reason()))?;
                (Backend::Agent(connection), secret)
            }
            _ => {
                if rank == 0 {
                    host = Some(Host::start(meeting, world_size, deadline).map_err(wrap)?);
                }
                let find = || match &host {
                    Some(host) => Ok(host.candidates()),
                    None => find_host(meeting),
                };
                let (mut connection, secret) =
                    Connection::join(find, rank, world_size, deadline).map_err(wrap)?;
                let left = deadline.saturating_duration_since(Instant::now());
                let arrived = connection.request(&Request::Arrive { limit: left }, left);
                arrived.map_err(|failed| wrap(failed.reason()))?;
                (Backend::Own(connection), secret)
            }
        };
        let mut server = host.map(|host| host.server);
        if let Some(server) = &mut server {
            // The place is free again when this returns, for the next run or group.
            server.finish_meeting();
        }
        let connection = Mutex::new(backend);
        Ok(Self { rank, world_size, place, limit, secret, connection, _server: server })
    }

    /// Sets a key of at most 1 KiB to a value of at most 16 MiB (8 MiB in an agent's store).
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), CollectiveError> {
        let mut connection = self.lock();
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
            Backend::Agent(connection) => connection.set(key, value),
        };
        outcome.map_err(|failed| self.error("set", key, failed))
    }

    /// The value of a key. Waits until it is there, at most for the limit given to [`Store::open`].
    /// A counter reads as decimal text.
    pub fn get(&self, key: &str) -> Result<Vec<u8>, CollectiveError> {
        self.check_len("key", key.len(), MAX_KEY_BYTES)?;
        let outcome = match &mut *self.lock() {
            Backend::Own(connection) => {
                let request = Request::Get { key: key.into(), limit: self.limit };
                connection.request(&request, self.limit)
            }
            Backend::Agent(connection) => connection.get(key, self.limit),
        };
        outcome.map_err(|failed| self.error("get", key, failed))
    }

    /// Adds to a counter, which begins at 0, and returns the new value.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, CollectiveError> {
        self.check_len("key", key.len(), MAX_KEY_BYTES)?;
        let outcome = match &mut *self.lock() {
            Backend::Own(connection) => {
                let request = Request::Add { key: key.into(), amount };
                connection.request(&request, self.limit).and_then(|sum| {
                    let sum = std::str::from_utf8(&sum).ok().and_then(|text| text.parse().ok());
                    sum.ok_or_else(|| Failed::Other("the sum is no number".into()))
                })
            }
            Backend::Agent(connection) => connection.add(key, amount),
        };
        outcome.map_err(|failed| self.error("add to", key, failed))
    }

    /// The run's secret, for connections that ranks open to each other afterwards.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    fn lock(&self) -> MutexGuard<'_, Backend> {
        // A connection that a panic left in the middle of a question counts as lost.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_len(&self, what: &str, len: usize, max_bytes: usize) -> Result<(), CollectiveError> {
        if len <= max_bytes {
            return Ok(());
        }
        Err(self.fail(format!("a {what} of {len} bytes is too long (at most {max_bytes})")))
    }

    fn error(&self, action: &str, key: &str, failed: Failed) -> CollectiveError {
        self.fail(match failed {
            Failed::TimedOut(_) => {
                format!("nobody has set the key {key:?} within {:?}", self.limit)
            }
            Failed::Other(reason) => format!("cannot {action} the key {key:?}: {reason}"),
        })
    }

    fn fail(&self, reason: String) -> CollectiveError {
        let (rank, world_size, place) = (self.rank, self.world_size, self.place.clone());
        CollectiveError::Meeting { rank, world_size, place, reason }
    }
}

/// Without the secret, which has no business in a log.
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
    /// For a meeting that failed.
    fn reason(self) -> String {
        match self {
            Failed::TimedOut(ranks) if ranks.is_empty() => "not all ranks came in time".into(),
            Failed::TimedOut(ranks) => format!("ranks {ranks:?} did not come in time"),
            Failed::Other(reason) => reason,
        }
    }
}
