//! Checks that arbitrary bytes do no harm as messages between a member and the list of members.
//!
//! Input: bytes, which come through a socket. Output: nothing if a message is accepted, otherwise that of the error.

use std::fmt::Debug;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;

use serde::{Serialize, de::DeserializeOwned};

use super::wire::{Inbox, Notice, Request, frame};

/// Reads the bytes as messages of a member, and as those of the list.
pub fn membership(bytes: &[u8]) -> Result<(), String> {
    messages::<Request>(bytes).or_else(|_| messages::<Notice>(bytes))
}

/// Each message is the same when it is written again. One is enough, even if rubbish follows it.
fn messages<T: Serialize + DeserializeOwned + PartialEq + Debug>(
    bytes: &[u8],
) -> Result<(), String> {
    let mut inbox = Inbox::default();
    let mut outcome = receive::<T>(&mut inbox, bytes);
    while let Ok(message) = &outcome {
        let bytes = frame(message).expect("no longer than it came");
        let again = receive::<T>(&mut Inbox::default(), &bytes).expect("a message");
        assert_eq!(&again, message);
        match receive(&mut inbox, &[]) {
            Ok(next) => outcome = Ok(next),
            Err(_) => break,
        }
    }
    outcome.map(drop).map_err(|error| error.to_string())
}

/// The next message, once these bytes and the end have come.
fn receive<T: DeserializeOwned>(inbox: &mut Inbox, bytes: &[u8]) -> io::Result<T> {
    let (mut from, to) = UnixStream::pair()?;
    from.write_all(bytes)?;
    drop(from);
    loop {
        match inbox.next()? {
            Some(message) => return Ok(message),
            None => inbox.fill(&to)?,
        }
    }
}
