//! The only clock that measurements use, and the part of a time that counts.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`: comparable between all threads and processes of a host.
#[inline]
pub fn now_ns() -> u64 {
    crate::runtime::simulated!(thread => thread.now_ns());
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The time of day, in nanoseconds since 1970, at the zero of [`now_ns`].
pub fn realtime_at_zero_ns() -> u64 {
    let day = clock_gettime(ClockId::Realtime);
    let day_ns = day.tv_sec as u64 * 1_000_000_000 + day.tv_nsec as u64;
    day_ns.saturating_sub(now_ns())
}

/// How much longer than meant a sleep lasts if the process was suspended. A process that only shares its core is back much
/// sooner.
pub const SUSPENDED: Duration = Duration::from_secs(1);

/// The part of the time between two readings of the clock that counts: after a suspension only the sleep that was meant.
pub fn awake(passed: Duration, meant: Duration) -> Duration {
    if passed.saturating_sub(meant) > SUSPENDED { meant } else { passed }
}
