//! The *mesh*: one connection to every other rank, and the bytes in transit on these connections.
//!
//! Sends and receives are posted with the memory that they use. Whenever this rank waits for any of them,
//! bytes move on all connections, in both directions at once, so two ranks that send each other much data
//! never block each other. Each direction of a connection keeps its order. This module knows nothing of what
//! the bytes mean.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::time::Duration;

use paceline_trace::now_ns;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::context::{LONGEST_SLEEP, WaitPolicy, Waited};

/// The longest time that a rank that gives up waits for its peers to notice.
const GRACE_NS: u64 = 60_000_000;

/// How long the host of a dead rank may take to answer a byte with a reset.
const PROBE_NS: u64 = 20_000_000;

/// The most pieces that one system call moves.
const MAX_VECTOR: usize = 16;

/// Posted memory: bytes to send, or room for bytes to receive.
#[derive(Debug)]
struct Piece {
    base: *mut u8,
    len_bytes: usize,
}

/// One direction of a connection.
#[derive(Debug, Default)]
struct Direction {
    pieces: VecDeque<Piece>,
    posted_bytes: u64,
    moved_bytes: u64,
    /// When bytes last moved.
    moved_ns: u64,
}

/// A connection to one peer.
#[derive(Debug)]
struct Wire {
    stream: TcpStream,
    out: Direction,
    incoming: Direction,
}

/// The connections of a rank.
#[derive(Debug)]
pub(crate) struct Mesh {
    /// By rank; `None` for this rank itself, and for ranks that are reached in another way.
    wires: Vec<Option<Wire>>,
    /// Whether an operation has failed half-way. Peers may then take any further bytes for its data.
    is_over: bool,
}

// SAFETY: the pieces point to memory that the running operation has claimed or borrowed for as long as it
// runs. Only the thread that executes the operation uses the mesh, one thread at a time.
unsafe impl Send for Mesh {}

/// Identifies a posted transfer: it is done when its direction of the connection has moved `mark` bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) peer: usize,
    mark: u64,
    is_send: bool,
}

/// Why waiting ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Interruption {
    /// This rank has died.
    Lost(usize),
    /// Another rank has given up while these ranks were still awaited.
    GivenUp(Vec<usize>),
    /// The time limit has passed.
    TimedOut,
}

impl Mesh {
    /// Takes over connected streams. Errors if one of them cannot be configured.
    pub(crate) fn new(streams: Vec<Option<TcpStream>>) -> std::io::Result<Self> {
        let wire = |stream: TcpStream| {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            Ok(Wire { stream, out: Direction::default(), incoming: Direction::default() })
        };
        let wires = streams.into_iter().map(|stream| stream.map(wire).transpose());
        Ok(Self { wires: wires.collect::<std::io::Result<_>>()?, is_over: false })
    }

