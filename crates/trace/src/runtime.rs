//! The runtime below ranks that wait for each other: time, threads, locks, and sockets.
//!
//! Each function is the one of the standard library or the kernel that it is named after. With the feature `simulation`, which only
//! tests have, a thread of a simulated cluster is served by the simulation instead: there time is virtual, one thread runs
//! at a time, and the simulation decides which. So whatever lets one thread wait for another, for time, or for a socket goes through this file.
//! Sending and receiving do not: nobody waits in them.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Scope, ScopedJoinHandle, Thread};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec};
use rustix::io::{ioctl_fionbio, retry_on_intr};
use rustix::net::sockopt::set_tcp_nodelay;
use rustix::net::{SocketFlags, acceptfrom_with};

/// The stack of every thread, in bytes: as much as the main thread of a process has by default, so that the same code can run
/// on both, also in a build without optimization, whose frames are many times as large. The standard library's default is a
/// quarter of it. Only the pages that a thread has touched take memory.
pub const STACK_BYTES: usize = 8 << 20;

/// Lets the simulation that this thread belongs to, if any, do the work of a function.
macro_rules! simulated {
    ($thread:ident => $work:expr) => {
        #[cfg(feature = "simulation")]
        if let Some($thread) = crate::simulation::current() {
            return $work;
        }
    };
}
pub(crate) use simulated;

/// The present.
#[inline]
pub fn now() -> Instant {
    simulated!(thread => thread.now());
    Instant::now()
}

/// Sleeps.
#[inline]
pub fn sleep(time: Duration) {
    simulated!(thread => thread.sleep(time));
    std::thread::sleep(time);
}

/// The value of a mutex, also after a panic of a thread that held the lock. For values that are consistent between any two
/// statements.
#[inline]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    simulated!(thread => thread.lock(mutex));
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until a descriptor is ready, at most `limit`. Returns how many are.
#[inline]
pub fn poll(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> rustix::io::Result<usize> {
    simulated!(thread => thread.poll(fds, limit));
    let limit = limit.map(|limit| Timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    rustix::event::poll(fds, limit.as_ref())
}

/// Adds one to a counter of events (see eventfd(2)), which wakes the thread that polls it.
pub fn ring(alarm: impl AsFd) {
    // Fails only if the counter is full, and then the thread wakes in any case.
    let _ = rustix::io::write(&alarm, &1u64.to_ne_bytes());
    simulated!(thread => thread.rang(alarm.as_fd()));
}

/// Waits for a message, at most `limit`.
#[inline]
pub fn receive<T>(from: &Receiver<T>, limit: Option<Duration>) -> Result<T, RecvTimeoutError> {
    simulated!(thread => thread.receive(from, limit));
    match limit {
        Some(limit) => from.recv_timeout(limit),
        None => from.recv().map_err(|_| RecvTimeoutError::Disconnected),
    }
}

/// A condition for which threads wait, without the lock of its mutex meanwhile.
#[derive(Debug, Default)]
pub struct Condvar(std::sync::Condvar);

impl Condvar {
    /// Waits until another thread notifies, or for no reason, and for at most `limit`.
    #[inline]
    pub fn wait<'a, T>(
        &self,
        #[allow(unused_variables)] mutex: &'a Mutex<T>,
        held: MutexGuard<'a, T>,
        limit: Option<Duration>,
    ) -> MutexGuard<'a, T> {
        simulated!(thread => thread.wait(self, (mutex, held), limit));
        let Some(limit) = limit else {
            return self.0.wait(held).unwrap_or_else(PoisonError::into_inner);
        };
        self.0.wait_timeout(held, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes all threads that wait.
    #[inline]
    pub fn notify_all(&self) {
        simulated!(thread => thread.notify_all(self));
        self.0.notify_all();
    }
}

/// A thread to be started.
#[derive(Debug)]
pub struct ThreadBuilder(std::thread::Builder);

/// A builder of a thread with this name and a stack of [`STACK_BYTES`].
pub fn thread_builder(name: impl Into<String>) -> ThreadBuilder {
    ThreadBuilder(std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES))
}

impl ThreadBuilder {
    /// Starts the thread.
    pub fn spawn<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        simulated!(thread => {
            let (id, work) = thread.adopt(None, work);
            let started = self.0.spawn(work);
            thread.started(id, started.as_ref().ok().map(JoinHandle::thread));
            started
        });
        self.0.spawn(work)
    }

    /// Starts a thread that ends within `scope`.
    pub fn spawn_scoped<'scope, T: Send + 'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> io::Result<ScopedJoinHandle<'scope, T>> {
        simulated!(thread => {
            let (id, work) = thread.adopt(None, work);
            let started = self.0.spawn_scoped(scope, work);
            thread.started(id, started.as_ref().ok().map(ScopedJoinHandle::thread));
            started
        });
        self.0.spawn_scoped(scope, work)
    }
}

