//! New connections to the list of members, until they have proven that they know the secret.
//!
//! A stranger who says nothing, or something else, delays nobody.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use paceline_trace::runtime::sleep;

use super::WHO;
use crate::RunKey;
use crate::address::ListenSocket;
use crate::hello::{HELLO_LIMIT, HelloAnswer, Incoming, MAX_STRANGERS, reason};
use crate::warning::Warnings;

#[derive(Debug)]
pub(super) struct Door {
    listener: ListenSocket,
    key: RunKey,
    strangers: Vec<(Incoming, String)>,
    warnings: Warnings,
}

impl Door {
    pub(super) fn new(listener: ListenSocket, key: RunKey) -> io::Result<Self> {
        listener.set_nonblocking()?;
        Ok(Self { listener, key, strangers: Vec::new(), warnings: Warnings::default() })
    }

    /// The sockets on which something may come.
    pub(super) fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        use std::os::fd::AsFd;
        let strangers = self.strangers.iter().map(|(incoming, _)| incoming.socket.as_fd());
        std::iter::once(self.listener.as_fd()).chain(strangers)
    }

    /// Whether somebody must say soon who it is.
    pub(super) fn is_waiting(&self) -> bool {
        !self.strangers.is_empty()
    }

    /// The connections that have proven that they know the secret, and where they come from.
    pub(super) fn admitted(&mut self) -> Vec<(OwnedFd, String)> {
        self.accept();
        let mut admitted = Vec::new();
        for (mut incoming, from) in std::mem::take(&mut self.strangers) {
            match incoming.advance(std::slice::from_ref(&self.key), WHO.world) {
                Ok(None) => self.strangers.push((incoming, from)),
                Ok(Some(hello)) => {
                    let is_welcome = hello.answer == HelloAnswer::Welcome;
                    if incoming.answer(hello.answer).is_ok() && is_welcome {
                        admitted.push((incoming.socket, from));
                    }
                }
                Err(error) => self.refuse(&from, &reason(&error)),
            }
        }
        admitted
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((Some(socket), from)) if self.strangers.len() < MAX_STRANGERS => {
                    match Incoming::new(socket, HELLO_LIMIT) {
                        Ok(incoming) => self.strangers.push((incoming, from)),
                        Err(error) => self.refuse(&from, &error.to_string()),
                    }
                }
                // A member tries again.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Too many files are open, or the connection is gone. Others may come.
                Err(_) => return sleep(Duration::from_millis(10)),
            }
        }
    }

    pub(super) fn refuse(&self, from: &str, why: &str) {
        self.warnings.warn(&format!("refused a connection from {from}: {why}"));
    }
}
