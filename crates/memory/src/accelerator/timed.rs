//! Work on threads: one for each stream, and an engine for the copies of each direction.

use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_trace::thread_builder;

use super::{Accelerator, Task, lock};

/// The thread of a stream.
#[derive(Debug)]
pub(super) struct Thread {
    tasks: Option<Sender<Task>>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    pub(super) fn start(name: &str, sim: Accelerator) -> std::io::Result<Self> {
        let (tasks, queue) = mpsc::channel::<Task>();
        let handle = thread_builder(format!("sim-{name}")).spawn(move || {
            for task in queue {
                // Waiting here orders nothing for the host.
                for event in &task.waits {
                    event.block();
                }
                sim.run(task);
            }
        })?;
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
