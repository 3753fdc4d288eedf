//! Work in real time: the thread of a stream, and waits for a time.
//!
//! A stream of a card has such a thread too, once its work has to wait for the host.

use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_trace::{now_ns, thread_builder};

use super::work::QueuedWork;

/// The thread of a stream, which runs its work in order.
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

/// Sleeps until shortly before the time, since sleeping is not exact, then spins.
pub(super) fn sleep_until(end_ns: u64) {
    const SPIN: Duration = Duration::from_micros(80);
    let left = Duration::from_nanos(end_ns.saturating_sub(now_ns()));
    std::thread::sleep(left.saturating_sub(SPIN));
    spin_until(end_ns);
}

pub(super) fn spin_until(end_ns: u64) {
    while now_ns() < end_ns {
        std::hint::spin_loop();
    }
}
