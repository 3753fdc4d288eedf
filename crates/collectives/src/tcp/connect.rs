//! One connection between every two ranks: the higher one goes to the door of the lower one.

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use super::{Inner, Mesh, NEVER, Scratch, Tcp};
use crate::cost::Algorithm;
use crate::door::{Card, Door, Side};
use crate::{CollectiveError, GroupOptions};

impl Tcp {
    /// Connects this rank to all for which `is_linked`.
    pub(crate) fn connect(
        door: &Door,
        cards: &[Card],
        host: &str,
        rank: usize,
        options: &GroupOptions,
        is_linked: impl Fn(usize) -> bool,
    ) -> Result<Self, CollectiveError> {
        let world = cards.len();
        let linked = |range: std::ops::Range<usize>| -> Vec<usize> {
            range.filter(|&peer| is_linked(peer)).collect()
        };
        let (lower, higher) = (linked(0..rank), linked(rank + 1..world));
        let sockets = door.connect(Side::Tcp, cards, rank, (&higher, &lower), options.timeout)?;
        let streams =
            sockets.into_iter().map(|socket: Option<OwnedFd>| socket.map(TcpStream::from));
        let mesh = Mesh::new(streams.collect()).map_err(|error| CollectiveError::Meeting {
            rank,
            world_size: world,
            place: host.to_owned(),
            reason: format!("cannot set its connections up: {error}"),
        })?;
        Ok(Self {
            rank,
            world,
            host: host.to_owned(),
            ring_from_bytes: (if options.algorithm == Algorithm::Ring { 0 } else { NEVER }).into(),
            inner: Mutex::new(Inner { mesh, scratch: Scratch::default() }),
        })
    }
}
