//! Time limits that do not count the time for which this process was suspended: by Ctrl-Z, a frozen control group, or a
//! scheduler. While a whole run is suspended no rank can come.
//!
//! Every wait sleeps in short pieces and reads the clock between them. If much more time lies between two readings than
//! that, the process was suspended, and the deadline moves by that time.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paceline_trace::awake;
use paceline_trace::runtime::{now, sleep};

/// The longest time limit: an `Instant` further away may not exist.
pub(crate) const MAX_LIMIT: Duration = Duration::from_secs(366 * 24 * 3600);

/// The longest piece of a sleep. A wait reads the clock at least this often, to notice that the process was suspended.
pub const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// The moment at which a time limit ends.
#[derive(Clone, Debug)]
pub(crate) struct Deadline {
    end: Cell<Instant>,
    /// The last reading of the clock.
    seen: Cell<Instant>,
    /// Ends the limit early once it is set.
    over: Option<Arc<AtomicBool>>,
}

impl Deadline {
    /// The end of a time limit that begins now. Limits longer than [`MAX_LIMIT`] are shortened to it.
    pub(crate) fn after(limit: Duration) -> Self {
        let seen = now();
        Self { end: Cell::new(seen + limit.min(MAX_LIMIT)), seen: Cell::new(seen), over: None }
    }

    /// This limit, which also ends once `over` is set.
    pub(crate) fn unless(self, over: Option<Arc<AtomicBool>>) -> Self {
        Self { over, ..self }
    }

    /// Reads the clock after a wait of at most so long, and moves the deadline by a suspension.
    fn advance(&self, at_most: Duration) -> Instant {
        let now = now();
        let passed = now - self.seen.replace(now);
        self.end.set(self.end.get() + (passed - awake(passed, at_most)));
        now
    }

    pub(crate) fn left(&self) -> Duration {
        let now = self.advance(LONGEST_SLEEP);
        let is_over = self.over.as_ref().is_some_and(|over| over.load(Ordering::Relaxed));
        if is_over { Duration::ZERO } else { self.end.get().saturating_duration_since(now) }
    }

    pub(crate) fn has_passed(&self) -> bool {
        self.left().is_zero()
    }

    /// Moves the deadline so that at least `limit` is left.
    pub(crate) fn extend_to(&self, limit: Duration) {
        let now = self.advance(LONGEST_SLEEP);
        self.end.set(self.end.get().max(now + limit));
    }

    /// Lets `sleep` sleep for a short piece of what is left.
    pub(crate) fn sleep<T>(&self, sleep: impl FnOnce(Duration) -> T) -> T {
        sleep(self.left().min(LONGEST_SLEEP))
    }

    /// Lets `wait` wait for at most so long, perhaps longer than a short piece.
    pub(crate) fn wait<T>(&self, at_most: Duration, wait: impl FnOnce() -> T) -> T {
        self.advance(LONGEST_SLEEP);
        let outcome = wait();
        self.advance(at_most);
        outcome
    }

    /// Lets `wait` wait until the deadline, and for at most `limit`. A suspension that this notices moves both.
    pub(crate) fn within<T>(&self, limit: Duration, wait: impl FnOnce(&Self) -> T) -> T {
        self.beside(self.left().min(limit), wait)
    }

    /// Lets `wait` wait with a limit of its own. A suspension that this notices moves the deadline too.
    pub(crate) fn beside<T>(&self, limit: Duration, wait: impl FnOnce(&Self) -> T) -> T {
        let inner = Self::after(limit).unless(self.over.clone());
        let end = inner.end.get();
        let outcome = wait(&inner);
        self.seen.set(inner.advance(LONGEST_SLEEP));
        self.end.set(self.end.get() + (inner.end.get() - end));
        outcome
    }

    /// Sleeps for `pause`, or for what is left if that is less.
    pub(crate) fn pause(&self, pause: Duration) {
        self.sleep(|meant| sleep(meant.min(pause)));
    }
}

#[cfg(test)]
mod tests {
    use paceline_trace::SUSPENDED;

    use super::*;

    #[test]
    fn a_suspension_moves_the_deadline_and_a_busy_core_does_not() {
        let deadline = Deadline::after(Duration::from_secs(3600));
        deadline.sleep(|meant| std::thread::sleep(meant / 2));
        assert!(deadline.left() <= Duration::from_secs(3600));
        let before = deadline.end.get();
        let suspended = LONGEST_SLEEP + SUSPENDED + Duration::from_millis(50);
        // Also outside of a sleep: found by a schedule of `tests/cluster`.
        std::thread::sleep(suspended);
        assert!(!deadline.has_passed());
        let moved = deadline.end.get() - before;
        assert!(moved >= suspended - LONGEST_SLEEP, "moved by {moved:?}");
    }

    /// Found by a schedule of `tests/cluster`.
    #[test]
    fn a_suspension_while_the_kernel_connects_moves_the_deadline_and_a_slow_network_does_not() {
        let (deadline, slow) = (Deadline::after(Duration::from_secs(3600)), LONGEST_SLEEP);
        let before = deadline.end.get();
        deadline.wait(slow, || std::thread::sleep(slow));
        assert_eq!(deadline.end.get(), before);
        let suspended = slow + SUSPENDED + Duration::from_millis(50);
        deadline.wait(slow, || std::thread::sleep(suspended));
        let moved = deadline.end.get() - before;
        assert!(moved >= suspended - slow, "moved by {moved:?}");
    }

    /// Found by a schedule of `tests/cluster`.
    #[test]
    fn a_suspension_in_an_inner_wait_moves_the_outer_deadline() {
        let deadline = Deadline::after(Duration::from_secs(3600));
        let before = deadline.end.get();
        let suspended = LONGEST_SLEEP + SUSPENDED + Duration::from_millis(50);
        deadline.within(Duration::from_secs(60), |inner| {
            inner.sleep(|_| std::thread::sleep(suspended));
        });
        let moved = deadline.end.get() - before;
        assert!(moved >= suspended - LONGEST_SLEEP, "moved by {moved:?}");
        deadline.within(Duration::ZERO, |inner| assert!(inner.has_passed()));
    }

    #[test]
    fn a_limit_ends_early_once_its_wait_is_over_for_all() {
        let over = Arc::new(AtomicBool::new(false));
        let deadline = Deadline::after(Duration::from_secs(3600)).unless(Some(over.clone()));
        assert!(!deadline.has_passed());
        deadline.within(Duration::from_secs(60), |inner| {
            over.store(true, Ordering::Relaxed);
            assert!(inner.has_passed());
        });
        assert!(deadline.clone().has_passed());
    }

    #[test]
    fn a_limit_may_be_longer_than_any_clock() {
        let deadline = Deadline::after(Duration::MAX);
        assert!(!deadline.has_passed());
        deadline.extend_to(Duration::from_secs(1));
        assert!(deadline.left() > Duration::from_secs(3600));
        assert!(Deadline::after(Duration::ZERO).has_passed());
    }
}
