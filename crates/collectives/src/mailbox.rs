//! Messages between any two ranks of a group, with tags, independent of the group's operations and of each other.
//!
//! Input: memory for which the caller vouches, a peer and a tag. Output: the sender's rank or an error, passed to a callback. A
//! message is matched with the earliest receive of its sender and tag. A message stays at its
//! sender until its receiver asks for it. One thread moves the bytes of all messages; the first message starts it. This module knows no operation of a group.

mod desk;
mod pump;

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_memory::DType;
use paceline_rendezvous::{PeerAddress, PeerListener, SocketKind};
use paceline_trace::{lock, thread_builder};
use rustix::event::{EventfdFlags, eventfd};

use self::desk::{Delivered, Desk, Letter, Stage};
use self::pump::Pump;
use crate::{CollectiveError, RawMemory, Result};

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
        let sockets = connected.into_iter().map(|socket| socket.map(|[socket]| socket)).collect();
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
        let now = Instant::now();
        let deadline = now.checked_add(message.limit.unwrap_or(self.limit));
        let ended = {
            let mut desk = lock(&self.shared.desk);
            let rank = desk.rank;
            let refuse =
                |reason: &str| Err(CollectiveError::Buffers { rank, op, reason: reason.into() });
            match message.peer {
                Some(peer) if peer >= desk.world_size() => {
                    let world_size = desk.world_size();
                    return Err(CollectiveError::NoSuchRank { rank: peer, world_size });
                }
                Some(peer) if peer == rank => return refuse("names this very rank"),
                None if is_send => return refuse("names no rank"),
                _ => {}
            }
            self.ensure_thread(rank)?;
            let letter = Letter {
                op,
                message,
                seq: desk.number(),
                begun: now,
                deadline,
                on_end,
                stage: Stage::Waiting,
            };
            desk.take_in(letter)
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
            let reason = |error: std::io::Error| error.to_string();
            *thread = Some(
                started
                    .map_err(|error| CollectiveError::NoThread { rank, reason: reason(error) })?,
            );
        }
        Ok(())
    }
}

impl Connections {
    fn wake(&self) {
        // Fails only if the counter is full, and then the thread wakes in any case.
        let _ = rustix::io::write(&self.alarm, &1u64.to_ne_bytes());
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        lock(&self.shared.desk).close(self.limit);
        self.shared.wake();
        let thread = lock(&self.thread).take();
        match thread {
            // The last handle may go in a callback. Then the thread ends on its own.
            Some(thread) if thread.thread().id() != std::thread::current().id() => {
                let _ = thread.join();
            }
            Some(_) => {}
            None => Pump::new(self.shared.clone()).say_goodbye(),
        }
    }
}
