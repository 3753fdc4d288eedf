//! A client of the store that torchrun's agent serves, PyTorch's TCPStore.
//!
//! The protocol: a connection begins with the query VALIDATE and a number. Then each query is a byte
//! followed by its arguments. Strings and values start with their length. Numbers are
//! little-endian and have eight bytes. To read a value, this client first waits for its key: for a
//! missing key, the server returns an empty value or closes the connection. Both of PyTorch's servers
//! (its own loop and libuv) speak this protocol. Queries that older servers lack are not used.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::client::Failed;
use crate::Rendezvous;
use crate::address::SocketAddress;
use crate::deadline::Deadline;
use crate::socket::{receive, receive_vec, transmit};

/// The longest value: PyTorch's server closes the connection if one is longer.
pub(crate) const MAX_VALUE_BYTES: usize = 8 << 20;

/// The key under which rank 0 stores the run's secret.
const SECRET_KEY: &str = "secret";

const MAGIC: u32 = 0x3C85_F7CE;

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const ADD: u8 = 4;
const CHECK: u8 = 5;
const WAIT: u8 = 6;
const CANCEL_WAIT: u8 = 12;

/// Answers to WAIT and CANCEL_WAIT.
const STOP_WAITING: u8 = 0;
const WAIT_CANCELED: u8 = 1;
/// Answer to CHECK.
const READY: u8 = 0;

/// How long the agent may take for an answer that depends on no other rank.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Waits for the other ranks at the agent's store. torchrun sets no secret, so rank 0 makes one and stores it there.
pub(crate) fn rendezvous(
    address: &SocketAddress,
    round: &str,
    rank: usize,
    world: usize,
    deadline: &Deadline,
) -> Result<(Connection, String), Failed> {
    let mut store =
        Connection::join(address, round, rank, world, deadline).map_err(Failed::Other)?;
    if rank == 0 {
        let secret =
            Rendezvous::fresh_secret().map_err(|error| Failed::Other(error.to_string()))?;
        store.set(SECRET_KEY, secret.as_bytes(), deadline)?;
    }
    store.arrive(rank, world, deadline)?;
    deadline.extend_to(ANSWER_LIMIT);
    let secret = store.get_until(SECRET_KEY, deadline)?;
    let secret = String::from_utf8(secret);
    Ok((store, secret.map_err(|_| Failed::Other("the secret there is not text".into()))?))
}

/// A connection to the agent's store.
#[derive(Debug)]
pub(crate) struct Connection {
    /// `None` after an error, because later answers could belong to earlier questions.
    socket: Option<OwnedFd>,
    prefix: String,
}

impl Connection {
    /// Connects, and checks that a PyTorch store answers. All keys begin with `round` and with the number of
    /// times that this rank has joined the round: torchrun repeats the
    /// rendezvous in the same round after hosts have joined or left, and ranks must not find keys of the one before.
    pub(crate) fn join(
        address: &SocketAddress,
        round: &str,
        rank: usize,
        world: usize,
        deadline: &Deadline,
    ) -> Result<Self, String> {
        let socket = loop {
            match address.connect(deadline) {
                Ok(socket) => break socket,
                Err(error) if deadline.has_passed() => {
                    return Err(format!("torchrun's agent cannot be reached: {error}"));
                }
                Err(_) => deadline.pause(Duration::from_millis(20)),
            }
        };
        let mut hello = vec![VALIDATE];
        hello.extend_from_slice(&MAGIC.to_le_bytes());
        deadline
            .beside(ANSWER_LIMIT, |limit| transmit(&socket, &hello, limit))
            .map_err(|error| format!("torchrun's agent does not listen: {error}"))?;
        let prefix = format!("/paceline/{round}/{world}/");
        let mut connection = Self::over(socket, prefix);
        let attempt = connection.add(&format!("attempts/{rank}"), 1, deadline);
        let attempt = attempt.map_err(|failed| match failed {
            Failed::Other(reason) | Failed::NoHost(reason) => {
                format!("the program that answers there is not a PyTorch store: {reason}")
            }
            // Only a store of ours knows attempts.
            Failed::TimedOut(_) | Failed::Overtaken(_) => {
                "the program that listens there does not answer".into()
            }
        })?;
        connection.prefix += &format!("{attempt}/");
        Ok(connection)
    }

    /// A connection to a store that has answered the greeting, with keys that begin with `prefix`.
    pub(crate) fn over(socket: OwnedFd, prefix: String) -> Self {
        Self { socket: Some(socket), prefix }
    }

    /// Sets a key. A suspension meanwhile moves `deadline`, as in all that an agent answers at once.
    pub(crate) fn set(
        &mut self,
        key: &str,
        value: &[u8],
        deadline: &Deadline,
    ) -> Result<(), Failed> {
        let mut query = self.query(SET, key);
        query.extend_from_slice(&(value.len() as u64).to_le_bytes());
        query.extend_from_slice(value);
        let send = |socket: &OwnedFd| {
            deadline.beside(ANSWER_LIMIT, |limit| transmit(socket, &query, limit))
        };
        self.exchange(send)
    }

