//! Disks that fail, and disks that are slow, for tests.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::{Disk, Operation};

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
            std::thread::sleep(self.pause);
        }
        let is_turn = self.fault != Fault::Cuts && {
            let count = self.count.fetch_add(1, Ordering::Relaxed);
            count == self.at || self.fault == Fault::Stops && count > self.at
        };
        if is_turn || self.is_cut.swap(false, Ordering::Relaxed) {
            self.has_failed.store(true, Ordering::Relaxed);
            return Err(io::Error::new(io::ErrorKind::StorageFull, "no space left (injected)"));
        }
        Ok(())
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
