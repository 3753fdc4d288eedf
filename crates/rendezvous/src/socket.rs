//! Reading and writing sockets with a time limit on the whole message.
//!
//! With a limit per call, a peer that sends one byte at a time could keep a rank busy forever. This module
//! knows nothing of what the bytes mean.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use paceline_trace::runtime::poll;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt::socket_peercred};

use crate::deadline::Deadline;

/// The memory that is taken for a message before its first byte has come.
const FIRST_BYTES: usize = 64 << 10;

/// Fills `bytes` from the socket. Without a deadline, waits as long as necessary.
pub(crate) fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
    deadline: Option<&Deadline>,
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

/// Reads `len` bytes. Memory grows with the bytes that come, because `len` is what the other side says.
pub(crate) fn receive_vec(
    socket: impl AsFd,
    len: usize,
    deadline: &Deadline,
) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let done = bytes.len();
        bytes.resize(len.min(done.saturating_mul(2).max(FIRST_BYTES)), 0);
        receive(&socket, &mut bytes[done..], Some(deadline))?;
    }
    Ok(bytes)
}

/// Writes all of `bytes` to the socket before the deadline.
pub(crate) fn transmit(socket: impl AsFd, bytes: &[u8], deadline: &Deadline) -> io::Result<()> {
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

fn wait(socket: BorrowedFd<'_>, flags: PollFlags, deadline: Option<&Deadline>) -> io::Result<()> {
    if deadline.is_some_and(Deadline::has_passed) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    match poll_until(&mut [PollFd::from_borrowed_fd(socket, flags)], deadline) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Polls until something is ready, or for a piece of the time that is left. Returns the number of ready sockets.
pub(crate) fn poll_until(
    fds: &mut [PollFd<'_>],
    deadline: Option<&Deadline>,
) -> rustix::io::Result<usize> {
    let Some(deadline) = deadline else { return poll(fds, None) };
    deadline.sleep(|limit| poll(fds, Some(limit)))
}

/// Whether the other end has closed the connection, and all that it sent has been read.
pub(crate) fn is_closed(socket: impl AsFd) -> bool {
    let next = recv(socket, &mut [0], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    !matches!(next, Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR))
}

/// Whether the process at the other end of a Unix socket belongs to the same user as this one.
pub(crate) fn is_same_user(socket: impl AsFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_length_that_does_not_come_takes_no_memory() {
        let (one, other) = UnixStream::pair().unwrap();
        let deadline = &Deadline::after(std::time::Duration::from_secs(60));
        transmit(&one, &[7; 100], deadline).unwrap();
        assert_eq!(receive_vec(&other, 100, deadline).unwrap(), [7; 100]);
        transmit(&one, &[7; 100], deadline).unwrap();
        drop(one);
        // More than any machine has, so an allocation of it would fail.
        let error = receive_vec(&other, 1 << 60, deadline).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_long_message_comes_whole() {
        let (one, other) = UnixStream::pair().unwrap();
        let deadline = &Deadline::after(std::time::Duration::from_secs(60));
        let message: Vec<u8> = (0..1 << 20).map(|at| (at % 251) as u8).collect();
        std::thread::scope(|scope| {
            let own = deadline.clone();
            let (one, message) = (&one, &message);
            scope.spawn(move || transmit(one, message, &own).unwrap());
            assert!(receive_vec(&other, message.len(), deadline).unwrap() == *message);
        });
    }
}
