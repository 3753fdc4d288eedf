//! Moves the bytes of messages over the connections of a mailbox.
//!
//! Input: the desk of messages, and sockets. Output: calls of what has ended. Partial headers and data are counted here, by sender.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use paceline_rendezvous::LONGEST_SLEEP;
use paceline_trace::awake;
use paceline_trace::lock;
use paceline_trace::runtime::{now, poll};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::Connections;
use super::desk::{Delivered, Desk, HEADER_BYTES, Header};
use crate::RawMemory;

/// The most bytes that move at a time while others wait for the lock of the desk.
const STRIDE_BYTES: usize = 1 << 20;

/// The thread of a mailbox.
pub(super) struct Pump {
    shared: Arc<Connections>,
    incoming: Vec<Inflow>,
}

/// The state of a connection's incoming direction.
#[derive(Clone)]
struct Inflow {
    header: [u8; HEADER_BYTES],
    /// Bytes of the header and the data that have come.
    done: usize,
    /// Bytes that follow the header.
    body_bytes: usize,
    is_open: bool,
}

impl Pump {
    pub(super) fn new(shared: Arc<Connections>) -> Self {
        let incoming = Inflow { header: [0; HEADER_BYTES], done: 0, body_bytes: 0, is_open: true };
        Self { incoming: vec![incoming; shared.sockets.len()], shared }
    }

    /// Moves bytes until the rank has left.
    pub(super) fn serve(mut self) {
        while self.turn() {}
        let ended = lock(&self.shared.desk).give_up();
        ended.into_iter().for_each(Delivered::report);
    }

    /// Waits for the next event and does what it allows. Returns false if the rank leaves and all is sent.
    fn turn(&mut self) -> bool {
        let (shared, begin) = (self.shared.clone(), now());
        let mut watched: Vec<(usize, &OwnedFd, PollFlags)> = Vec::new();
        let until = {
            let desk = lock(&shared.desk);
            let is_sending =
                |peer: usize| self.incoming[peer].is_open && !desk.outgoing[peer].is_empty();
            if let Some(by) = desk.closes_by
                && (now() >= by || !(0..desk.world_size()).any(is_sending))
            {
                return false;
            }
            for peer in (0..desk.world_size()).filter(|peer| self.incoming[*peer].is_open) {
                let out = if is_sending(peer) { PollFlags::OUT } else { PollFlags::empty() };
                watched.extend(
                    shared.sockets[peer].as_ref().map(|on| (peer, on, PollFlags::IN | out)),
                );
            }
            desk.next_deadline()
        };
        let mut fds: Vec<PollFd> = watched.iter().map(|of| PollFd::new(of.1, of.2)).collect();
        fds.push(PollFd::new(&shared.alarm, PollFlags::IN));
        let left = |until: Instant| until.saturating_duration_since(now()).min(LONGEST_SLEEP);
        if poll(&mut fds, until.map(left)).is_err_and(|error| error != Errno::INTR) {
            return false;
        }
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        let _ = rustix::io::read(&shared.alarm, &mut [0u8; 8]);
        let mut desk = lock(&shared.desk);
        let mut ended = Vec::new();
        for (&(peer, socket, _), flags) in watched.iter().zip(ready) {
            let mut is_open = true;
            if flags.contains(PollFlags::OUT) && !flush(&mut desk, peer, socket, &mut ended) {
                // The peer is gone, but perhaps its goodbye has come.
                let _ = shutdown(socket, Shutdown::Both);
                while self.receive(&mut desk, peer, socket, &mut ended) {}
                is_open = false;
            } else if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                is_open = self.receive(&mut desk, peer, socket, &mut ended);
            }
            if !is_open {
                self.incoming[peer].is_open = false;
                ended.extend(desk.lose(peer));
            }
        }
        let passed = now() - begin;
        if until.is_some() {
            desk.postpone(passed - awake(passed, LONGEST_SLEEP));
        }
        let (late, broken) = desk.expire(now());
        ended.extend(late);
        for peer in broken {
            self.incoming[peer].is_open = false;
            let _ = shared.sockets[peer].as_ref().map(|on| shutdown(on, Shutdown::Both));
            ended.extend(desk.lose(peer));
        }
        drop(desk);
        ended.into_iter().for_each(Delivered::report);
        true
    }

    /// Reads a piece of what has come. Returns false if the connection has ended.
    fn receive(
        &mut self,
        desk: &mut Desk,
        from: usize,
        socket: &OwnedFd,
        ended: &mut Vec<Delivered>,
    ) -> bool {
        let of = &mut self.incoming[from];
        if of.done < HEADER_BYTES {
            let Some(got) = read(socket, &mut of.header[of.done..]) else { return false };
            of.done += got;
            if of.done < HEADER_BYTES {
                return true;
            }
            let Some(header) = Header::decode(&of.header) else { return false };
            of.body_bytes = header.body_bytes();
            ended.extend(desk.open(from, header));
        }
        let start = of.done - HEADER_BYTES;
        let left = (of.body_bytes - start).min(STRIDE_BYTES);
        if left > 0 {
            let got = match desk.arriving(from) {
                Some(RawMemory { base, .. }) => {
                    // SAFETY: the caller of the receive vouches for its memory until the desk ends it, and the desk is locked. The
                    // memory is as long as the data, which the desk has compared.
                    let to = unsafe { std::slice::from_raw_parts_mut(base.add(start), left) };
                    read(socket, to)
                }
                None => read(socket, &mut vec![0; left]),
            };
            let Some(got) = got else { return false };
            of.done += got;
        }
        if of.done - HEADER_BYTES == of.body_bytes {
            of.done = 0;
            ended.extend(desk.arrived(from));
        }
        true
    }
}

/// Sends as much as the connection takes. Returns false if it has ended.
fn flush(desk: &mut Desk, to: usize, socket: &OwnedFd, ended: &mut Vec<Delivered>) -> bool {
    let mut moved = 0;
    while let Some(of) = desk.outgoing[to].first_mut() {
        let piece = match of.done.checked_sub(HEADER_BYTES) {
            None => &of.header[of.done..],
            Some(start) if start < of.memory.len_bytes => {
                let len_bytes = (of.memory.len_bytes - start).min(STRIDE_BYTES);
                // SAFETY: the sender vouches for its memory until the desk ends the message, and the desk is locked. The piece lies
                // within the memory.
                unsafe { std::slice::from_raw_parts(of.memory.base.add(start), len_bytes) }
            }
            Some(_) => {
                ended.extend(desk.sent(to));
                continue;
            }
        };
        if moved >= STRIDE_BYTES {
            return true;
        }
        match send(socket, piece, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => (of.done, moved) = (of.done + sent, moved + sent),
            Err(error) => return matches!(error, Errno::AGAIN | Errno::INTR),
        }
    }
    true
}

/// Reads what is there. `None` if the connection has ended.
fn read(socket: &OwnedFd, to: &mut [u8]) -> Option<usize> {
    match recv(socket, to, RecvFlags::DONTWAIT) {
        Ok((0, _)) => None,
        Ok((got, _)) => Some(got),
        Err(Errno::AGAIN | Errno::INTR) => Some(0),
        Err(_) => None,
    }
}