    pub(crate) fn add(
        &mut self,
        key: &str,
        amount: i64,
        deadline: &Deadline,
    ) -> Result<i64, Failed> {
        let mut query = self.query(ADD, key);
        query.extend_from_slice(&amount.to_le_bytes());
        self.exchange(|socket| {
            let sum = deadline.beside(ANSWER_LIMIT, |limit| ask(socket, &query, limit))?;
            Ok(i64::from_le_bytes(sum))
        })
    }

    /// Waits until the key is set, at most `limit`, and returns its value.
    pub(crate) fn get(&mut self, key: &str, limit: Duration) -> Result<Vec<u8>, Failed> {
        self.get_until(key, &Deadline::after(limit))
    }

    fn get_until(&mut self, key: &str, deadline: &Deadline) -> Result<Vec<u8>, Failed> {
        if !self.wait(&[key.to_owned()], deadline)? {
            return Err(Failed::TimedOut(Vec::new()));
        }
        let query = self.query(GET, key);
        self.exchange(|socket| {
            let len = u64::from_le_bytes(ask(socket, &query, &Deadline::after(ANSWER_LIMIT))?);
            if len > MAX_VALUE_BYTES as u64 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a value is too long"));
            }
            receive_vec(socket, len as usize, &Deadline::after(ANSWER_LIMIT))
        })
    }

    /// Reports that `rank` has come, and waits until all `world` ranks have reported.
    pub(crate) fn arrive(
        &mut self,
        rank: usize,
        world: usize,
        deadline: &Deadline,
    ) -> Result<(), Failed> {
        let key = |rank: usize| format!("here/{rank}");
        self.set(&key(rank), b"1", deadline)?;
        let keys: Vec<String> = (0..world).map(key).collect();
        if self.wait(&keys, deadline)? {
            return Ok(());
        }
        let mut missing = Vec::new();
        for (rank, key) in keys.iter().enumerate() {
            let query = self.key_list(CHECK, std::slice::from_ref(key));
            let limit = Deadline::after(ANSWER_LIMIT);
            let [is_there] = self.exchange(|socket| ask(socket, &query, &limit))?;
            if is_there != READY {
                missing.push(rank);
            }
        }
        Err(Failed::TimedOut(missing))
    }

    /// Waits for all keys. Returns whether they came in time. The time that the server takes for its other answers does not count.
    fn wait(&mut self, keys: &[String], deadline: &Deadline) -> Result<bool, Failed> {
        let query = self.key_list(WAIT, keys);
        self.exchange(|socket| {
            deadline.beside(ANSWER_LIMIT, |limit| transmit(socket, &query, limit))?;
            let mut answer = [0u8];
            match receive(socket, &mut answer, Some(deadline)) {
                Ok(()) if answer == [STOP_WAITING] => return Ok(true),
                Ok(()) => return Err(unexpected()),
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
                Err(error) => return Err(error),
            }
            // The keys may come while the wait is being canceled. Then the server sends both answers.
            let limit = Deadline::after(ANSWER_LIMIT);
            let [mut answer] = ask(socket, &[CANCEL_WAIT], &limit)?;
            let came = answer == STOP_WAITING;
            if came {
                [answer] = ask(socket, &[], &limit)?;
            }
            if answer == WAIT_CANCELED { Ok(came) } else { Err(unexpected()) }
        })
    }

    fn query(&self, query: u8, key: &str) -> Vec<u8> {
        let mut bytes = vec![query];
        self.append_key(&mut bytes, key);
        bytes
    }

    fn key_list(&self, query: u8, keys: &[String]) -> Vec<u8> {
        let mut bytes = vec![query];
        bytes.extend_from_slice(&(keys.len() as u64).to_le_bytes());
        for key in keys {
            self.append_key(&mut bytes, key);
        }
        bytes
    }

    fn append_key(&self, bytes: &mut Vec<u8>, key: &str) {
        let len = (self.prefix.len() + key.len()) as u64;
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(self.prefix.as_bytes());
        bytes.extend_from_slice(key.as_bytes());
    }

    fn exchange<T>(
        &mut self,
        exchange: impl FnOnce(&OwnedFd) -> io::Result<T>,
    ) -> Result<T, Failed> {
        let socket = self.socket.take().ok_or_else(|| {
            Failed::Other("the connection to the store was lost by an earlier error".into())
        })?;
        let outcome = exchange(&socket).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => Failed::Other("it closed the connection".into()),
            _ => Failed::Other(error.to_string()),
        })?;
        self.socket = Some(socket);
        Ok(outcome)
    }
}

/// Sends a query and reads an answer of `N` bytes.
fn ask<const N: usize>(socket: &OwnedFd, query: &[u8], deadline: &Deadline) -> io::Result<[u8; N]> {
    let mut answer = [0u8; N];
    transmit(socket, query, deadline)?;
    receive(socket, &mut answer, Some(deadline))?;
    Ok(answer)
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it gave an unknown answer")
}
