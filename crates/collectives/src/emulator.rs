//! An emulated link: operations end when they would on a slower wire.
//!
//! From the moment when all ranks are present, the operation is held until the time is over that the
//! cost model gives for its bytes and steps. The thread that executes it sleeps meanwhile, so that
//! compute goes on beside it, as beside a network card.

use std::cell::Cell;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use paceline_trace::now_ns;
use rustix::thread::{ClockId, clock_nanosleep_absolute, set_current_timer_slack};
use rustix::time::Timespec;

use crate::call::Call;
use crate::cost::{Algorithm, Cost, Link};
use crate::warning::warn;

/// A link to be emulated.
#[derive(Debug)]
pub(crate) struct LinkEmulator {
    pub(crate) link: Link,
    pub(crate) algorithm: Algorithm,
    card: Arc<Card>,
    /// Whether it has been said that the transport cannot keep up.
    has_warned: AtomicBool,
}

/// The emulated network card of a rank, which sends the bytes of one operation after the other, whichever
/// group they belong to.
#[derive(Debug, Default)]
pub(crate) struct Card {
    /// When all that is booked has been sent, in nanoseconds of `CLOCK_MONOTONIC`.
    free_at_ns: AtomicU64,
}

impl Card {
    /// Books the card for `busy_ns` from `ready_ns` on, or from when it is free. Returns when that
    /// begins.
    fn book(&self, ready_ns: u64, busy_ns: u64) -> u64 {
        let booked = |free_at_ns: u64| Some(free_at_ns.max(ready_ns).saturating_add(busy_ns));
        let free_at_ns = self.free_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, booked);
        free_at_ns.unwrap_or_default().max(ready_ns)
    }
}

/// By how much an operation may outlast the link before that is said.
const LATE: f64 = 1.05;
/// The shortest operation of which it is said: how late a shorter one is, the scheduler decides.
const LONG: Duration = Duration::from_millis(1);

impl LinkEmulator {
    pub(crate) fn new(link: Link, algorithm: Algorithm, card: Arc<Card>) -> Self {
        Self { link, algorithm, card, has_warned: AtomicBool::new(false) }
    }

    /// How long a call takes on the link, and for how many nanoseconds of that it keeps the card busy:
    /// a card can send other bytes while the last ones of this call are still on their way.
    fn times(&self, call: &Call, world: usize) -> (Duration, u64) {
        let bytes = call.message_bytes() as u64;
        let algorithm = self.algorithm.recommended(call.kind, world, bytes, &self.link);
        let cost = Cost::of(call.kind, algorithm, world, bytes);
        let busy_ns = cost.bytes as f64 / self.link.bytes_per_s * 1e9;
        (self.link.time(call.kind, algorithm, world, bytes), busy_ns as u64)
    }

    /// Sleeps until a call for which all ranks were present at `present_ns` would be done. Says so,
    /// once, if that moment has passed: then the time is the transport's and not the link's.
    pub(crate) fn hold_until_done(&self, call: &Call, world: usize, present_ns: u64) {
        let (time, busy_ns) = self.times(call, world);
        let begin_ns = self.card.book(present_ns, busy_ns);
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
        sleep_until(begin_ns.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)));
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Card;

    #[test]
    fn a_card_sends_one_after_the_other() {
        let card = Card::default();
        assert_eq!(card.book(100, 10), 100);
        // Ready at the same time, of another group.
        assert_eq!(card.book(100, 10), 110);
        // Ready while the card is busy, and after it has been idle.
        assert_eq!(card.book(115, 5), 120);
        assert_eq!(card.book(1000, u64::MAX), 1000);
        assert_eq!(card.book(2000, 1), u64::MAX);
    }
}
