//! The store's server, which rank 0 hosts unless torchrun's agent hosts one. This module does not know what keys mean.
//!
//! One thread accepts connections until all ranks have come. Then the server stops listening, so that later
//! connections, perhaps of the next run with the same name, cannot end up here. Every connection has its own
//! thread, so that a slow stranger delays no rank.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_trace::runtime::{Condvar, before_join, poll, sleep};
use paceline_trace::{lock, thread_builder};
use rustix::event::{PollFd, PollFlags};

use super::wire::{Answer, Request, read_request, send_answer};
use crate::address::ListenSocket;
use crate::deadline::Deadline;
use crate::hello::{
    HELLO_LIMIT, Hello, HelloAnswer, Incoming, MAX_ATTEMPTS, MAX_STRANGERS, reason,
};
use crate::key::RunKey;
use crate::launch::LauncherId;
use crate::socket::{is_closed, poll_until};
use crate::warning::{Warnings, warn};

/// How long rank 0 waits for its last answers to leave when the rendezvous has failed.
const LAST_ANSWERS: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
struct StoreState {
    values: HashMap<String, Vec<u8>>,
    /// Which ranks are here.
    joined: Vec<bool>,
    /// Which ranks are here, or have been and then gave up.
    seen: Vec<bool>,
    /// The launcher of each host with ranks here, and how many. The launcher of rank 0's host counts as one more.
    launches: HashMap<u32, (LauncherId, usize)>,
    /// A rank that has come for a later attempt of the run.
    ahead: Option<usize>,
    /// Whether rank 0 has given up. Nobody waits any longer.
    is_over: bool,
}

#[derive(Debug)]
pub(crate) struct ServerState {
    world: usize,
    /// The keys of this attempt and of later ones, whose ranks learn that this one is over.
    keys: Vec<RunKey>,
    /// Consistent between any two statements, so a panic elsewhere does no harm.
    state: Mutex<StoreState>,
    changed: Condvar,
    num_strangers: AtomicUsize,
    /// Of refused connections.
    pub(crate) warnings: Warnings,
    /// Shut down when no more ranks are expected.
    closing: UnixStream,
}

/// The running server. Dropping it only ends listening: ranks that have come are answered as
/// long as the process lives.
#[derive(Debug)]
pub(crate) struct Server {
    shared: Arc<ServerState>,
    accepting: Option<JoinHandle<()>>,
}

impl StoreState {
    /// Lets a rank join, unless its host has another launcher, or it is here already.
    fn join(&mut self, rank: usize, launch: Option<LauncherId>) -> HelloAnswer {
        let known = launch.and_then(|launch| self.launches.get(&launch.host));
        if known.is_some_and(|(known, _)| Some(*known) != launch) {
            return HelloAnswer::HostTaken;
        }
        match self.joined.get_mut(rank) {
            Some(is_here) if !*is_here => {
                *is_here = true;
                self.seen[rank] = true;
                if let Some(launch) = launch {
                    self.launches.entry(launch.host).or_insert((launch, 0)).1 += 1;
                }
                HelloAnswer::Welcome
            }
            _ => HelloAnswer::RankTaken,
        }
    }

    /// Lets a rank come again, until all have come.
    fn leave(&mut self, rank: usize, launch: Option<LauncherId>) {
        self.joined[rank] = false;
        let host = launch.map(|launch| launch.host);
        if let Some((_, count)) = host.and_then(|host| self.launches.get_mut(&host)) {
            *count -= 1;
        }
        self.launches.retain(|_, (_, count)| *count > 0);
    }

    fn is_complete(&self) -> bool {
        self.joined.iter().all(|&is_here| is_here)
    }
}

impl Server {
    /// `launch` is the launcher of rank 0.
    pub(crate) fn start(
        listeners: Vec<ListenSocket>,
        world: usize,
        secret: &str,
        launch: Option<LauncherId>,
    ) -> io::Result<Self> {
        for listener in &listeners {
            listener.set_nonblocking()?;
        }
        let (shared, closed) = ServerState::new(world, secret)?;
        lock(&shared.state).launches.extend(launch.map(|launch| (launch.host, (launch, 1))));
        let shared = Arc::new(shared);
        let accepting = {
            let shared = shared.clone();
            thread_builder("store").spawn(move || accept_all(&listeners, &closed, &shared))?
        };
        Ok(Self { shared, accepting: Some(accepting) })
    }