    /// The ranks to which this rank has connections.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.wires.iter().enumerate().filter_map(|(peer, wire)| wire.as_ref().map(|_| peer))
    }

    /// Posts bytes to be sent to `peer`.
    ///
    /// # Safety
    ///
    /// The bytes stay valid and unchanged until the ticket is done or the mesh is cleared.
    pub(crate) unsafe fn send(&mut self, peer: usize, base: *const u8, len_bytes: usize) -> Ticket {
        let direction = &mut self.wire(peer).out;
        let mark = direction.post(base.cast_mut(), len_bytes);
        Ticket { peer, mark, is_send: true }
    }

    /// Posts memory for the next bytes from `peer`.
    ///
    /// # Safety
    ///
    /// The memory stays valid, and only this operation uses it, until the ticket is done or the mesh is
    /// cleared.
    pub(crate) unsafe fn recv(&mut self, peer: usize, base: *mut u8, len_bytes: usize) -> Ticket {
        let direction = &mut self.wire(peer).incoming;
        let mark = direction.post(base, len_bytes);
        Ticket { peer, mark, is_send: false }
    }

    fn wire(&mut self, peer: usize) -> &mut Wire {
        self.wires[peer].as_mut().expect("there is a connection to every peer that is asked for")
    }

    /// Whether the posted transfer of this ticket is complete.
    pub(crate) fn is_done(&self, ticket: Ticket) -> bool {
        let wire = self.wires[ticket.peer].as_ref().expect("tickets are of connected peers");
        let direction = if ticket.is_send { &wire.out } else { &wire.incoming };
        direction.moved_bytes >= ticket.mark
    }

    /// Moves bytes until all tickets are done.
    pub(crate) fn wait(
        &mut self,
        tickets: &[Ticket],
        policy: WaitPolicy,
    ) -> Result<(), Interruption> {
        self.wait_until(policy, |mesh| tickets.iter().all(|&ticket| mesh.is_done(ticket)))
    }

    /// Moves bytes until all posted transfers are complete.
    pub(crate) fn wait_all(&mut self, policy: WaitPolicy) -> Result<(), Interruption> {
        self.wait_until(policy, |mesh| {
            let mut wires = mesh.wires.iter().flatten();
            wires.all(|wire| wire.out.pieces.is_empty() && wire.incoming.pieces.is_empty())
        })
    }

    fn wait_until(
        &mut self,
        policy: WaitPolicy,
        is_done: impl Fn(&Self) -> bool,
    ) -> Result<(), Interruption> {
        let mut idle_since = now_ns();
        let mut waited = Waited::begin(idle_since);
        loop {
            if is_done(self) {
                return Ok(());
            }
            if self.progress()? {
                idle_since = 0;
                continue;
            }
            let now = now_ns();
            if idle_since == 0 {
                idle_since = now;
            }
            let left = policy.limit.saturating_sub(waited.until(now));
            if left.is_zero() {
                return Err(Interruption::TimedOut);
            }
            if Duration::from_nanos(now - idle_since) >= policy.spin {
                self.sleep(left)?;
            }
        }
    }

    /// Moves the bytes that can move without waiting. Returns whether any moved.
    fn progress(&mut self) -> Result<bool, Interruption> {
        let mut has_moved = false;
        for peer in 0..self.wires.len() {
            for is_send in [true, false] {
                let Some(wire) = &mut self.wires[peer] else { continue };
                match wire.step(is_send) {
                    Ok(moved) => has_moved |= moved,
                    Err(_) => return Err(self.why_gone(peer)),
                }
            }
        }
        Ok(has_moved)
    }

    /// Why the connection to `peer` has ended: some rank has died, or a rank has only given up because of
    /// another one. A rank that has given up has stopped sending but still listens for a moment. A byte sent
    /// to a dead rank is answered with a reset.
    fn why_gone(&self, peer: usize) -> Interruption {
        let mut ended: Vec<(usize, &Wire)> = Vec::new();
        let deadline = now_ns() + PROBE_NS;
        loop {
            // A dying rank closes its connections one after the other, so other connections of this rank may
            // end only after this check has begun.
            for other in self.peers() {
                let Some(wire) = self.wires[other].as_ref() else { continue };
                if ended.iter().any(|(known, _)| *known == other) {
                    continue;
                }
                if other == peer || (wire.has_ended() && !wire.is_unread()) {
                    // The operation is over, so one byte more or less does not matter.
                    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
                    let _ = rustix::net::send(&wire.stream, &[0], flags);
                    ended.push((other, wire));
                }
            }
            let is_dead = |(_, wire): &&(usize, &Wire)| wire.is_reset();
            if let Some((dead, _)) = ended.iter().find(is_dead) {
                return Interruption::Lost(*dead);
            }
            if now_ns() >= deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut missing = self.awaited();
        missing.retain(|rank| !ended.iter().any(|(other, _)| other == rank));
        Interruption::GivenUp(missing)
    }

    /// Stops sending, so that all peers notice that this rank gives up. Then waits a moment, so that the
    /// peers see that this rank is not dead. Posted transfers are forgotten.
    pub(crate) fn give_up(&mut self) {
        self.clear();
        for wire in self.wires.iter().flatten() {
            // An error is ignored: the connection has already ended.
            let _ = wire.stream.shutdown(std::net::Shutdown::Write);
        }
        let deadline = now_ns() + GRACE_NS;
        while now_ns() < deadline && !self.wires.iter().flatten().all(Wire::has_ended) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The peers that noticed last may still be probing who is alive.
        std::thread::sleep(Duration::from_nanos(PROBE_NS));
    }

    /// Sleeps until a connection can move posted bytes.
    fn sleep(&self, at_most: Duration) -> Result<(), Interruption> {
        let interest = |wire: &Wire| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, !wire.incoming.pieces.is_empty());
            flags.set(PollFlags::OUT, !wire.out.pieces.is_empty());
            flags
        };
        let busy = self.wires.iter().flatten().map(|wire| (wire, interest(wire)));
        let mut fds: Vec<PollFd> = busy
            .filter(|(_, flags)| !flags.is_empty())
            .map(|(wire, flags)| PollFd::new(&wire.stream, flags))
            .collect();
        let limit = at_most.min(LONGEST_SLEEP);
        let timeout =
            Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos() as _ };
        // The result does not matter: the caller checks again in any case.
        let _ = poll(&mut fds, Some(&timeout));
        Ok(())
    }

    /// The peers from which bytes are awaited. Those that have been silent longest come first.
    pub(crate) fn awaited(&self) -> Vec<usize> {
        let mut awaited: Vec<(u64, usize)> = self
            .peers()
            .filter_map(|peer| {
                let wire = self.wires[peer].as_ref()?;
                (!wire.incoming.pieces.is_empty()).then_some((wire.incoming.moved_ns, peer))
            })
            .collect();
        awaited.sort_unstable();
        awaited.into_iter().map(|(_, peer)| peer).collect()
    }

    /// Forgets all posted transfers, so that their memory is no longer used. Afterward the connections can
    /// only carry a last message.
    pub(crate) fn clear(&mut self) {
        self.is_over = true;
        for wire in self.wires.iter_mut().flatten() {
            wire.out.pieces.clear();
            wire.incoming.pieces.clear();
        }
    }

    /// Sends every peer the message that this rank leaves, unless an operation has failed.
    pub(crate) fn say_goodbye(&mut self, word: &[u8]) {
        if !self.is_over {
            self.say_to_all(word);
        }
    }

    /// Sends a last message to every peer to which it can be sent without waiting.
    pub(crate) fn say_to_all(&mut self, word: &[u8]) {
        for wire in self.wires.iter_mut().flatten() {
            use std::io::Write;
            // If another message has been sent only in part, the peer could not tell the two apart.
            if wire.out.moved_bytes == wire.out.posted_bytes {
                let _ = wire.stream.write(word);
            }
        }
    }
}

