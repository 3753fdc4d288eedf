//! Work on threads: one for each stream, and an engine for the copies of each direction.
//!
//! A stream of a card has such a thread too, once its work has to wait for the host.

use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_trace::thread_builder;

use super::{Task, lock};

/// The thread of a stream, which runs one task after the other.
#[derive(Debug)]
pub(super) struct Thread {
    tasks: Option<Sender<Task>>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    pub(super) fn start(
        name: String,
        run: impl Fn(Task) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (tasks, queue) = mpsc::channel::<Task>();
        let handle = thread_builder(name).spawn(move || queue.into_iter().for_each(run))?;
        Ok(Self { tasks: Some(tasks), handle: Some(handle) })
    }

    pub(super) fn push(&self, task: Task) {
        // The thread lives as long as the sender.
        if let Some(tasks) = &self.tasks {
            let _ = tasks.send(task);
        }
    }
}

impl Drop for Thread {
    /// Runs what is queued, then ends.
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(handle) = self.handle.take()
            && handle.thread().id() != std::thread::current().id()
        {
            // A panic of a body has become a failure of the device.
            let _ = handle.join();
        }
    }
}

/// What moves bytes between the host and the device: each direction moves one copy at a time.
#[derive(Debug, Default)]
pub(super) struct CopyEngines([Mutex<()>; 2]);

impl CopyEngines {
    pub(super) fn lock(&self, to_device: bool) -> MutexGuard<'_, ()> {
        lock(&self.0[usize::from(to_device)])
    }
}

/// Sleeps until shortly before the time, since sleeping is not exact, then spins.
pub(super) fn sleep_until(end: Instant) {
    const SPIN: Duration = Duration::from_micros(80);
    let left = end.saturating_duration_since(Instant::now());
    if let Some(sleep) = left.checked_sub(SPIN) {
        std::thread::sleep(sleep);
    }
    spin_until(end);
}

pub(super) fn spin_until(end: Instant) {
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}
