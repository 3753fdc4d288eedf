//! The messages between a member and the list of members, and how they are cut out of a stream of bytes.
//!
//! A message is its length in four bytes, little-endian, and its contents. Lengths are checked before memory is taken, and memory
//! grows with the bytes that have come. Nothing here waits.

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::GenerationPlace;
use crate::RendezvousError;

/// The longest message: the texts of all members.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
const PIECE_BYTES: usize = 64 << 10;

/// A message of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// The first message of each connection.
    Join { number: Option<u64>, settings: String },
    /// It is ready for the next generation, and has missed these members.
    Ready { missed: Vec<u64> },
    /// Its part of an exchange.
    Text { generation: u64, name: String, text: String },
    /// Its work is done.
    Leave,
    /// Nobody can go on.
    GiveUp { reason: String },
}

/// A message to a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Notice {
    /// It belongs to the run, with this number.
    Welcome(u64),
    Refused(String),
    Next(GenerationPlace),
    /// The texts of all members, in rank order.
    Texts {
        generation: u64,
        name: String,
        texts: Vec<String>,
    },
    /// Nobody can exchange texts in this generation any more.
    Broken {
        generation: u64,
        reason: String,
    },
    /// Somebody waits who would make the group larger.
    Asked,
    /// The last message of a connection.
    End(End),
    /// Sent now and then, so that a member notices when the list is gone.
    Alive,
}

/// Why a member does not go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum End {
    LeftOut(String),
    /// Nobody goes on.
    Failed(String),
    /// The others have done their work.
    Finished,
}

/// The bytes of a message.
pub(super) fn frame(message: &impl Serialize) -> Result<Vec<u8>, RendezvousError> {
    let contents = postcard::to_stdvec(message)?;
    let len = u32::try_from(contents.len()).ok().filter(|&len| len as usize <= MAX_MESSAGE_BYTES);
    let len = len.ok_or_else(|| {
        RendezvousError::Encoding(format!(
            "a message of {} bytes is too long (at most {MAX_MESSAGE_BYTES})",
            contents.len()
        ))
    })?;
    Ok([&len.to_le_bytes()[..], &contents].concat())
}

/// Bytes that have come and are not yet read.
#[derive(Debug, Default)]
pub(super) struct Inbox(Vec<u8>);

impl Inbox {
    /// Takes some of the bytes that have come to a socket. The end of the connection is an error.
    pub(super) fn fill(&mut self, socket: impl AsFd) -> io::Result<()> {
        let done = self.0.len();
        self.0.resize(done + PIECE_BYTES, 0);
        let received = recv(socket, &mut self.0[done..], RecvFlags::DONTWAIT);
        self.0.truncate(done + received.as_ref().map_or(0, |(count, _)| *count));
        match received {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The next message that has come whole.
    pub(super) fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let Some((len, rest)) = self.0.split_first_chunk() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len > MAX_MESSAGE_BYTES {
            return Err(invalid("it announces a message that is too long"));
        }
        let Some(contents) = rest.get(..len) else { return Ok(None) };
        let message = postcard::from_bytes(contents);
        let message = message.map_err(|_| invalid("it sends something else than a member does"))?;
        self.0.drain(..size_of::<u32>() + len);
        Ok(Some(message))
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
