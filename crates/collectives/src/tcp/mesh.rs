//! One connection to every other rank, and the bytes that are on their way through them.
//!
//! Sends and receives are posted with the memory that they use, and move whenever somebody waits for
//! any of them: all connections, in both directions at once, so that two ranks with much to say to
//! each other never block. Each direction of a connection keeps its order. Knows nothing of what the
//! bytes mean.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::time::Duration;

use paceline_trace::now_ns;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::context::WaitPolicy;

/// How long a rank that gives up waits at most for its peers to notice.
const GRACE_NS: u64 = 60_000_000;

/// How long a dead rank's host may take to say so.
const PROBE_NS: u64 = 20_000_000;

/// Pieces that one system call moves at most.
const MAX_VECTOR: usize = 16;

/// Memory that is on its way out or awaited.
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

#[derive(Debug)]
struct Wire {
    stream: TcpStream,
    out: Direction,
    incoming: Direction,
}

/// Connections by rank; there is none to this rank itself, nor to ranks that are reached otherwise.
#[derive(Debug)]
pub(crate) struct Mesh {
    wires: Vec<Option<Wire>>,
    /// An operation has failed half-way, so peers may take what comes now for its data.
    is_over: bool,
}

// SAFETY: the pieces point to memory that the operation under way has claimed or borrowed for as long
// as it runs, and the mesh is used by the thread that executes it, one at a time.
unsafe impl Send for Mesh {}

/// How far a connection must have got for something posted to be done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) peer: usize,
    mark: u64,
    is_send: bool,
}

/// Why waiting ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Interruption {
    /// The connection to this rank is gone, and so is the rank.
    Lost(usize),
    /// Another rank has given up, while these were still awaited.
    GivenUp(Vec<usize>),
    /// The time is over.
    TimedOut,
}

impl Mesh {
    /// Takes over connected streams. Errors when one cannot be set up.
    pub(crate) fn new(streams: Vec<Option<TcpStream>>) -> std::io::Result<Self> {
        let wire = |stream: TcpStream| {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            Ok(Wire { stream, out: Direction::default(), incoming: Direction::default() })
        };
        let wires = streams.into_iter().map(|stream| stream.map(wire).transpose());
        Ok(Self { wires: wires.collect::<std::io::Result<_>>()?, is_over: false })
    }

    /// The ranks that there are connections to.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.wires.iter().enumerate().filter_map(|(peer, wire)| wire.as_ref().map(|_| peer))
    }

    /// Posts bytes to be sent to `peer`.
    ///
    /// # Safety
    ///
    /// They stay valid and unchanged until the ticket is done or the mesh is cleared.
    pub(crate) unsafe fn send(&mut self, peer: usize, base: *const u8, len_bytes: usize) -> Ticket {
        let direction = &mut self.wire(peer).out;
        let mark = direction.post(base.cast_mut(), len_bytes);
        Ticket { peer, mark, is_send: true }
    }

    /// Posts memory for the next bytes from `peer`.
    ///
    /// # Safety
    ///
    /// It stays valid, and belongs to this operation alone, until the ticket is done or the mesh is
    /// cleared.
    pub(crate) unsafe fn recv(&mut self, peer: usize, base: *mut u8, len_bytes: usize) -> Ticket {
        let direction = &mut self.wire(peer).incoming;
        let mark = direction.post(base, len_bytes);
        Ticket { peer, mark, is_send: false }
    }

    fn wire(&mut self, peer: usize) -> &mut Wire {
        self.wires[peer].as_mut().expect("there is a connection to every peer that is asked for")
    }

    /// Whether what the ticket stands for has moved completely.
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

    /// Moves bytes until nothing is posted any more.
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
        let begin = now_ns();
        let mut idle_since = begin;
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
            let left = policy.limit.saturating_sub(Duration::from_nanos(now - begin));
            if left.is_zero() {
                return Err(Interruption::TimedOut);
            }
            if Duration::from_nanos(now - idle_since) >= policy.spin {
                self.sleep(left)?;
            }
        }
    }

    /// Moves what can be moved at once; whether anything was.
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

    /// What to make of the end of the connection to `peer`: it has died, or only given up because of
    /// another one. Who has given up has just stopped sending and still listens, for a moment; a
    /// byte to one that is dead is answered with a reset.
    fn why_gone(&self, peer: usize) -> Interruption {
        let mut ended: Vec<(usize, &Wire)> = Vec::new();
        let deadline = now_ns() + PROBE_NS;
        loop {
            // One that dies closes its connections one after the other, and this one may not be the first.
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

    /// Stops sending, so that all peers notice that this rank gives up, and stays a moment, so that
    /// they see that it is not dead. What is posted is forgotten.
    pub(crate) fn give_up(&mut self) {
        self.clear();
        for wire in self.wires.iter().flatten() {
            // A connection that is gone needs no end.
            let _ = wire.stream.shutdown(std::net::Shutdown::Write);
        }
        let deadline = now_ns() + GRACE_NS;
        while now_ns() < deadline && !self.wires.iter().flatten().all(Wire::has_ended) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Those that noticed last may still be asking who is alive.
        std::thread::sleep(Duration::from_nanos(PROBE_NS));
    }

    /// Sleeps until some connection can go on.
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
        let limit = at_most.min(Duration::from_secs(1));
        let timeout =
            Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos() as _ };
        // Whatever ends the sleep, the caller looks again.
        let _ = poll(&mut fds, Some(&timeout));
        Ok(())
    }

    /// The peers from which something is awaited, those that have been silent longest first.
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

    /// Forgets what is posted: the memory is no longer used. The connections are good for nothing
    /// but a last word afterwards.
    pub(crate) fn clear(&mut self) {
        self.is_over = true;
        for wire in self.wires.iter_mut().flatten() {
            wire.out.pieces.clear();
            wire.incoming.pieces.clear();
        }
    }

    /// Says goodbye to every peer, unless an operation has failed.
    pub(crate) fn say_goodbye(&mut self, word: &[u8]) {
        if !self.is_over {
            self.say_to_all(word);
        }
    }

    /// Says a last word to every peer, as far as it can be said at once.
    pub(crate) fn say_to_all(&mut self, word: &[u8]) {
        for wire in self.wires.iter_mut().flatten() {
            use std::io::Write;
            // Half of something else is on its way there, which nothing sensible can follow.
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
                // SAFETY: the rest of the piece lies behind the part that has moved.
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
        // An error means that nothing is known.
        poll(&mut fds, Some(&at_once)).is_ok_and(|num_ready| num_ready > 0)
    }

    /// Whether nothing more will be sent from the other end.
    fn has_ended(&self) -> bool {
        self.has(PollFlags::RDHUP)
    }

    /// Whether the other end no longer exists: asked about nothing, the system still reports that.
    fn is_reset(&self) -> bool {
        self.has(PollFlags::empty())
    }

    /// Whether bytes lie there to be read: the goodbye of a rank that has left in order.
    fn is_unread(&self) -> bool {
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        let received = rustix::net::recv(&self.stream, &mut [0u8], flags);
        self.incoming.pieces.is_empty() && received.is_ok_and(|(received, _)| received > 0)
    }

    /// One system call in one direction, if anything is posted there; whether bytes moved.
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
                // SAFETY: posted memory is valid and this operation's alone until it has moved.
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
