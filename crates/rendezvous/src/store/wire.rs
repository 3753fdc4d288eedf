//! The bytes of requests to our own store's server, and of its answers.
//!
//! A request is a header of fixed size, a key and a value. An answer is a status and a payload. Numbers
//! are little-endian. Lengths are checked before memory is allocated.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::socket::{receive, receive_vec, transmit};

/// The longest key.
pub(crate) const MAX_KEY_BYTES: usize = 1 << 10;
/// The longest value.
pub(crate) const MAX_VALUE_BYTES: usize = 16 << 20;

/// How long the rest of a message may take after its first byte has come.
pub(crate) const MESSAGE_LIMIT: Duration = Duration::from_secs(30);

const HEADER_BYTES: usize = 1 + 4 + 4 + 8;

const SET: u8 = 0;
const GET: u8 = 1;
const ADD: u8 = 2;
const ARRIVE: u8 = 3;

/// A rank's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Set {
        key: String,
        value: Vec<u8>,
    },
    /// Waits until the key is set, at most `limit`.
    Get {
        key: String,
        limit: Duration,
    },
    Add {
        key: String,
        amount: i64,
    },
    /// Waits until all ranks have come, at most `limit`.
    Arrive {
        limit: Duration,
    },
}

/// The store's answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Done. Holds the value of a get, or the sum of an add.
    Done(Vec<u8>),
    /// The time is over. Holds the missing ranks, four bytes each.
    TimedOut(Vec<u8>),
    /// The request cannot be done. Holds the reason.
    Refused(Vec<u8>),
    /// This rank has come for a later attempt of the run, so the others wait for it without success.
    Overtaken(u32),
}

pub(crate) fn send_request(
    socket: impl AsFd,
    request: &Request,
    deadline: &Deadline,
) -> io::Result<()> {
    let millis = |limit: &Duration| i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
    let (op, key, value, number) = match request {
        Request::Set { key, value } => (SET, key.as_str(), value.as_slice(), 0),
        Request::Get { key, limit } => (GET, key.as_str(), [].as_slice(), millis(limit)),
        Request::Add { key, amount } => (ADD, key.as_str(), [].as_slice(), *amount),
        Request::Arrive { limit } => (ARRIVE, "", [].as_slice(), millis(limit)),
    };
    let mut bytes = Vec::with_capacity(HEADER_BYTES + key.len() + value.len());
    bytes.push(op);
    bytes.extend_from_slice(&(key.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(value.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(key.as_bytes());
    bytes.extend_from_slice(value);
    transmit(socket, &bytes, deadline)
}

/// Waits for the next request, without a limit. The end of the connection is an error.
pub(crate) fn read_request(socket: impl AsFd) -> io::Result<Request> {
    let mut header = [0u8; HEADER_BYTES];
    let (first, rest) = header.split_at_mut(1);
    receive(&socket, first, None)?;
    let deadline = &Deadline::after(MESSAGE_LIMIT);
    receive(&socket, rest, Some(deadline))?;
    let [op, k0, k1, k2, k3, v0, v1, v2, v3, number @ ..] = header;
    let key = read_part(&socket, [k0, k1, k2, k3], MAX_KEY_BYTES, deadline)?;
    let value = read_part(&socket, [v0, v1, v2, v3], MAX_VALUE_BYTES, deadline)?;
    let key = String::from_utf8(key).map_err(|_| invalid("a key is not text"))?;
    let number = i64::from_le_bytes(number);
    let limit = Duration::from_millis(number.max(0) as u64);
    match op {
        SET => Ok(Request::Set { key, value }),
        GET => Ok(Request::Get { key, limit }),
        ADD => Ok(Request::Add { key, amount: number }),
        ARRIVE => Ok(Request::Arrive { limit }),
        _ => Err(invalid("an unknown request")),
    }
}

pub(crate) fn send_answer(socket: impl AsFd, answer: &Answer) -> io::Result<()> {
    let (status, payload) = match answer {
        Answer::Done(payload) => (0u8, payload.as_slice()),
        Answer::TimedOut(payload) => (1, payload.as_slice()),
        Answer::Refused(payload) => (2, payload.as_slice()),
        Answer::Overtaken(ahead) => (3, &ahead.to_le_bytes()[..]),
    };
    let mut bytes = Vec::with_capacity(5 + payload.len());
    bytes.push(status);
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(payload);
    transmit(socket, &bytes, &Deadline::after(MESSAGE_LIMIT))
}

pub(crate) fn read_answer(socket: impl AsFd, deadline: &Deadline) -> io::Result<Answer> {
    let mut header = [0u8; 5];
    receive(&socket, &mut header, Some(deadline))?;
    let [status, len @ ..] = header;
    // The answer has begun, so this side waits for its end even if the request used up all the time.
    deadline.extend_to(MESSAGE_LIMIT);
    let payload = read_part(&socket, len, MAX_VALUE_BYTES, deadline)?;
    match status {
        0 => Ok(Answer::Done(payload)),
        1 => Ok(Answer::TimedOut(payload)),
        2 => Ok(Answer::Refused(payload)),
        3 => {
            let ahead = payload.try_into().map_err(|_| invalid("an answer without a rank"))?;
            Ok(Answer::Overtaken(u32::from_le_bytes(ahead)))
        }
        _ => Err(invalid("an unknown answer")),
    }
}

fn read_part(
    socket: impl AsFd,
    len: [u8; 4],
    max_bytes: usize,
    deadline: &Deadline,
) -> io::Result<Vec<u8>> {
    let len = u32::from_le_bytes(len) as usize;
    if len > max_bytes {
        return Err(invalid("a key or value is too long"));
    }
    receive_vec(socket, len, deadline)
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
