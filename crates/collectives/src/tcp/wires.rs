//! The *wires* of a rank: one connection to every other rank, and the bytes in transit on these connections.
//!
//! Sends and receives are posted with their memory. Whenever this rank waits for any of them,
//! bytes move on all connections, in both directions at once, so two ranks that send each other much data
//! never block each other. Each direction of a connection keeps its order. This module knows nothing of the bytes'
//! meaning.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use paceline_rendezvous::LONGEST_SLEEP;
use paceline_trace::now_ns;
use paceline_trace::runtime::{poll, sleep};
use rustix::event::{PollFd, PollFlags};

use super::last_words::{Heard, LastWords};
use crate::context::{WaitPolicy, Waited};

/// How long the last words of a rank may take after its connection for data has ended. Both connections end together
/// unless the network holds one of them back.
const WORDS_LIMIT: Duration = Duration::from_millis(500);

/// How much later than this rank its peers may report that an operation takes too long.
const REPORT_LIMIT: Duration = Duration::from_millis(500);

/// The most pieces per system call.
const MAX_VECTOR: usize = 16;

/// Posted memory: bytes to send, or room for bytes to receive.
#[derive(Debug)]
struct PostedPiece {
    base: *mut u8,
    len_bytes: usize,
}

#[derive(Debug, Default)]
struct WireDirection {
    pieces: VecDeque<PostedPiece>,
    posted_bytes: u64,
    moved_bytes: u64,
    /// When bytes last moved.
    moved_ns: u64,
}

#[derive(Debug)]
struct Wire {
    stream: TcpStream,
    /// A second connection, for last words.
    words: TcpStream,
    out: WireDirection,
    incoming: WireDirection,
}

#[derive(Debug)]
pub(crate) struct Wires {
    /// By rank; `None` for this rank itself, and for ranks that are reached in another way.
    wires: Vec<Option<Wire>>,
    /// Whether an operation has failed half-way. Peers may then take any further bytes for its data.
    is_over: bool,
}

// SAFETY: the pieces point to regions of the running operation, which stay valid for as long as it runs. Only the thread that
// executes the operation uses the wires, one thread at a time.
unsafe impl Send for Wires {}

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
    /// The connection to this peer has ended, for this reason.
    Gone(usize, LastWords),
    /// The time limit has passed.
    TimedOut,
}

impl Wires {
    /// Takes over two connected streams for each peer: one for data, one for last words. Errors if one of them cannot
    /// be configured.
    pub(crate) fn new(streams: Vec<Option<[TcpStream; 2]>>) -> std::io::Result<Self> {
        let wire = |[stream, words]: [TcpStream; 2]| {
            for stream in [&stream, &words] {
                stream.set_nonblocking(true)?;
            }
            let (out, incoming) = Default::default();
            Ok(Wire { stream, words, out, incoming })
        };
        let wires = streams.into_iter().map(|streams| streams.map(wire).transpose());
        Ok(Self { wires: wires.collect::<std::io::Result<_>>()?, is_over: false })
    }

