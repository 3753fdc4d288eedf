//! Messages between any two ranks of a group, with tags, independent of the group's operations and of each other.
//!
//! Input: memory for which the caller vouches, a peer and a tag. Output: the sender's rank or an error, passed to a callback. A
//! message is matched with the earliest receive of its sender and tag. A message stays at its
//! sender until its receiver asks for it. One thread moves the bytes of all messages; the first message starts it. This module knows no operation of a group.

#[cfg(all(test, not(loom)))]
mod cluster_tests;
mod desk;
mod pump;

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_memory::DType;
use paceline_rendezvous::{PeerAddress, PeerListener, SocketKind};
use paceline_trace::runtime::{before_join, now, ring};
use paceline_trace::{lock, thread_builder};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::set_socket_send_buffer_size;

use self::desk::{Delivered, Desk, Letter, Stage};
use self::pump::Pump;
use crate::{CollectiveError, RawMemory, Result};

/// Bytes on their way between two ranks of a host, as far as the system allows.
const SEND_BUFFER_BYTES: usize = 4 << 20;

/// Called with the rank of the sender, or with the error, on a thread of the mailbox or of the caller.
pub(crate) type OnDelivery = Box<dyn FnOnce(Result<usize>) + Send>;

/// A message to be sent or received.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// The other rank; `None` to receive from any rank.
    pub peer: Option<usize>,
    /// The sender and the receiver name the same tag.
    pub tag: u64,
    /// The type of the elements, the same on both sides.
    pub dtype: DType,
    /// The data, or the memory for the data, of the same length.
    pub memory: RawMemory,
    /// How long the message may take, if not as long as the group's limit.
    pub limit: Option<Duration>,
}

/// The messages of one rank of a group. Dropping it sends what has been submitted and asked for, for at most the group's limit.
#[derive(Debug)]
pub struct Mailbox {
    shared: Arc<Connections>,
    thread: Mutex<Option<JoinHandle<()>>>,
    limit: Duration,
}

/// The part of a mailbox that its thread uses too.
#[derive(Debug)]
struct Connections {
    desk: Mutex<Desk>,
    /// A connection to each other rank.
    sockets: Box<[Option<OwnedFd>]>,
    /// Wakes the thread.
    alarm: OwnedFd,
}

impl Mailbox {
    /// Connects the ranks with these addresses. `members` are their numbers in errors; empty if these are `0..`.
    pub(crate) fn connect(
        listener: &PeerListener,
        network: SocketKind,
        addresses: &[PeerAddress],
        rank: usize,
        members: &[usize],
        limit: Duration,
    ) -> Result<Self> {
        let world_size = addresses.len();
        let peers: Vec<usize> = (0..world_size).filter(|&peer| peer != rank).collect();
        let connected = listener.connect(network, addresses, rank, &peers, limit, |_, _| {})?;
        let sockets: Box<[Option<OwnedFd>]> =
            connected.into_iter().map(|socket| socket.map(|[socket]| socket)).collect();
        for socket in sockets.iter().flatten().filter(|_| network == SocketKind::Local) {
            // The fewer times the two threads take turns, the better. The system may allow less.
            let _ = set_socket_send_buffer_size(socket, SEND_BUFFER_BYTES);
        }
        let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let alarm = alarm.map_err(|error| CollectiveError::Setup {
            rank,
            world_size,
            what: "its mailbox",
            reason: error.to_string(),
        })?;
        let desk = Mutex::new(Desk::new(rank, world_size, members));
        let shared = Arc::new(Connections { desk, sockets, alarm });
        Ok(Self { shared, thread: Mutex::default(), limit })
    }

    /// Sends or receives a message. `on_end` is called with the sender's rank when the data have left this rank's memory, or are
    /// there.
    ///
    /// # Safety
    ///
    /// The memory is valid until `on_end` is called, and nobody else changes it, nor reads what is received.
    pub unsafe fn post(
        &self,
        is_send: bool,
        message: Message,
        on_end: impl FnOnce(Result<usize>) + Send + 'static,
    ) -> Result<()> {
        let (op, on_end) = (if is_send { "send" } else { "recv" }, Box::new(on_end));
        let begun = now();
        let deadline = begun.checked_add(message.limit.unwrap_or(self.limit));
        let ended = {
            let mut desk = lock(&self.shared.desk);
            let rank = desk.rank;
            let world_size = desk.world_size();
            let refuse =
                |reason: &str| Err(CollectiveError::Buffers { rank, op, reason: reason.into() });
            match message.peer {
                Some(rank) if rank >= world_size => {
                    return Err(CollectiveError::NoSuchRank { rank, world_size });
                }
                Some(peer) if peer == rank => return refuse("names this very rank"),
                None if is_send => return refuse("names no rank"),
                _ => {}
            }
            self.ensure_thread(rank)?;
            let (seq, stage) = (desk.number(), Stage::Waiting);
            desk.take_in(Letter { op, message, seq, begun, deadline, on_end, stage })
        };
        ended.into_iter().for_each(Delivered::report);
        self.shared.wake();
        Ok(())
    }

