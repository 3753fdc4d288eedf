//! The launcher's side: the list of members, and one thread that serves all connections.
//!
//! No message waits for a member: bytes that a member's socket does not take wait in its outbox. Time in which this process was
//! suspended does not count.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_trace::runtime::{before_join, now, poll, sleep};
use paceline_trace::{lock, thread_builder};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::agreement::{Agreement, Decision};
use super::door::Door;
use super::wire::{Inbox, Notice, Request, frame};
use super::{MemberEvent, Terms, key};
use crate::RendezvousError;
use crate::address::listen_by_tcp;
use crate::deadline::{Deadline, LONGEST_SLEEP};
use crate::hello::HELLO_LIMIT;
use paceline_trace::awake;

/// How often members hear that the list is still there.
const ALIVE: Duration = Duration::from_secs(1);
/// How long the last message of a connection may take.
const FAREWELL: Duration = Duration::from_secs(2);
/// The most bytes that wait for a member. One that leaves more has stopped.
const MAX_OUTBOX_BYTES: usize = 64 << 20;

/// The list of members. Dropping it closes all connections.
#[derive(Debug)]
pub struct Members {
    shared: Arc<SharedList>,
    serving: Option<JoinHandle<()>>,
    port: u16,
}

#[derive(Debug)]
struct SharedList {
    /// Consistent between any two statements, so a panic elsewhere does no harm.
    agreement: Mutex<Agreement>,
    /// Something written here wakes the thread.
    waker: UnixStream,
    is_over: AtomicBool,
}

impl Members {
    /// Listens at a port of this host, as a store does that is reached at `host`; port 0 takes any free port. `report` is called
    /// with each event, and must not wait.
    pub fn listen(
        (host, port): (&str, u16),
        secret: &str,
        terms: Terms,
        report: impl Fn(MemberEvent) + Send + 'static,
    ) -> Result<Self, RendezvousError> {
        let place = format!("{host}:{port}");
        let failed = |reason| RendezvousError::NoMembers { place: place.clone(), reason };
        let found = listen_by_tcp(host, port, &Deadline::after(Duration::from_secs(3)));
        let (listener, own) = found.map_err(failed)?;
        let io_failed = |error: io::Error| failed(error.to_string());
        let door = Door::new(listener, key(secret)).map_err(io_failed)?;
        let (waker, woken) = UnixStream::pair().map_err(io_failed)?;
        [&waker, &woken]
            .into_iter()
            .try_for_each(|of| of.set_nonblocking(true))
            .map_err(io_failed)?;
        let agreement = Mutex::new(Agreement::new(terms));
        let shared = Arc::new(SharedList { agreement, waker, is_over: AtomicBool::new(false) });
        let mut server = Server {
            door,
            woken,
            shared: shared.clone(),
            connections: Vec::new(),
            clock: Clock { read: now(), time: Duration::ZERO, alive: Duration::ZERO },
        };
        let serving = thread_builder("members").spawn(move || server.run(&report));
        let serving = Some(serving.map_err(io_failed)?);
        Ok(Self { shared, serving, port: own.port() })
    }

    /// The port at which members join.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The number of a process that the launcher is about to start.
    pub fn next_number(&self) -> u64 {
        lock(&self.shared.agreement).next_number()
    }

    /// The launcher has seen a member's process end.
    pub fn gone(&self, number: u64, how: &str) {
        lock(&self.shared.agreement).gone(number, how);
        self.shared.wake();
    }

    /// Whether anybody belongs to the run or waits for it.
    pub fn has_members(&self) -> bool {
        lock(&self.shared.agreement).has_members()
    }

    /// Whether processes may come that have no number yet: replacements, or processes that others start. If not, too few members
    /// do not wait for more. At first they may.
    pub fn set_may_come(&self, may_come: bool) {
        lock(&self.shared.agreement).may_come = may_come;
        self.shared.wake();
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.shared.wake();
        if let Some(thread) = self.serving.take() {
            before_join(thread.thread());
            let _ = thread.join();
        }
    }
}