    /// The ranks to which this rank has connections.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.wires.iter().enumerate().filter_map(|(peer, wire)| wire.as_ref().map(|_| peer))
    }

    /// The sockets of the connections.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        let wires = self.wires.iter().flatten();
        wires.flat_map(|wire| [wire.stream.as_raw_fd(), wire.words.as_raw_fd()])
    }

    /// Posts bytes to be sent to `peer`.
    ///
    /// # Safety
    ///
    /// The bytes stay valid and unchanged until the ticket is done or the wires are cleared.
    pub(crate) unsafe fn send(&mut self, peer: usize, base: *const u8, len_bytes: usize) -> Ticket {
        let direction = &mut self.wire(peer).out;
        let mark = direction.post(base.cast_mut(), len_bytes);
        Ticket { peer, mark, is_send: true }
    }

    /// Posts memory for the next bytes from `peer`.
    ///
    /// # Safety
    ///
    /// The memory stays valid, and only this operation uses it, until the ticket is done or the wires are
    /// cleared.
    pub(crate) unsafe fn recv(&mut self, peer: usize, base: *mut u8, len_bytes: usize) -> Ticket {
        let direction = &mut self.wire(peer).incoming;
        let mark = direction.post(base, len_bytes);
        Ticket { peer, mark, is_send: false }
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn posted_bytes(&self) -> [u64; 2] {
        let wires = self.wires.iter().flatten();
        wires.fold([0; 2], |[out, incoming], wire| {
            [out + wire.out.posted_bytes, incoming + wire.incoming.posted_bytes]
        })
    }

    fn wire(&mut self, peer: usize) -> &mut Wire {
        self.wires[peer].as_mut().expect("there is a connection to every peer that is asked for")
    }

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
        self.wait_until(policy, |of| tickets.iter().all(|&ticket| of.is_done(ticket)))
    }

    /// Moves bytes until all posted transfers are complete.
    pub(crate) fn wait_all(&mut self, policy: WaitPolicy) -> Result<(), Interruption> {
        self.wait_until(policy, |of| {
            let mut wires = of.wires.iter().flatten();
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
    pub(crate) fn progress(&mut self) -> Result<bool, Interruption> {
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

    /// Why the connection to `peer` has ended, by its last words. A rank without last words has died.
    fn why_gone(&self, peer: usize) -> Interruption {
        let wire = self.wires[peer].as_ref().expect("only connected peers can be gone");
        let mut waited = Waited::begin(now_ns());
        loop {
            let words = match LastWords::of(&wire.words) {
                Heard::Words(words) => words,
                Heard::Nothing if waited.until(now_ns()) < WORDS_LIMIT => {
                    sleep(Duration::from_millis(1));
                    continue;
                }
                Heard::Nothing | Heard::End => LastWords::Lost(peer),
            };
            return Interruption::Gone(peer, words);
        }
    }

    /// Sends all peers the reason why this rank gives up, and stops sending. Posted transfers are forgotten.
    pub(crate) fn give_up(&mut self, words: &LastWords) {
        self.clear();
        for wire in self.wires.iter().flatten() {
            words.say_to(&wire.words);
            // An error is ignored: the connection has already ended.
            let _ = wire.stream.shutdown(std::net::Shutdown::Write);
        }
    }

    /// The last words of these peers, as far as they have come. Peers may notice a failure a moment later than this rank.
    pub(crate) fn hear(&self, peers: &[usize]) -> Vec<(usize, LastWords)> {
        let mut waited = Waited::begin(now_ns());
        loop {
            // A rank of this host has no wire, and its report comes as late as others'.
            let of = |peer: usize| match self.wires.get(peer) {
                Some(Some(wire)) => LastWords::of(&wire.words),
                _ => Heard::Nothing,
            };
            let heard: Vec<_> = peers.iter().map(|&peer| (peer, of(peer))).collect();
            let is_quiet = heard.iter().any(|(_, of)| *of == Heard::Nothing);
            if !is_quiet || waited.until(now_ns()) > REPORT_LIMIT {
                let words = |(peer, heard)| match heard {
                    Heard::Words(words) => Some((peer, words)),
                    Heard::Nothing | Heard::End => None,
                };
                return heard.into_iter().filter_map(words).collect();
            }
            sleep(Duration::from_millis(1));
        }
    }

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
        // The result does not matter: the caller checks again in any case.
        let _ = poll(&mut fds, Some(at_most.min(LONGEST_SLEEP)));
        Ok(())
    }

    /// The peers whose bytes are awaited, or which do not take the bytes that they are sent; the longest idle connection comes
    /// first.
    pub(crate) fn awaited(&self) -> Vec<usize> {
        let mut awaited: Vec<(u64, usize)> = self
            .peers()
            .filter_map(|peer| {
                let wire = self.wires[peer].as_ref()?;
                let directions = [&wire.incoming, &wire.out].into_iter();
                let waiting = directions.filter(|direction| !direction.pieces.is_empty());
                waiting.map(|direction| (direction.moved_ns, peer)).min()
            })
            .collect();
        awaited.sort_unstable();
        awaited.into_iter().map(|(_, peer)| peer).collect()
    }

    /// Forgets all posted transfers, so that their memory is no longer used. Afterwards this rank can only give up.
    pub(crate) fn clear(&mut self) {
        self.is_over = true;
        for wire in self.wires.iter_mut().flatten() {
            wire.out.pieces.clear();
            wire.incoming.pieces.clear();
        }
    }

    /// Lets every peer know that this rank leaves, unless an operation has failed. `header` is for peers that wait for one.
    pub(crate) fn send_leave(&mut self, header: &[u8]) {
        if self.is_over {
            return;
        }
        for wire in self.wires.iter_mut().flatten() {
            LastWords::Leaves.say_to(&wire.words);
            // A peer could not tell the header from the rest of a message that has been sent only in part.
            if wire.out.moved_bytes == wire.out.posted_bytes {
                use std::io::Write;
                let _ = wire.stream.write(header);
            }
        }
    }
}

impl WireDirection {
    fn post(&mut self, base: *mut u8, len_bytes: usize) -> u64 {
        if len_bytes > 0 {
            self.pieces.push_back(PostedPiece { base, len_bytes });
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
