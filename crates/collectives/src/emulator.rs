//! An emulated link: operations end when they would end on a slower wire.
//!
//! From the moment when all ranks are present, an operation is held for the time that the cost model gives
//! for its bytes and steps. The thread that executes the operation sleeps meanwhile, so that computation
//! goes on, as with a network card. This module knows nothing of how the data really move.

use std::cell::Cell;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use paceline_trace::now_ns;
use rustix::thread::{ClockId, clock_nanosleep_absolute, set_current_timer_slack};
use rustix::time::Timespec;

use crate::call::Call;
use crate::cost::{Algorithm, Cost, Link};

/// One rank's emulation of a link.
#[derive(Debug)]
pub(crate) struct LinkEmulator {
    pub(crate) link: Link,
    pub(crate) algorithm: Algorithm,
    card: Arc<NetworkCard>,
}

/// The emulated network card of a rank. It sends the bytes of one operation of any group after the other.
#[derive(Debug, Default)]
pub(crate) struct NetworkCard {
    /// When all bytes booked so far have been sent, in nanoseconds of `CLOCK_MONOTONIC`.
    free_at_ns: AtomicU64,
}

impl NetworkCard {
    /// Books the card for `busy_ns`, beginning at `ready_ns` or when the card is free, whichever is later.
    /// Returns the beginning.
    fn book(&self, ready_ns: u64, busy_ns: u64) -> u64 {
        let booked = |free_at_ns: u64| Some(free_at_ns.max(ready_ns).saturating_add(busy_ns));
        let free_at_ns = self.free_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, booked);
        free_at_ns.unwrap_or_default().max(ready_ns)
    }
}

impl LinkEmulator {
    pub(crate) fn new(link: Link, algorithm: Algorithm, card: Arc<NetworkCard>) -> Self {
        Self { link, algorithm, card }
    }

    /// How long a call takes on the link, and for how many nanoseconds of that it keeps the card busy. The
    /// card can send other bytes while the last bytes of this call are still on their way.
    fn times(&self, call: &Call, world: usize) -> (Duration, u64) {
        let bytes = call.message_bytes() as u64;
        let algorithm = self.algorithm.recommended(call.kind, world, bytes, &self.link);
        let cost = Cost::of(call.kind, algorithm, world, bytes);
        let busy_ns = cost.bytes as f64 / self.link.bytes_per_s * 1e9;
        (self.link.time(call.kind, algorithm, world, bytes), busy_ns as u64)
    }

    /// Sleeps until a call for which all ranks were present at `present_ns` would be finished on the link. Returns that
    /// moment, which has passed if the transport took longer than the link.
    pub(crate) fn hold_until_done(&self, call: &Call, world: usize, present_ns: u64) -> u64 {
        let (time, busy_ns) = self.times(call, world);
        let begin_ns = self.card.book(present_ns, busy_ns);
        let due_ns = begin_ns.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        sleep_until(due_ns);
        due_ns
    }
}

thread_local! {
    static IS_PRECISE: Cell<bool> = const { Cell::new(false) };
}

/// Sleeps until a time of `CLOCK_MONOTONIC`, in nanoseconds.
fn sleep_until(moment_ns: u64) {
    if now_ns() >= moment_ns {
        return;
    }
    if !IS_PRECISE.replace(true) {
        // By default the kernel may wake a thread 50 us late. If this fails, sleeps are less precise.
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
    use super::NetworkCard;

    #[test]
    fn a_card_sends_one_after_the_other() {
        let card = NetworkCard::default();
        assert_eq!(card.book(100, 10), 100);
        // Ready at the same time, from another group.
        assert_eq!(card.book(100, 10), 110);
        // Ready while the card is busy, and after it has been idle.
        assert_eq!(card.book(115, 5), 120);
        assert_eq!(card.book(1000, u64::MAX), 1000);
        assert_eq!(card.book(2000, 1), u64::MAX);
    }
}
