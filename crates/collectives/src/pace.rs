//! An emulated link: operations end when they would on a slower wire.
//!
//! From the moment when all ranks are present, the operation is held until the time is over that the
//! cost model gives for its bytes and steps. The thread that executes it sleeps meanwhile, so that
//! compute goes on beside it, as beside a network card.

use std::cell::Cell;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use paceline_trace::now_ns;
use rustix::thread::{ClockId, clock_nanosleep_absolute, set_current_timer_slack};
use rustix::time::Timespec;

use crate::call::Call;
use crate::cost::{Algorithm, Link};
use crate::warning::warn;

/// A link to be emulated.
#[derive(Debug)]
pub(crate) struct Pace {
    pub(crate) link: Link,
    pub(crate) algorithm: Algorithm,
    /// Whether it has been said that the transport cannot keep up.
    has_warned: AtomicBool,
}

/// By how much an operation may outlast the link before that is said.
const LATE: f64 = 1.05;
/// The shortest operation of which it is said: how late a shorter one is, the scheduler decides.
const LONG: Duration = Duration::from_millis(1);

impl Pace {
    pub(crate) fn new(link: Link, algorithm: Algorithm) -> Self {
        Self { link, algorithm, has_warned: AtomicBool::new(false) }
    }

    /// How long a call takes on the link.
    fn time(&self, call: &Call, world: usize) -> Duration {
        let bytes = call.message_bytes() as u64;
        let algorithm = self.algorithm.recommended(call.kind, world, bytes, &self.link);
        self.link.time(call.kind, algorithm, world, bytes)
    }

    /// Sleeps until a call for which all ranks were present at `present_ns` would be done. Says so,
    /// once, if that moment has passed: then the time is the transport's and not the link's.
    pub(crate) fn hold_until_done(&self, call: &Call, world: usize, present_ns: u64) {
        let time = self.time(call, world);
        let taken = Duration::from_nanos(now_ns().saturating_sub(present_ns));
        let is_late = time >= LONG && taken.as_secs_f64() > time.as_secs_f64() * LATE;
        if is_late && !self.has_warned.swap(true, Ordering::Relaxed) {
            warn(&format!(
                "{} took {taken:?} on this transport, longer than the {time:?} of the emulated link \
                 ({}); this operation, and perhaps others, show the transport's own time",
                call.describe(),
                self.link
            ));
        }
        sleep_until(present_ns.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)));
    }
}

thread_local! {
    static IS_PRECISE: Cell<bool> = const { Cell::new(false) };
}

/// Sleeps until a moment of `CLOCK_MONOTONIC`.
fn sleep_until(moment_ns: u64) {
    if now_ns() >= moment_ns {
        return;
    }
    if !IS_PRECISE.replace(true) {
        // The kernel may otherwise be 50 us late. Refused, the sleep is that much less precise.
        let _ = set_current_timer_slack(NonZero::new(1));
    }
    let moment = Timespec {
        tv_sec: (moment_ns / 1_000_000_000) as i64,
        tv_nsec: (moment_ns % 1_000_000_000) as _,
    };
    // A signal may end the sleep early.
    while clock_nanosleep_absolute(ClockId::Monotonic, &moment).is_err() {}
}