    /// The sockets of the mailbox: see [`Group::descriptors`](crate::Group::descriptors).
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.shared.sockets.iter().flatten().map(AsRawFd::as_raw_fd).collect()
    }

    fn ensure_thread(&self, rank: usize) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let pump = Pump::new(self.shared.clone());
            let started = thread_builder(format!("mail-{rank}")).spawn(move || pump.serve());
            let refused = |error: std::io::Error| CollectiveError::NoThread {
                rank,
                reason: error.to_string(),
            };
            *thread = Some(started.map_err(refused)?);
        }
        Ok(())
    }
}

impl Connections {
    fn wake(&self) {
        ring(&self.alarm);
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        lock(&self.shared.desk).close(self.limit);
        self.shared.wake();
        match lock(&self.thread).take() {
            // The last handle may go in a callback. Then the thread ends on its own.
            Some(thread) if thread.thread().id() != std::thread::current().id() => {
                before_join(thread.thread());
                let _ = thread.join();
            }
            Some(_) => {}
            None => Pump::new(self.shared.clone()).serve(),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc::channel;

    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

    use super::*;

    /// Random numbers, by splitmix64.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            mixed ^ (mixed >> 31)
        }

        fn one_of(&mut self, all: &[u64]) -> u64 {
            all[(self.next() % all.len() as u64) as usize]
        }

        /// A header, or nearly one, and data that may belong to it.
        fn bytes(&mut self) -> Vec<u8> {
            let words = [
                self.one_of(&[0, 0, 1, u64::MAX]),
                self.one_of(&[0, 8, 8, 8, 8, 64, 1 << 20, u64::MAX - 31, u64::MAX]),
                self.one_of(&[DType::U8 as u64, DType::U8 as u64, DType::F32 as u64, 200])
                    | self.one_of(&[0, 1, 2, 2, 2, 3, 4, u64::MAX >> 8]) << 8,
                self.one_of(&[0, 1, 2, 3, 4, 5, u64::MAX]),
            ];
            let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
            let data = self.one_of(&[0, 0, 8, 8, 8, 64, 300]);
            bytes.extend((0..data).map(|_| self.next() as u8));
            bytes.truncate(bytes.len() - self.one_of(&[0, 0, 0, 0, 0, 0, 1, 9]) as usize);
            bytes
        }
    }

    /// A mailbox of rank 0 of three, and the other ends of its connections.
    fn mailbox(limit: Duration) -> (Mailbox, [OwnedFd; 2]) {
        let pair = |()| {
            let (domain, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            socketpair(domain, kind, SocketFlags::CLOEXEC, None).unwrap()
        };
        let [(first, to_first), (second, to_second)] = [(), ()].map(pair);
        let sockets = [None, Some(to_first), Some(to_second)].into();
        let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let shared = Connections { desk: Mutex::new(Desk::new(0, 3, &[])), sockets, alarm };
        let mailbox = Mailbox { shared: Arc::new(shared), thread: Mutex::default(), limit };
        (mailbox, [first, second])
    }

    #[test]
    fn broken_peers_reach_no_memory_but_that_of_receives_and_every_message_ends_once() {
        const MESSAGES: usize = 8;
        let limit = Duration::from_secs(20);
        for seed in 0..3000 {
            let mut random = Random(seed);
            let (mailbox, peers) = mailbox(limit);
            // Eight bytes of data with eight bytes on each side that nobody may write.
            let mut memory = [[0xAA_u8; 24]; MESSAGES];
            let base = memory.as_mut_ptr().cast::<u8>();
            let (sender, ended) = channel();
            for at in 0..MESSAGES {
                let peer = [Some(1), Some(2), Some(1), None][at % 4];
                let (is_send, tag) = (at % 4 == 2, (at / 4) as u64);
                // SAFETY: the bytes lie within `memory`.
                let data = RawMemory { base: unsafe { base.add(24 * at + 8) }, len_bytes: 8 };
                let message = Message { peer, tag, dtype: DType::U8, memory: data, limit: None };
                let sender = sender.clone();
                let on_end = move |_| sender.send(at).unwrap();
                // SAFETY: `memory` is left alone until the mailbox has been dropped.
                unsafe { mailbox.post(is_send, message, on_end) }.unwrap();
            }
            for _ in 0..random.next() % 12 {
                let (peer, flags) = (&peers[(random.next() % 2) as usize], SendFlags::NOSIGNAL);
                // Fails if the mailbox has closed the connection.
                let _ = send(peer, &random.bytes(), flags | SendFlags::DONTWAIT);
            }
            drop(peers);
            let mut all: Vec<usize> =
                (0..MESSAGES).map(|_| ended.recv_timeout(limit).unwrap()).collect();
            drop(mailbox);
            all.sort_unstable();
            assert_eq!(all, (0..MESSAGES).collect::<Vec<_>>(), "seed {seed}");
            assert!(ended.try_recv().is_err(), "seed {seed}");
            for (at, bytes) in memory.iter().enumerate() {
                let own = if at % 4 == 2 { 8..8 } else { 8..16 };
                let is_kept = |place| own.contains(&place) || bytes[place] == 0xAA;
                assert!((0..24).all(is_kept), "seed {seed}, message {at}: {bytes:?}");
            }
        }
    }
}