impl SharedList {
    fn wake(&self) {
        // If it takes nothing more, the thread has enough to read.
        let _ = send(&self.waker, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

/// Time that this process was awake.
#[derive(Debug)]
struct Clock {
    read: Instant,
    time: Duration,
    /// When members last heard that the list is there.
    alive: Duration,
}

/// A connection that has proven that it knows the secret.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    from: String,
    /// Once it has joined.
    number: Option<u64>,
    inbox: Inbox,
    outbox: Vec<u8>,
    /// When it is closed, whatever happens.
    until: Option<Duration>,
    /// Nothing that it says counts any more, and it is closed when its outbox is empty.
    is_ending: bool,
}

#[derive(Debug)]
struct Server {
    door: Door,
    woken: UnixStream,
    shared: Arc<SharedList>,
    connections: Vec<Connection>,
    clock: Clock,
}

impl Server {
    fn run(&mut self, report: &impl Fn(MemberEvent)) {
        loop {
            let readable = self.wait();
            if self.shared.is_over.load(Ordering::Relaxed) {
                return;
            }
            for (at, _) in readable.iter().enumerate().filter(|(_, is_readable)| **is_readable) {
                self.read(at);
            }
            let until = Some(self.clock.time + HELLO_LIMIT);
            let connect = |(socket, from)| Connection::new(socket, from, until);
            self.connections.extend(self.door.admitted().into_iter().map(connect));
            let decisions = lock(&self.shared.agreement).settle(self.clock.time);
            for decision in decisions {
                self.carry_out(decision, report);
            }
            self.flush();
        }
    }

    /// Waits until something comes or is due. Returns which connections have something to read.
    fn wait(&mut self) -> Vec<bool> {
        let is_waiting = self.door.is_waiting()
            || self.connections.iter().any(|of| of.until.is_some())
            || lock(&self.shared.agreement).is_waiting();
        let limit = if is_waiting { LONGEST_SLEEP } else { ALIVE };
        let fixed = self.door.sockets().chain([self.woken.as_fd()]);
        let mut fds: Vec<PollFd> =
            fixed.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let num_fixed = fds.len();
        fds.extend(self.connections.iter().map(|of| {
            let writes = if of.outbox.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            PollFd::new(&of.socket, PollFlags::IN | writes)
        }));
        let polled = poll(&mut fds, Some(limit));
        let is_readable = |fd: &PollFd| !(fd.revents() - PollFlags::OUT).is_empty();
        let readable = fds[num_fixed..].iter().map(is_readable).collect();
        drop(fds);
        if polled.is_err() {
            sleep(Duration::from_millis(10));
        }
        let passed = now() - self.clock.read;
        self.clock.read += passed;
        self.clock.time += awake(passed, limit);
        let mut wakes = [0; 64];
        while recv(&self.woken, &mut wakes, RecvFlags::DONTWAIT).is_ok_and(|(count, _)| count > 0) {
        }
        readable
    }

    /// Takes what a connection says.
    fn read(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        if connection.is_ending {
            return;
        }
        let mut outcome = connection.inbox.fill(&connection.socket);
        loop {
            match connection.inbox.next::<Request>() {
                Ok(Some(request)) if !connection.is_ending => {
                    let mut agreement = lock(&self.shared.agreement);
                    connection.take(request, &mut agreement, &self.door, self.clock.time);
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    outcome = outcome.and(Err(error));
                    break;
                }
            }
        }
        if let Err(error) = outcome {
            self.lose(at, &error);
        }
    }

    /// A connection has ended.
    fn lose(&mut self, at: usize, error: &io::Error) {
        let connection = &mut self.connections[at];
        // Its system has closed it, which shows that the process has ended.
        let has_ended =
            [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset].contains(&error.kind());
        let how = if has_ended { "its connection ended".into() } else { error.to_string() };
        match connection.number.take().filter(|_| !connection.is_ending) {
            Some(number) if has_ended => lock(&self.shared.agreement).gone(number, &how),
            Some(number) => lock(&self.shared.agreement).unreachable(number, &how),
            None if !connection.is_ending => self.door.refuse(&connection.from, &how),
            None => {}
        }
        connection.outbox.clear();
        connection.is_ending = true;
    }

    fn carry_out(&mut self, decision: Decision, report: &impl Fn(MemberEvent)) {
        let (numbers, notice, is_last) = match decision {
            Decision::Event(event) => return report(event),
            Decision::Tell(numbers, notice) => (numbers, notice, false),
            Decision::End(numbers, end) => (numbers, Notice::End(end), true),
        };
        let to = self.connections.iter_mut();
        let to = to.filter(|of| of.number.is_some_and(|number| numbers.contains(&number)));
        let Ok(bytes) = frame(&notice) else {
            let reason = "the texts of all members are too long for a message".into();
            return lock(&self.shared.agreement).break_up(reason);
        };
        for connection in to {
            connection.outbox.extend_from_slice(&bytes);
            if is_last {
                connection.end(self.clock.time);
            }
        }
    }

    /// Sends what waits, and closes what has ended.
    fn flush(&mut self) {
        let time = self.clock.time;
        let is_time = time >= self.clock.alive + ALIVE;
        if is_time {
            self.clock.alive = time;
        }
        for at in 0..self.connections.len() {
            let connection = &mut self.connections[at];
            if is_time && connection.outbox.is_empty() && connection.number.is_some() {
                connection.outbox.extend(frame(&Notice::Alive).unwrap_or_default());
            }
            let sent = connection.send();
            if let Err(error) = sent {
                self.lose(at, &error);
            }
        }
        let door = &self.door;
        self.connections.retain(|of| {
            let is_late = of.until.is_some_and(|until| time >= until);
            if is_late && !of.is_ending {
                door.refuse(&of.from, "it did not say that it wants to join");
            }
            let has_ended = of.is_ending && of.outbox.is_empty();
            !is_late && !has_ended
        });
    }
}

impl Connection {
    fn new(socket: OwnedFd, from: String, until: Option<Duration>) -> Self {
        let (inbox, outbox) = (Inbox::default(), Vec::new());
        Self { socket, from, number: None, inbox, outbox, until, is_ending: false }
    }

    fn take(&mut self, request: Request, agreement: &mut Agreement, door: &Door, time: Duration) {
        let notice = match (self.number, request) {
            (None, Request::Join { number, settings }) => {
                self.until = None;
                match agreement.join(number, &settings, &self.from) {
                    Ok(number) => {
                        self.number = Some(number);
                        Notice::Welcome(number)
                    }
                    Err(reason) => {
                        door.refuse(&self.from, &reason);
                        self.end(time);
                        Notice::Refused(reason)
                    }
                }
            }
            (Some(number), Request::Ready { missed }) => {
                return agreement.ready(number, missed, time);
            }
            (Some(number), Request::Text { generation, name, text }) => {
                return agreement.text(number, generation, (name, text), time);
            }
            (Some(number), Request::Leave) => {
                self.end(time);
                return agreement.leave(number);
            }
            (Some(number), Request::GiveUp { reason }) => {
                self.end(time);
                return agreement.give_up(number, reason);
            }
            (Some(_), Request::Join { .. }) | (None, _) => {
                self.end(time);
                Notice::Refused("this message does not belong here".into())
            }
        };
        self.outbox.extend(frame(&notice).unwrap_or_default());
    }

    fn end(&mut self, time: Duration) {
        self.is_ending = true;
        self.until = Some(time + FAREWELL);
    }

    /// Sends as much as the socket takes now.
    fn send(&mut self) -> io::Result<()> {
        let mut done = 0;
        while done < self.outbox.len() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&self.socket, &self.outbox[done..], flags) {
                Ok(sent) => done += sent,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.outbox.drain(..done);
        if self.outbox.len() > MAX_OUTBOX_BYTES {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it takes no messages"));
        }
        Ok(())
    }
}
