//! The accelerator that is emulated on the processor, and so exists on every machine. It has two modes:
//!
//! - *timed*: each stream has a thread that runs its work in order. A copy takes the stated latency and bandwidth, and the
//!   two directions have one engine each. Kernels take their time on the processor.
//! - *late*: nothing runs until somebody waits for it. A wait runs exactly the work before the event that it waits for, in an
//!   order that a seed draws among all that the program allows. Freed memory is overwritten. So a wait that a program has
//!   forgotten shows, whatever the timing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_trace::{Place, Span, lock, now_ns};

use super::event::{Event, EventState, WorkRunner};
use super::late::LateWork;
use super::timed;
use super::work::{CopyKind, FirstFailure, QueuedWork, WorkKind};

/// The settings of an emulated device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimSpec {
    /// Speed of copies from and to pinned memory of the host.
    pub copy_bytes_per_s: f64,
    /// Fixed cost of each copy.
    pub copy_latency: Duration,
    /// Time of the host to launch a kernel or a copy.
    pub launch: Duration,
    /// The seed of the order of work in the late mode; `None` for the timed mode.
    pub late: Option<u64>,
}

impl SimSpec {
    /// A card on a bus of 16 Gbyte/s: copies with 10 us, launches with 5 us.
    pub const DEFAULT: Self = Self {
        copy_bytes_per_s: 16e9,
        copy_latency: Duration::from_micros(10),
        launch: Duration::from_micros(5),
        late: None,
    };

    /// The same in the late mode.
    pub fn late(seed: u64) -> Self {
        Self { late: Some(seed), ..Self::DEFAULT }
    }

    /// The time of a copy. From or to memory that is not pinned it takes twice as long, since it goes through a pinned
    /// buffer of the driver.
    fn copy_time(&self, copy: &CopyKind) -> Duration {
        let share = if copy.is_pageable() { 0.5 } else { 1.0 };
        let seconds = copy.bytes as f64 / (share * self.copy_bytes_per_s);
        self.copy_latency + Duration::from_secs_f64(seconds)
    }
}

pub(super) struct Simulator {
    pub(super) spec: SimSpec,
    /// The engines that copy from and to the device, each one copy at a time.
    copies: [Mutex<()>; 2],
    pub(super) late: LateWork,
    pub(super) failure: Arc<FirstFailure>,
}

impl Simulator {
    pub(super) fn new(spec: SimSpec, failure: Arc<FirstFailure>) -> Self {
        let late = LateWork::new(spec.late.unwrap_or_default());
        Self { spec, copies: Default::default(), late, failure }
    }

    /// Runs a piece of work, unless earlier work has failed.
    pub(super) fn run(&self, work: QueuedWork) {
        let QueuedWork { waits, body, completion, .. } = work;
        // Work that waits for failed work, such as a collective that has lost a peer, has failed too.
        let has_failed = |event: &Event| event.peek() == EventState::Failed;
        if self.failure.check().is_err() || waits.iter().any(has_failed) {
            return completion.signal.fail();
        }
        let copy = match completion.kind {
            WorkKind::Copy(copy) if copy.uses_bus() => Some(copy),
            _ => None,
        };
        let engine =
            copy.map(|copy| lock(&self.copies[usize::from(copy.places.1 == Place::Device)]));
        let start_ns = now_ns();
        let outcome = catch_unwind(AssertUnwindSafe(body));
        if let (Some(copy), None) = (copy, self.spec.late) {
            timed::sleep_until(start_ns + self.spec.copy_time(&copy).as_nanos() as u64);
        }
        drop(engine);
        match outcome {
            Ok(Ok(())) => return completion.complete(Span { start_ns, end_ns: now_ns() }),
            Ok(Err(message)) => self.failure.set(message),
            Err(panic) => self.failure.set_panic("a kernel", &*panic),
        }
        completion.signal.fail();
    }
}

impl WorkRunner for Simulator {
    fn wait(&self, event: &Event) {
        self.late.run_before(event, |work| self.run(work));
    }
}
