//! Reading and writing sockets with a time limit on the whole message.
//!
//! With a limit per call, a peer that sends one byte at a time could keep a rank busy forever. This module
//! knows nothing of what the bytes mean.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt::socket_peercred};

/// The longest time limit: an `Instant` further away may not exist.
pub(crate) const MAX_LIMIT: Duration = Duration::from_secs(366 * 24 * 3600);

/// The moment at which a time limit that begins now ends. Limits longer than [`MAX_LIMIT`] are shortened to
/// it.
pub(crate) fn deadline_after(limit: Duration) -> Instant {
    Instant::now() + limit.min(MAX_LIMIT)
}

/// Fills `bytes` from the socket. Without a deadline, waits as long as necessary.
pub(crate) fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
    deadline: Option<Instant>,
) -> io::Result<()> {
    let socket = socket.as_fd();
    let mut done = 0;
    while done < bytes.len() {
        match recv(socket, &mut bytes[done..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((received, _)) => done += received,
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, deadline)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Writes all of `bytes` to the socket before the deadline.
pub(crate) fn transmit(socket: impl AsFd, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let socket = socket.as_fd();
    let mut done = 0;
    while done < bytes.len() {
        match send(socket, &bytes[done..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => done += sent,
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, Some(deadline))?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn wait(socket: BorrowedFd<'_>, flags: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    // A limit too long for the kernel's type is treated as no limit.
    let limit = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(&mut [PollFd::from_borrowed_fd(socket, flags)], limit.as_ref()) {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether the process at the other end of a Unix socket belongs to the same user as this one.
pub(crate) fn is_same_user(socket: impl AsFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}
