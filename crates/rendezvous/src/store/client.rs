//! A rank's connection to our own store's server.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::wire::{Answer, Request, read_answer, send_request};
use crate::address::SocketAddress;
use crate::deadline::{Deadline, MAX_LIMIT};
use crate::hello::{CHALLENGE_LIMIT, HelloAnswer, Refusal, Who, say_hello};
use crate::key::RunKey;

/// How long one of several candidates, which may be a stranger, may take to answer a hello.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// How much longer than the server's own limit this side waits for an answer.
const GRACE: Duration = Duration::from_secs(5);

/// Addresses to try, the key that the server must have too, and whether a server there may belong to an earlier run.
#[derive(Debug)]
pub(crate) struct Candidates {
    pub(crate) addresses: Vec<SocketAddress>,
    pub(crate) key: RunKey,
    pub(crate) may_be_stale: bool,
}

/// Why a request to the store failed.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The time limit has passed. Holds the missing ranks if the request waited for ranks.
    TimedOut(Vec<usize>),
    /// Rank 0, which hosts the store, has ended, cannot be reached, or did not come in time. Holds the reason.
    NoHost(String),
    /// This rank has come for a later attempt of the run.
    Overtaken(usize),
    Other(String),
}

/// A connection that the server has accepted.
#[derive(Debug)]
pub(crate) struct Connection {
    /// `None` after an error, because later answers could belong to earlier questions.
    socket: Option<OwnedFd>,
}

impl Connection {
    /// Tries the candidates that `find` returns until rank 0 is there. Also returns the key that both
    /// sides have.
    pub(crate) fn join(
        find: impl Fn() -> Result<Candidates, String>,
        who: Who,
        deadline: &Deadline,
    ) -> Result<(Self, RunKey), Failed> {
        let mut pause = Duration::from_millis(1);
        loop {
            let reason = match find() {
                Ok(candidates) => match candidates.try_all(who, deadline) {
                    Ok(socket) => return Ok((Self::over(socket), candidates.key)),
                    Err(Refusal::Unproven | Refusal::Final(HelloAnswer::WrongWorld))
                        if candidates.may_be_stale =>
                    {
                        "the server there belongs to another run".into()
                    }
                    Err(Refusal::NotYet(reason)) => reason,
                    Err(refusal) => return Err(Failed::Other(refusal.reason(who))),
                },
                Err(reason) => reason,
            };
            if deadline.left() <= pause {
                let reason = format!("rank 0 did not come in time ({reason})");
                return Err(Failed::NoHost(reason));
            }
            deadline.pause(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// A connection on which the server has accepted this rank's hello.
    pub(crate) fn over(socket: OwnedFd) -> Self {
        Self { socket: Some(socket) }
    }

    /// Sends a request and waits for the answer, for which the server may take `limit`.
    pub(crate) fn request(
        &mut self,
        request: &Request,
        limit: Duration,
    ) -> Result<Vec<u8>, Failed> {
        let socket = self.socket.take().ok_or_else(|| {
            Failed::Other("the connection to the store was lost by an earlier error".into())
        })?;
        let deadline = Deadline::after(limit.saturating_add(GRACE));
        let answer = send_request(&socket, request, &deadline)
            .and_then(|()| read_answer(&socket, &deadline))
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe => {
                    Failed::NoHost("rank 0, which hosts it, ended".into())
                }
                io::ErrorKind::TimedOut
                | io::ErrorKind::HostUnreachable
                | io::ErrorKind::NetworkUnreachable => {
                    Failed::NoHost(format!("rank 0, which hosts it, does not answer: {error}"))
                }
                _ => Failed::Other(format!("the store does not answer: {error}")),
            })?;
        self.socket = Some(socket);
        match answer {
            Answer::Done(payload) => Ok(payload),
            Answer::TimedOut(ranks) => {
                let (ranks, _) = ranks.as_chunks::<4>();
                let ranks = ranks.iter().map(|rank| u32::from_le_bytes(*rank) as usize);
                Err(Failed::TimedOut(ranks.collect()))
            }
            Answer::Overtaken(ahead) => Err(Failed::Overtaken(ahead as usize)),
            Answer::Refused(reason) => {
                Err(Failed::Other(String::from_utf8_lossy(&reason).into_owned()))
            }
        }
    }
}

impl Candidates {
    fn try_all(&self, who: Who, deadline: &Deadline) -> Result<OwnedFd, Refusal> {
        let mut last = Refusal::NotYet("it has no address that this host can use".into());
        for address in &self.addresses {
            let limit = if self.addresses.len() == 1 { MAX_LIMIT } else { ANSWER_LIMIT };
            let tried = address.connect(deadline).map_err(Refusal::not_yet).and_then(|socket| {
                deadline.within(limit, |until| {
                    say_hello(&socket, who, &self.key, CHALLENGE_LIMIT, until)
                })?;
                Ok(socket)
            });
            match tried {
                Ok(socket) => return Ok(socket),
                Err(refusal @ (Refusal::Unproven | Refusal::Final(_))) => return Err(refusal),
                Err(refusal) => last = refusal,
            }
        }
        Err(last)
    }
}
