//! A cluster in one process: the threads of all its ranks run one at a time, in an order and in a time that follow from a seed.
//!
//! Input: a seed, the main functions of the processes, and the faults that happen to them. Output: how each process ended. The
//! code that runs is that of production; [`crate::runtime`] brings it here. This module knows neither ranks nor
//! messages.
//!
//! A thread keeps running until it calls the runtime. There the scheduler may let it sleep for a moment, so that others come
//! in between. When all threads wait, time goes on to the next event. Sockets are Unix sockets of the
//! kernel, and the network carries bytes between pairs of them (`network.rs`).
//!
//! A process that is killed runs no destructor. So its threads are never continued: they and what they hold
//! stay until the program ends, some tens of kilobytes for each.

mod network;
mod random;
mod scheduler;

use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use random::SplitMix;
pub(crate) use scheduler::current;

/// A program of the cluster.
pub struct HostProgram<R> {
    /// The number of its host, from 0. The host's address is 10.0.0.1 plus this number.
    pub host: usize,
    /// Runs on a thread of its own. When it returns, the process ends, and with it its other threads.
    pub main: Box<dyn FnOnce() -> R + Send>,
}

/// A fault of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultOfHost {
    /// When it happens, after the start of the cluster.
    pub at: Duration,
    /// The host.
    pub host: usize,
    /// The kind.
    pub kind: ClusterFault,
    /// How long it lasts, or by how much it changes something.
    pub time: Duration,
}

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterFault {
    /// The latest process of the host is killed, and the kernel closes its connections.
    Kill,
    /// That process does not run for this time. At time zero: it starts so late.
    Freeze,
    /// No process of any host runs for this time, as after Ctrl-Z.
    Suspend,
    /// No bytes go between the host and all others for this time.
    Cut,
    /// The clock of the host jumps ahead.
    Jump,
    /// All that the host sends takes longer by this time, from now on.
    Slow,
}

/// How a process has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessEnd<R> {
    /// Its main function has returned, at this time after the start.
    Returned(R, Duration),
    /// A fault has ended it.
    Killed,
    /// It did not end within the limit. For each of its threads: what it waits for.
    Hung(Vec<String>),
}

type Outcome<R> = Arc<Mutex<Option<(R, Duration)>>>;

/// Runs the programs under these faults until all have ended, at most until `limit` has passed in the cluster. Returns their ends in
/// the same order.
pub fn run<R: Send + 'static>(
    seed: u64,
    faults: &[FaultOfHost],
    limit: Duration,
    programs: Vec<HostProgram<R>>,
) -> Vec<ProcessEnd<R>> {
    let num_hosts = programs.iter().map(|of| of.host + 1).max().unwrap_or(1);
    let root = scheduler::begin(seed, faults, num_hosts);
    let start = |of: HostProgram<R>| ChildProcess::start(of.host, of.main);
    let started: Vec<_> = programs.into_iter().map(start).collect();
    let all: Vec<usize> = started.iter().map(|of| of.number).collect();
    root.await_processes(&all, limit);
    let end = |of: ChildProcess<R>| match of.take() {
        Some((value, at)) => ProcessEnd::Returned(value, at),
        None => root.waits(of.number).map_or(ProcessEnd::Killed, ProcessEnd::Hung),
    };
    let ends = started.into_iter().map(end).collect();
    root.end_cluster();
    ends
}

/// A process that another one has started.
pub struct ChildProcess<R> {
    number: usize,
    outcome: Outcome<R>,
}

impl<R> Clone for ChildProcess<R> {
    fn clone(&self) -> Self {
        Self { number: self.number, outcome: self.outcome.clone() }
    }
}

impl<R: Send + 'static> ChildProcess<R> {
    /// Starts a process on a host, for a process that starts others.
    pub fn start(host: usize, main: impl FnOnce() -> R + Send + 'static) -> Self {
        let (thread, outcome) = (own_thread(), Outcome::default());
        let (clock, to) = (thread.clone(), outcome.clone());
        let main = move || {
            let value = main();
            *to.lock().expect("nobody panics with this lock") = Some((value, clock.time()));
        };
        Self { number: thread.start(host, main), outcome }
    }

    /// Waits until it ends. `None` if it was killed.
    pub fn wait(&self) -> Option<R> {
        own_thread().await_processes(&[self.number], Duration::MAX);
        self.take().map(|(value, _)| value)
    }

    /// Kills it, as [`ClusterFault::Kill`] does. False if it has ended before.
    pub fn kill(&self) -> bool {
        own_thread().kill(self.number)
    }

    /// Whether it does not run now, after [`ClusterFault::Freeze`].
    pub fn is_frozen(&self) -> bool {
        own_thread().is_frozen(self.number)
    }

    fn take(&self) -> Option<(R, Duration)> {
        self.outcome.lock().expect("nobody panics with this lock").take()
    }
}

/// Runs a process until it ends, for a process that starts others. `None` if it was killed.
pub fn run_child<R: Send + 'static>(
    host: usize,
    main: impl FnOnce() -> R + Send + 'static,
) -> Option<R> {
    ChildProcess::start(host, main).wait()
}

fn own_thread() -> scheduler::SimulatedThread {
    current().expect("a process of a cluster calls this")
}