    /// Stops listening, and waits until the listeners are closed.
    pub(crate) fn stop_listening(&mut self) {
        self.shared.close();
        if let Some(thread) = self.accepting.take() {
            before_join(thread.thread());
            let _ = thread.join();
        }
    }

    /// Ends all waits, because rank 0 has waited without success and its process is about to end. The other ranks learn
    /// which ranks are missing, instead of reporting rank 0.
    pub(crate) fn give_up(&self) {
        lock(&self.shared.state).is_over = true;
        self.shared.changed.notify_all();
        sleep(LAST_ANSWERS);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_listening();
    }
}

impl ServerState {
    /// The state of a server without ranks, and a socket that becomes readable when no more ranks are expected.
    pub(crate) fn new(world: usize, secret: &str) -> io::Result<(Self, UnixStream)> {
        let (closing, closed) = UnixStream::pair()?;
        let (joined, seen) = (vec![false; world], vec![false; world]);
        let shared = Self {
            world,
            keys: RunKey::of_attempts(secret, MAX_ATTEMPTS),
            state: Mutex::new(StoreState { joined, seen, ..StoreState::default() }),
            changed: Condvar::default(),
            num_strangers: 0.into(),
            warnings: Warnings::default(),
            closing,
        };
        Ok((shared, closed))
    }

    fn close(&self) {
        let _ = self.closing.shutdown(std::net::Shutdown::Both);
    }

    /// Waits until `ready` returns a value, at most `limit`.
    fn wait_for<T>(&self, limit: Duration, ready: impl Fn(&StoreState) -> Option<T>) -> Option<T> {
        let mut state = lock(&self.state);
        let deadline = Deadline::after(limit);
        loop {
            let found = ready(&state);
            if found.is_some() {
                return found;
            }
            if state.is_over || deadline.has_passed() {
                return None;
            }
            state = deadline.sleep(|limit| self.changed.wait(&self.state, state, Some(limit)));
        }
    }

    fn refuse(&self, who: &str, why: impl std::fmt::Display) {
        self.warnings.warn(&format!("refused a connection from {who}: {why}"));
    }

    /// The answer to a rank, which waits for others only until `is_gone`.
    pub(crate) fn answer(&self, request: Request, is_gone: impl Fn() -> bool) -> Answer {
        match request {
            Request::Set { key, value } => {
                lock(&self.state).values.insert(key, value);
                self.changed.notify_all();
                Answer::Done(Vec::new())
            }
            Request::Get { key, limit } => {
                let value = self.wait_for(limit, |state| state.values.get(&key).cloned());
                value.map_or(Answer::TimedOut(Vec::new()), Answer::Done)
            }
            Request::Add { key, amount } => self.add(key, amount),
            Request::Arrive { limit } => {
                let settled = |state: &StoreState| {
                    if state.is_complete() {
                        return Some(Answer::Done(Vec::new()));
                    }
                    let gone = || is_gone().then(|| Answer::Refused(b"it is gone".to_vec()));
                    state.ahead.map(|rank| Answer::Overtaken(rank as u32)).or_else(gone)
                };
                let answer = self.wait_for(limit, settled);
                answer.unwrap_or_else(|| Answer::TimedOut(missing(&lock(&self.state))))
            }
        }
    }

    /// Counters are decimal text, as in torchrun's store.
    fn add(&self, key: String, amount: i64) -> Answer {
        let mut state = lock(&self.state);
        let value = state.values.entry(key).or_insert_with(|| b"0".to_vec());
        let old = std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok());
        let Some(new) = old.and_then(|old| old.checked_add(amount)) else {
            return Answer::Refused(b"the key holds no number, or the sum is too large".to_vec());
        };
        *value = new.to_string().into_bytes();
        let answer = Answer::Done(value.clone());
        drop(state);
        self.changed.notify_all();
        answer
    }
}

/// The ranks to name after a time-out, four bytes each: those that never came or have died, or, if there are none,
/// those that gave up.
fn missing(state: &StoreState) -> Vec<u8> {
    let bytes_of = |here: &[bool]| -> Vec<u8> {
        let ranks = here.iter().enumerate().filter(|(_, is_here)| !**is_here);
        ranks.flat_map(|(rank, _)| (rank as u32).to_le_bytes()).collect()
    };
    if state.seen.contains(&false) { bytes_of(&state.seen) } else { bytes_of(&state.joined) }
}

