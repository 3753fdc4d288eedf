//! Work in real time: a thread for each stream, and an engine for the copies of each direction.
//!
//! A stream of a card has such a thread too, once its work has to wait for the host.

use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_trace::{lock, thread_builder};

use super::work::QueuedWork;

/// The thread of a stream, which runs its work in order.
#[derive(Debug)]
pub(super) struct WorkerThread {
    queue: Option<Sender<QueuedWork>>,
    handle: Option<JoinHandle<()>>,
}

impl WorkerThread {
    pub(super) fn start(
        name: String,
        run: impl Fn(QueuedWork) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (queue, work) = mpsc::channel::<QueuedWork>();
        let handle = thread_builder(name).spawn(move || work.into_iter().for_each(run))?;
        Ok(Self { queue: Some(queue), handle: Some(handle) })
    }

    pub(super) fn push(&self, work: QueuedWork) {
        // The thread lives as long as the sender.
        if let Some(queue) = &self.queue {
            let _ = queue.send(work);
        }
    }
}

impl Drop for WorkerThread {
    /// Runs the queued work, then ends.
    fn drop(&mut self) {
        self.queue = None;
        if let Some(handle) = self.handle.take()
            && handle.thread().id() != std::thread::current().id()
        {
            // A panic of a body has become a failure of the device.
            let _ = handle.join();
        }
    }
}

/// The engines that copy between the host and the device: each direction moves one copy at a time.
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
