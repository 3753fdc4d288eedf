//! Makes two connections between every two ranks, for data and for last words: the higher rank connects to the lower
//! rank.

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use paceline_rendezvous::{PeerAddress, PeerListener, SocketKind};

use super::inner::{ScratchMemory, Sockets};
use super::last_words::LastWords;
use super::wires::Wires;
use super::{NEVER, Tcp};
use crate::cost::Algorithm;
use crate::{CollectiveError, GroupOptions, Result};

impl Tcp {
    /// Connects this rank to all ranks for which `is_linked` is true.
    pub(crate) fn connect(
        listener: &PeerListener,
        addresses: &[PeerAddress],
        host: &str,
        rank: usize,
        options: &GroupOptions,
        is_linked: impl Fn(usize) -> bool,
    ) -> Result<Self> {
        let world = addresses.len();
        let peers: Vec<usize> =
            (0..world).filter(|&peer| peer != rank && is_linked(peer)).collect();
        let farewell = |[_, words]: &[OwnedFd; 2], missing: &[usize]| {
            LastWords::Missing(missing.to_vec()).say_to(words);
        };
        let limit = options.timeout;
        let sockets =
            listener.connect(SocketKind::Tcp, addresses, rank, &peers, limit, farewell)?;
        let streams = sockets.into_iter().map(|pair| pair.map(|pair| pair.map(TcpStream::from)));
        let wires = Wires::new(streams.collect()).map_err(|error| CollectiveError::Setup {
            rank,
            world_size: world,
            what: "its connections",
            reason: error.to_string(),
        })?;
        Ok(Self {
            rank,
            world,
            host: host.to_owned(),
            ring_from_bytes: (if options.algorithm == Algorithm::Ring { 0 } else { NEVER }).into(),
            inner: Mutex::new(Sockets { wires, scratch: ScratchMemory::default() }),
        })
    }
}