impl Direction {
    fn post(&mut self, base: *mut u8, len_bytes: usize) -> u64 {
        if len_bytes > 0 {
            self.pieces.push_back(Piece { base, len_bytes });
            self.posted_bytes += len_bytes as u64;
        }
        self.posted_bytes
    }

    fn advance(&mut self, mut bytes: usize) {
        self.moved_bytes += bytes as u64;
        self.moved_ns = now_ns();
        while let Some(piece) = self.pieces.front_mut() {
            if bytes < piece.len_bytes {
                // SAFETY: the rest of the piece begins after the bytes that have moved.
                piece.base = unsafe { piece.base.add(bytes) };
                piece.len_bytes -= bytes;
                return;
            }
            bytes -= piece.len_bytes;
            self.pieces.pop_front();
        }
    }
}

impl Wire {
    fn has(&self, flags: PollFlags) -> bool {
        let mut fds = [PollFd::new(&self.stream, flags)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // An error counts as "not ready".
        poll(&mut fds, Some(&at_once)).is_ok_and(|num_ready| num_ready > 0)
    }

    /// Whether the other end has stopped sending.
    fn has_ended(&self) -> bool {
        self.has(PollFlags::RDHUP)
    }

    /// Whether the other end no longer exists: a poll for no events still reports errors and hang-ups.
    fn is_reset(&self) -> bool {
        self.has(PollFlags::empty())
    }

    /// Whether unread bytes have arrived while none are awaited: the last message of a rank that has left in
    /// order.
    fn is_unread(&self) -> bool {
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        let received = rustix::net::recv(&self.stream, &mut [0u8], flags);
        self.incoming.pieces.is_empty() && received.is_ok_and(|(received, _)| received > 0)
    }

    /// Makes one system call in one direction, if anything is posted there. Returns whether bytes moved.
    fn step(&mut self, is_send: bool) -> std::io::Result<bool> {
        let direction = if is_send { &mut self.out } else { &mut self.incoming };
        if direction.pieces.is_empty() {
            return Ok(false);
        }
        let pieces = direction.pieces.iter().take(MAX_VECTOR);
        let outcome = if is_send {
            let mut vector: [IoSlice; MAX_VECTOR] = std::array::from_fn(|_| IoSlice::new(&[]));
            let mut count = 0;
            for (slot, piece) in vector.iter_mut().zip(pieces) {
                // SAFETY: posted memory is valid and unchanged until it has moved.
                let bytes = unsafe { std::slice::from_raw_parts(piece.base, piece.len_bytes) };
                *slot = IoSlice::new(bytes);
                count += 1;
            }
            rustix::net::sendmsg(
                &self.stream,
                &vector[..count],
                &mut rustix::net::SendAncillaryBuffer::default(),
                rustix::net::SendFlags::NOSIGNAL,
            )
        } else {
            let mut vector: [IoSliceMut; MAX_VECTOR] =
                std::array::from_fn(|_| IoSliceMut::new(&mut []));
            let mut count = 0;
            for (slot, piece) in vector.iter_mut().zip(pieces) {
                // SAFETY: posted memory is valid, and only this operation uses it, until its bytes have
                // arrived.
                let bytes = unsafe { std::slice::from_raw_parts_mut(piece.base, piece.len_bytes) };
                *slot = IoSliceMut::new(bytes);
                count += 1;
            }
            let flags = rustix::net::RecvFlags::empty();
            let mut ancillary = rustix::net::RecvAncillaryBuffer::default();
            let vector = &mut vector[..count];
            rustix::net::recvmsg(&self.stream, vector, &mut ancillary, flags).map(|got| got.bytes)
        };
        match outcome.map_err(std::io::Error::from) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => {
                direction.advance(bytes);
                Ok(true)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }
}
