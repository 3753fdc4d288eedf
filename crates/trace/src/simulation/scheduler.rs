//! The scheduler: which thread of the cluster runs, and what time it is.
//!
//! Exactly one thread runs. It gives its turn away where it waits, and sometimes where it need not. The seed decides who runs next.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec};

use super::network::{SimulatedNetwork, Site};
use super::random::SplitMix;
use super::{ClusterFault, FaultOfHost};
use crate::runtime::{Condvar, PassiveSocket};

/// The time that a reading of the clock takes, so that a loop that looks at the clock ends.
const GLANCE_NS: u64 = 200;
/// The longest pause of a thread that could go on.
const MAX_PAUSE_NS: u64 = 4_000_000;
/// The longest time between two looks at something that may wake nobody, such as a lock.
const MAX_NAP: Duration = Duration::from_millis(20);

/// An event, apart from time, for which a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wakeup {
    /// Of a condition variable, by its address.
    Condition(usize),
    Socket(RawFd),
    /// A thread or a process has ended.
    End,
}

#[derive(Debug)]
struct VirtualThread {
    process: usize,
    thread: Option<Thread>,
    waits: Vec<Wakeup>,
    until_ns: u64,
    has_ended: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct ProcessState {
    host: usize,
    has_ended: bool,
    is_killed: bool,
    frozen_until_ns: u64,
}

#[derive(Debug)]
struct World {
    now_ns: u64,
    random: SplitMix,
    threads: Vec<VirtualThread>,
    /// The first stands for the thread that has started the cluster.
    processes: Vec<ProcessState>,
    /// How far the clock of each host is ahead.
    ahead_ns: Vec<u64>,
    network: SimulatedNetwork,
    faults: VecDeque<FaultOfHost>,
}

#[derive(Debug)]
struct Cluster {
    world: Mutex<World>,
    running: AtomicUsize,
    /// The virtual zero of time.
    zero: Instant,
}

/// A thread of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedThread {
    cluster: Arc<Cluster>,
    id: usize,
}
thread_local! {
    static CURRENT: RefCell<Option<SimulatedThread>> = const { RefCell::new(None) };
}

