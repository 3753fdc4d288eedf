//! Disks that fail, and disks that are slow, for tests.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use paceline_trace::runtime::sleep;

use super::{Disk, Operation};

/// The most bytes that a disk of a simulated cluster writes at once, if half of the bytes are not fewer.
const AT_ONCE_BYTES: usize = 256;

/// The kind of fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// One operation fails; the next ones succeed.
    #[default]
    Fails,
    /// One write stores only half of its bytes, and the next operation fails. Counted are the writes of two bytes or more.
    Cuts,
    /// One operation fails, and all after it: the process has been killed.
    Stops,
}

/// A fault that waits for its operation.
#[derive(Debug, Default)]
pub struct Faults {
    fault: Fault,
    at: usize,
    count: AtomicUsize,
    is_cut: AtomicBool,
    has_failed: AtomicBool,
    /// How long each write to the disk takes.
    pause: Duration,
    /// How long it takes before an operation, after it, before the next one, and so on, again and again.
    pauses: Vec<Duration>,
    num_pauses: AtomicUsize,
    /// While this many operations have happened, those that need room fail.
    full: Range<usize>,
}

impl Disk {
    /// A disk on which the operation of this number goes wrong. It is counted from 0, and for [`Fault::Cuts`] among the writes.
    pub fn with_fault(fault: Fault, at: usize) -> Self {
        let faults = Faults { fault, at, ..Faults::default() };
        Self { faults: Some(Arc::new(faults)), ..Self::default() }
    }

    /// A disk on which nothing goes wrong, and which waits for no device.
    pub fn without_fault() -> Self {
        Self::with_fault(Fault::Fails, usize::MAX)
    }

    /// A disk on which nothing goes wrong, and which takes `pause` whenever it is waited for.
    pub fn slow(pause: Duration) -> Self {
        let faults = Faults { at: usize::MAX, pause, ..Faults::default() };
        Self { faults: Some(Arc::new(faults)), ..Self::default() }
    }

    /// The disk of a simulated cluster, which remembers the operations on it. Before and after each of them it takes a while: these
    /// pauses, again and again. It is `full` from one operation to another one, counted from 0.
    pub fn simulated(pauses: Vec<Duration>, full: Range<usize>) -> Self {
        let faults = Faults { at: usize::MAX, pauses, full, ..Faults::default() };
        Self { faults: Some(Arc::new(faults)), ..Self::recorded() }
    }

    /// Whether the fault has happened.
    pub fn has_failed(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.has_failed.load(Ordering::Relaxed))
    }
}

/// Calls `trial` with a disk on which the first operation goes wrong, then the second, and so on, until a trial
/// reaches no fault: for each kind of fault. Returns how many operations the trial has. A panic names the fault.
pub fn at_each_operation(mut trial: impl FnMut(&Disk, Fault)) -> usize {
    /// Says which trial has panicked.
    struct Named(Fault, usize);
    #[allow(clippy::print_stderr, reason = "a test that fails says in which trial")]
    impl Drop for Named {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("in the trial in which operation {} goes wrong: {:?}", self.1, self.0);
            }
        }
    }
    let mut is_reached = |fault, at| {
        let disk = Disk::with_fault(fault, at);
        let _named = Named(fault, at);
        trial(&disk, fault);
        disk.has_failed()
    };
    let num_reached = |fault| (0..).find(|at| !is_reached(fault, *at)).expect("trials end");
    [Fault::Cuts, Fault::Stops, Fault::Fails].map(num_reached)[2]
}

impl Faults {
    /// Counts an operation, and fails if it is its turn.
    pub fn enter(&self, operation: &Operation) -> io::Result<()> {
        if matches!(operation, Operation::Sync(_) | Operation::SyncFolder(_)) {
            sleep(self.pause);
        }
        self.pause();
        let is_turn = self.fault != Fault::Cuts && {
            let count = self.count.fetch_add(1, Ordering::Relaxed);
            count == self.at
                || self.fault == Fault::Stops && count > self.at
                || self.full.contains(&count) && needs_room(operation)
        };
        if is_turn || self.is_cut.swap(false, Ordering::Relaxed) {
            self.has_failed.store(true, Ordering::Relaxed);
            return Err(io::Error::new(io::ErrorKind::StorageFull, "no space left (injected)"));
        }
        Ok(())
    }

    /// Lets the time of an operation pass, before or after it.
    pub fn pause(&self) {
        if !self.pauses.is_empty() {
            let number = self.num_pauses.fetch_add(1, Ordering::Relaxed);
            sleep(self.pauses[number % self.pauses.len()]);
        }
    }

    /// The part of `bytes` that one operation writes. A simulated process can end between two of them.
    pub fn at_once<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        let is_whole = self.pauses.is_empty() || bytes.len() <= AT_ONCE_BYTES;
        if is_whole { bytes } else { &bytes[..bytes.len() / 2] }
    }

    /// The part of `bytes` that a write stores whose turn it is to be cut.
    pub fn cut<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let is_counted = self.fault == Fault::Cuts && bytes.len() > 1;
        if !is_counted || self.count.fetch_add(1, Ordering::Relaxed) != self.at {
            return None;
        }
        self.is_cut.store(true, Ordering::Relaxed);
        self.has_failed.store(true, Ordering::Relaxed);
        Some(&bytes[..bytes.len() / 2])
    }
}

fn needs_room(operation: &Operation) -> bool {
    use Operation::{Create, Folder, Link, Write};
    matches!(operation, Folder(_) | Create(..) | Write(..) | Link(..))
}