/// Called before a thread is joined, which by itself waits for the thread's end except in a simulation.
#[inline]
pub fn before_join(#[allow(unused_variables)] of: &Thread) {
    simulated!(thread => thread.await_end(of));
}

/// A socket that listens: a passive one, in the words of POSIX.
#[derive(Debug)]
pub struct PassiveSocket {
    socket: OwnedFd,
    is_local: bool,
}

impl PassiveSocket {
    /// Listens at an abstract address of this host.
    pub fn local(name: &str) -> io::Result<Self> {
        simulated!(thread => thread.listen(name).map(|of| of.0));
        UnixListener::bind_addr(&UnixAddr::from_abstract_name(name)?).map(Self::from)
    }

    /// Listens at a port of this host, or at any free port if it is 0. Also returns the address.
    pub fn tcp(at: IpAddr, port: u16) -> io::Result<(Self, SocketAddr)> {
        simulated!(thread => {
            let (listener, port) = thread.listen(&format!(":{port}"))?;
            Ok((listener, SocketAddr::new(at, port)))
        });
        let listener = TcpListener::bind((at, port))?;
        let own = listener.local_addr()?;
        Ok((Self { socket: listener.into(), is_local: false }, own))
    }

    /// The next connection that was made here, and the other end's address if the network has one.
    pub fn accept(&self) -> io::Result<(OwnedFd, Option<SocketAddr>)> {
        simulated!(thread => thread.accept(self));
        let accept = || acceptfrom_with(&self.socket, SocketFlags::CLOEXEC);
        let (socket, from) = retry_on_intr(accept)?;
        if self.is_local {
            return Ok((socket, None));
        }
        set_tcp_nodelay(&socket, true)?;
        Ok((socket, from.and_then(|from| from.try_into().ok())))
    }

    /// From now on, accepting does not wait.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        Ok(ioctl_fionbio(&self.socket, true)?)
    }
}

impl From<UnixListener> for PassiveSocket {
    fn from(listener: UnixListener) -> Self {
        Self { socket: listener.into(), is_local: true }
    }
}

impl AsFd for PassiveSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(feature = "simulation")]
impl Drop for PassiveSocket {
    fn drop(&mut self) {
        crate::simulation::current().into_iter().for_each(|thread| thread.close(self));
    }
}

/// Connects to an abstract address of this host.
pub fn connect_local(name: &str) -> io::Result<OwnedFd> {
    simulated!(thread => thread.connect(None, name, None));
    UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?).map(OwnedFd::from)
}

/// Connects to a port, for at most `limit`.
pub fn connect_tcp(to: SocketAddr, limit: Duration) -> io::Result<OwnedFd> {
    simulated!(thread => thread.connect(Some(to.ip()), &format!(":{}", to.port()), Some(limit)));
    let stream = TcpStream::connect_timeout(&to, limit)?;
    // Within one host, a socket that connects to a port on which nobody listens can be connected to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream.into())
}