fn accept_all(listeners: &[ListenSocket], closed: &UnixStream, shared: &Arc<ServerState>) {
    loop {
        let mut fds: Vec<PollFd> = listeners
            .iter()
            .map(|listener| PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN))
            .chain([PollFd::new(closed, PollFlags::IN)])
            .collect();
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return warn(&format!("the store cannot listen any more: {error}")),
            Ok(_) => {}
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[listeners.len()] {
            return;
        }
        for (listener, _) in listeners.iter().zip(&ready).filter(|(_, ready)| **ready) {
            let (socket, who) = match listener.accept() {
                Ok((Some(socket), who)) => (socket, who),
                Ok((None, who)) => {
                    shared.refuse(&who, "only processes of the same user may join");
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => {
                    // Too many files are open, or the connection is gone. Others may come.
                    sleep(Duration::from_millis(10));
                    continue;
                }
            };
            if shared.num_strangers.fetch_add(1, Ordering::Relaxed) >= MAX_STRANGERS {
                shared.num_strangers.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (served, named) = (shared.clone(), who.clone());
            let serving =
                thread_builder("store-peer").spawn(move || serve(socket, &named, &served));
            if let Err(error) = serving {
                shared.num_strangers.fetch_sub(1, Ordering::Relaxed);
                // A rank tries again until its time is up. Its error cannot say why nobody answers.
                let fix = "allow more processes (ulimit -u, or pids.max of the control group)";
                shared.refuse(&who, format!("the system refuses a thread ({error}); {fix}"));
            }
        }
    }
}

fn serve(socket: OwnedFd, who: &str, shared: &ServerState) {
    let admitted = match Incoming::new(socket, HELLO_LIMIT) {
        Ok(incoming) => admit(incoming, who, shared),
        Err(error) => {
            shared.refuse(who, error);
            None
        }
    };
    shared.num_strangers.fetch_sub(1, Ordering::Relaxed);
    let Some((rank, launch, socket)) = admitted else { return };
    let mut has_given_up = false;
    while let Ok(request) = read_request(&socket) {
        let answer = shared.answer(request, || is_closed(&socket));
        has_given_up = matches!(answer, Answer::TimedOut(_));
        if send_answer(&socket, &answer).is_err() {
            break;
        }
    }
    let mut state = lock(&shared.state);
    if !state.is_complete() {
        state.leave(rank, launch);
        state.seen[rank] = has_given_up;
    }
}

/// Waits for the hello of a new connection.
fn proven(incoming: &mut Incoming, shared: &ServerState) -> io::Result<Hello> {
    loop {
        if let Some(hello) = incoming.advance(&shared.keys, shared.world)? {
            return Ok(hello);
        }
        let mut fds = [PollFd::new(&incoming.socket, PollFlags::IN)];
        match poll_until(&mut fds, Some(&incoming.deadline)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Reads the hello of a new connection and answers it. Returns the rank, its launcher and its socket, unless it may not join.
pub(crate) fn admit(
    mut incoming: Incoming,
    who: &str,
    shared: &ServerState,
) -> Option<(usize, Option<LauncherId>, OwnedFd)> {
    let Hello { rank, launch, answer } = match proven(&mut incoming, shared) {
        Ok(hello) => hello,
        Err(error) => {
            shared.refuse(who, reason(&error));
            return None;
        }
    };
    let answer = {
        let mut state = lock(&shared.state);
        if state.is_complete() {
            // The connection came while the listener was closing: it belongs to another run, and will try again to reach that run.
            return None;
        }
        match answer {
            HelloAnswer::Welcome => state.join(rank, launch),
            HelloAnswer::Overtaken if rank < shared.world => {
                state.ahead = Some(rank);
                HelloAnswer::Overtaken
            }
            refusal => refusal,
        }
    };
    let answered = incoming.answer(answer);
    if answer != HelloAnswer::Welcome {
        let why = match answer {
            HelloAnswer::WrongWorld => "it expects another world size",
            HelloAnswer::Overtaken => "it belongs to a later attempt of this run",
            HelloAnswer::HostTaken => "the ranks of its host have another launcher",
            _ => "that rank is here already, or beyond the world size",
        };
        // Ranks that wait for this rank look again.
        shared.changed.notify_all();
        shared.refuse(&format!("{who} as rank {rank}"), why);
        return None;
    }
    let mut state = lock(&shared.state);
    if answered.is_err() {
        state.leave(rank, launch);
        return None;
    }
    let is_last = state.is_complete();
    drop(state);
    if is_last {
        shared.close();
    }
    shared.changed.notify_all();
    Some((rank, launch, incoming.socket))
}