/// The calling thread, if it belongs to a cluster.
pub(crate) fn current() -> Option<SimulatedThread> {
    CURRENT.with_borrow(Clone::clone)
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Makes the calling thread the first of a new cluster.
pub(super) fn begin(seed: u64, faults: &[FaultOfHost], num_hosts: usize) -> SimulatedThread {
    let mut random = SplitMix(seed);
    let mut faults = faults.to_vec();
    faults.sort_by_key(|fault| fault.at);
    let world = World {
        now_ns: 0,
        threads: Vec::new(),
        processes: vec![ProcessState::default()],
        ahead_ns: (0..num_hosts).map(|_| random.below(1 << 40)).collect(),
        network: SimulatedNetwork::new(num_hosts, SplitMix(random.next())),
        faults: faults.into(),
        random,
    };
    let (world, running, zero) = (Mutex::new(world), AtomicUsize::new(0), Instant::now());
    let root = SimulatedThread { cluster: Arc::new(Cluster { world, running, zero }), id: 0 };
    let id = root.add(0);
    root.started(id, Some(&std::thread::current()));
    CURRENT.set(Some(root.clone()));
    root
}

impl SimulatedThread {
    fn world(&self) -> MutexGuard<'_, World> {
        self.cluster.world.lock().expect("the scheduler does not panic")
    }

    pub(crate) fn now_ns(&self) -> u64 {
        let host = self.site().host;
        let mut world = self.world();
        world.now_ns += GLANCE_NS;
        world.now_ns + world.ahead_ns[host]
    }

    pub(crate) fn now(&self) -> Instant {
        self.cluster.zero + Duration::from_nanos(self.now_ns())
    }

    /// The time of the cluster, whatever the clocks of hosts say.
    pub(super) fn time(&self) -> Duration {
        Duration::from_nanos(self.world().now_ns)
    }

    fn until_ns(&self, limit: Option<Duration>) -> u64 {
        limit.map_or(u64::MAX, |limit| self.world().now_ns.saturating_add(nanos(limit)))
    }

    /// Waits for one of these, at most until then.
    fn wait_for(&self, waits: Vec<Wakeup>, until_ns: u64) {
        let mut world = self.world();
        let own = &mut world.threads[self.id];
        (own.waits, own.until_ns) = (waits, until_ns);
        self.hand_over(world);
        self.await_turn();
    }

    /// Gives the turn to the next thread.
    fn hand_over(&self, mut world: MutexGuard<'_, World>) {
        let next = world.next();
        self.cluster.running.store(next, Ordering::SeqCst);
        let thread = world.threads[next].thread.clone();
        drop(world);
        if next != self.id {
            thread.expect("only threads that have started can run").unpark();
        }
    }

    fn await_turn(&self) {
        while self.cluster.running.load(Ordering::SeqCst) != self.id {
            std::thread::park();
        }
    }

    /// Lets others run, once in a while.
    fn pause(&self) {
        let pause_ns = {
            let random = &mut self.world().random;
            if random.below(8) > 0 { 0 } else { random.time_ns(MAX_PAUSE_NS) }
        };
        if pause_ns > 0 {
            self.sleep(Duration::from_nanos(pause_ns));
        }
    }

    pub(crate) fn sleep(&self, time: Duration) {
        self.wait_for(Vec::new(), self.until_ns(Some(time)));
    }

    /// Tries again and again until this returns something, because nothing wakes the thread then.
    fn retry<T>(
        &self,
        limit: Option<Duration>,
        mut attempt: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.pause();
        let until_ns = self.until_ns(limit);
        let mut nap = Duration::from_micros(1);
        loop {
            let done = attempt();
            if done.is_some() || self.world().now_ns >= until_ns {
                return done;
            }
            self.wait_for(Vec::new(), until_ns.min(self.until_ns(Some(nap))));
            nap = (nap * 2).min(MAX_NAP);
        }
    }

    pub(crate) fn lock<'a, T>(&self, mutex: &'a Mutex<T>) -> MutexGuard<'a, T> {
        let lock = || match mutex.try_lock() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(held)) => Some(held.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        self.retry(None, lock).expect("it has no limit")
    }

    pub(crate) fn receive<T>(
        &self,
        from: &Receiver<T>,
        limit: Option<Duration>,
    ) -> Result<T, RecvTimeoutError> {
        let receive = || match from.try_recv() {
            Ok(message) => Some(Ok(message)),
            Err(TryRecvError::Disconnected) => Some(Err(RecvTimeoutError::Disconnected)),
            Err(TryRecvError::Empty) => None,
        };
        self.retry(limit, receive).unwrap_or(Err(RecvTimeoutError::Timeout))
    }

    pub(crate) fn wait<'a, T>(
        &self,
        of: &Condvar,
        (mutex, held): (&'a Mutex<T>, MutexGuard<'a, T>),
        limit: Option<Duration>,
    ) -> MutexGuard<'a, T> {
        drop(held);
        let wakeup = Wakeup::Condition(std::ptr::from_ref(of).addr());
        self.wait_for(vec![wakeup], self.until_ns(limit));
        self.lock(mutex)
    }

    pub(crate) fn notify_all(&self, of: &Condvar) {
        self.world().wake(Wakeup::Condition(std::ptr::from_ref(of).addr()));
        self.pause();
    }

    pub(crate) fn rang(&self, alarm: BorrowedFd<'_>) {
        self.world().wake(Wakeup::Socket(alarm.as_raw_fd()));
        self.pause();
    }

    pub(crate) fn poll(
        &self,
        fds: &mut [PollFd<'_>],
        limit: Option<Duration>,
    ) -> rustix::io::Result<usize> {
        self.pause();
        let until_ns = self.until_ns(limit);
        let mut nap = Duration::from_millis(1);
        loop {
            self.world().pump();
            let ready = rustix::event::poll(fds, Some(&Timespec::default()))?;
            if ready > 0 || self.world().now_ns >= until_ns {
                return Ok(ready);
            }
            let waits = fds.iter().map(|fd| Wakeup::Socket(fd.as_fd().as_raw_fd())).collect();
            self.wait_for(waits, until_ns.min(self.until_ns(Some(nap))));
            nap = (nap * 2).min(5 * MAX_NAP);
        }
    }

    /// A thread of this process that does not run yet.
    fn add(&self, process: usize) -> usize {
        let (thread, waits, until_ns, has_ended) = (None, Vec::new(), u64::MAX, false);
        let threads = &mut self.world().threads;
        threads.push(VirtualThread { process, thread, waits, until_ns, has_ended });
        threads.len() - 1
    }

    /// A thread of a process, by default the same one, that will do this work; and the work as it has to be started.
    pub(crate) fn adopt<T, W: FnOnce() -> T>(
        &self,
        process: Option<usize>,
        work: W,
    ) -> (usize, impl FnOnce() -> T + use<T, W>) {
        let process = process.unwrap_or_else(|| self.site().process);
        let thread = Self { cluster: self.cluster.clone(), id: self.add(process) };
        let id = thread.id;
        let work = move || {
            thread.await_turn();
            CURRENT.set(Some(thread.clone()));
            let _end = EndOfWork(thread);
            work()
        };
        (id, work)
    }

    /// Called when the system has started the thread, or has refused to.
    pub(crate) fn started(&self, id: usize, thread: Option<&Thread>) {
        let of = &mut self.world().threads[id];
        (of.thread, of.until_ns, of.has_ended) = (thread.cloned(), 0, thread.is_none());
    }

    /// Waits for the end of a thread.
    pub(crate) fn await_end(&self, of: &Thread) {
        let runs = |thread: &VirtualThread| {
            !thread.has_ended && thread.thread.as_ref().is_some_and(|on| on.id() == of.id())
        };
        while self.world().threads.iter().any(runs) {
            self.wait_for(vec![Wakeup::End], u64::MAX);
        }
    }

    /// Starts a process on a host. Returns its number.
    pub(super) fn start(&self, host: usize, main: impl FnOnce() + Send + 'static) -> usize {
        let process = self.world().processes.len();
        self.world().processes.push(ProcessState { host, ..ProcessState::default() });
        let main = move || {
            main();
            let Some(thread) = current() else { return };
            thread.world().end_process(process);
            // Another thread gets the turn, and this one never again.
            thread.wait_for(Vec::new(), u64::MAX);
        };
        let (id, main) = self.adopt(Some(process), main);
        let started = std::thread::Builder::new().name(format!("main-{process}")).spawn(main);
        self.started(id, Some(started.expect("the system has room for a thread").thread()));
        process
    }

    /// Waits until these processes have ended, at most until this time of the cluster.
    pub(super) fn await_processes(&self, of: &[usize], until: Duration) {
        let runs = |world: &World| of.iter().any(|process| !world.processes[*process].has_ended);
        while runs(&self.world()) && self.time() < until {
            self.wait_for(vec![Wakeup::End], nanos(until));
        }
    }

    /// For each thread of a process: its name, and for what it waits. `None` if a fault has ended the process.
    pub(super) fn waits(&self, process: usize) -> Option<Vec<String>> {
        let world = self.world();
        let all = world.threads.iter().filter(|of| of.process == process && !of.has_ended);
        let name = |of: &VirtualThread| of.thread.as_ref()?.name().map(str::to_owned);
        let all = all.map(|of| format!("{:?}: {:?} until {}", name(of), of.waits, of.until_ns));
        (!world.processes[process].is_killed).then(|| all.collect())
    }

    pub(super) fn kill(&self, process: usize) -> bool {
        self.world().kill(process)
    }

    pub(super) fn is_frozen(&self, process: usize) -> bool {
        let world = self.world();
        world.processes[process].frozen_until_ns > world.now_ns
    }

    /// Ends the cluster, outside of which the calling thread then is.
    pub(super) fn end_cluster(&self) {
        CURRENT.set(None);
        // Threads that never run again hold on to the cluster, so its sockets are given back here.
        self.world().network = SimulatedNetwork::new(0, SplitMix(0));
    }

    fn site(&self) -> Site {
        let world = self.world();
        let process = world.threads[self.id].process;
        Site { process, host: world.processes[process].host }
    }

    pub(crate) fn listen(&self, name: &str) -> io::Result<(PassiveSocket, u16)> {
        self.pause();
        let site = self.site();
        self.world().network.listen(name, site)
    }

    pub(crate) fn close(&self, listener: &PassiveSocket) {
        self.world().network.close(listener);
    }

    pub(crate) fn accept(&self, at: &PassiveSocket) -> io::Result<(OwnedFd, Option<SocketAddr>)> {
        self.pause();
        self.world().network.accept(at)
    }

    /// Connects to an address of a name or port: a packet goes to the listener, and another one comes back.
    pub(crate) fn connect(
        &self,
        ip: Option<IpAddr>,
        name: &str,
        limit: Option<Duration>,
    ) -> io::Result<OwnedFd> {
        let (from, until_ns) = (self.site(), self.until_ns(limit));
        let host = ip.map_or(from.host, |ip| self.world().network.host_of(ip, from.host));
        self.travel([from.host, host], until_ns)?;
        let dialed = self.world().network.dial(name, host, from);
        dialed.iter().for_each(|(_, listener)| self.world().wake(Wakeup::Socket(*listener)));
        self.travel([host, from.host], until_ns)?;
        Ok(dialed?.0)
    }

    /// Waits while a packet is on its way. An error if that takes longer than until then.
    fn travel(&self, hosts: [usize; 2], until_ns: u64) -> io::Result<()> {
        let arrival_ns = {
            let world = &mut *self.world();
            world.network.arrival_ns(hosts, world.now_ns)
        };
        self.wait_for(Vec::new(), arrival_ns.min(until_ns));
        if arrival_ns > until_ns { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

/// The end of a thread's work.
struct EndOfWork(SimulatedThread);

impl Drop for EndOfWork {
    fn drop(&mut self) {
        CURRENT.set(None);
        let mut world = self.0.world();
        world.threads[self.0.id].has_ended = true;
        world.wake(Wakeup::End);
        self.0.hand_over(world);
    }
}

impl World {
    /// The next thread to run. Lets time go on if no thread can run now.
    fn next(&mut self) -> usize {
        loop {
            while let Some(fault) = self.faults.pop_front_if(|of| nanos(of.at) <= self.now_ns) {
                self.happen(fault);
            }
            self.pump();
            let due = |(id, of): (usize, &VirtualThread)| {
                let process = self.processes[of.process];
                let is_alive = !of.has_ended && !process.has_ended;
                is_alive.then_some((id, of.until_ns.max(process.frozen_until_ns)))
            };
            let due: Vec<(usize, u64)> = self.threads.iter().enumerate().filter_map(due).collect();
            let ready: Vec<usize> =
                due.iter().filter(|of| of.1 <= self.now_ns).map(|of| of.0).collect();
            if !ready.is_empty() {
                let next = ready[self.random.below(ready.len() as u64) as usize];
                let of = &mut self.threads[next];
                of.until_ns = u64::MAX;
                of.waits.clear();
                return next;
            }
            let fault_ns = self.faults.front().map(|fault| nanos(fault.at));
            let arrival_ns = self.network.next_arrival_ns(self.now_ns);
            let all = due.iter().map(|of| of.1).chain(fault_ns).chain([arrival_ns]);
            self.now_ns = all.min().expect("the first thread waits for a time");
        }
    }

    fn happen(&mut self, FaultOfHost { host, kind, time, .. }: FaultOfHost) {
        let until_ns = self.now_ns.saturating_add(nanos(time));
        let freeze = |of: &mut ProcessState| of.frozen_until_ns = of.frozen_until_ns.max(until_ns);
        let mut ranks = self.processes[1..].iter_mut();
        let is_latest = |of: &&mut ProcessState| of.host == host && !of.has_ended;
        match kind {
            ClusterFault::Kill => {
                if let Some(at) = ranks.rposition(|of| is_latest(&of)) {
                    self.kill(1 + at);
                }
            }
            ClusterFault::Freeze => ranks.rfind(is_latest).into_iter().for_each(freeze),
            ClusterFault::Suspend => ranks.for_each(freeze),
            ClusterFault::Cut => {
                let cut_ns = &mut self.network.cut_until_ns[host];
                *cut_ns = until_ns.max(*cut_ns);
            }
            ClusterFault::Jump => self.ahead_ns[host] += nanos(time),
            ClusterFault::Slow => self.network.slow_by_ns[host] += nanos(time),
        }
    }

    /// False if it has ended before.
    fn kill(&mut self, process: usize) -> bool {
        let is_alive = !self.processes[process].has_ended;
        if is_alive {
            self.processes[process].is_killed = true;
            self.end_process(process);
        }
        is_alive
    }

    fn end_process(&mut self, process: usize) {
        self.processes[process].has_ended = true;
        self.network.end_process(process, self.now_ns);
        self.wake(Wakeup::End);
    }

    fn wake(&mut self, by: Wakeup) {
        let waiting = self.threads.iter_mut().filter(|of| of.waits.contains(&by));
        waiting.for_each(|of| of.until_ns = 0);
    }

    /// Lets the network carry what the threads have sent.
    fn pump(&mut self) {
        let moved = self.network.move_bytes(self.now_ns);
        moved.into_iter().for_each(|socket| self.wake(Wakeup::Socket(socket)));
    }
}
