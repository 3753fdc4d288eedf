//! Measures with messages how far the clocks of the ranks lie apart.
//!
//! Input: a group. Output: what each rank has to add to its clock to get the time of rank 0's clock, and its error bound.
//! This module does not know what the clocks time.

use std::hash::{DefaultHasher, Hash, Hasher};

use paceline_trace::now_ns;

use crate::{CollectiveError, Group, Result};

/// How many messages go to each rank and back. Only the fastest exchange counts: more exchanges make it
/// likelier that one met no delay.
const NUM_EXCHANGES: usize = 64;

/// The difference between a rank's clock and that of rank 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockOffset {
    /// To be added to a time of this rank's clock, in nanoseconds. Zero if both ranks read one clock.
    pub offset_ns: i64,
    /// The true offset lies at most this far from [`ClockOffset::offset_ns`], in nanoseconds.
    pub error_ns: u64,
    /// Whether this rank and rank 0 read the same clock: one kernel, one time namespace. Offset and error are then exactly zero.
    pub is_same_clock: bool,
    /// The offset that the messages measured, even if both ranks read the same clock.
    pub measured: RoundTrip,
}

/// The measurement of one message to a rank and its answer.
///
/// Rank 0 sends at `t0` and has the answer at `t3`, by its own clock. The other rank has the message
/// at `t1` and answers at `t2`, by its own. As in NTP (RFC 5905, section 8), the offset is
/// `((t0 - t1) + (t3 - t2)) / 2` and the round trip is `(t3 - t0) - (t2 - t1)`. The two directions may take
/// different times, but neither can be negative, so the offset is wrong by at most half the round trip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundTrip {
    /// To be added to a time of the other rank's clock to get the time of rank 0's, in nanoseconds.
    pub offset_ns: i64,
    /// How long the message and the answer traveled, in nanoseconds.
    pub round_trip_ns: u64,
}

impl RoundTrip {
    fn new(t0: i64, t1: i64, t2: i64, t3: i64) -> Self {
        let offset_ns = ((t0 - t1) + (t3 - t2)) / 2;
        // Coarse clocks give the same value twice in a row, and some step back, so this can be negative.
        let round_trip_ns = ((t3 - t0) - (t2 - t1)).max(0) as u64;
        Self { offset_ns, round_trip_ns }
    }

    /// By how much the offset may be wrong, in nanoseconds: half the round trip, rounded up.
    pub fn error_ns(&self) -> u64 {
        self.round_trip_ns.div_ceil(2)
    }
}

/// Measures what each rank has to add to its clock (`now_ns()`) to get the time of rank 0's clock. Rank 0
/// exchanges 64 messages with each other rank in turn, and the fastest exchange counts.
/// A collective call; rank 0 gets zero.
///
/// The messages go over a sub-group, so the sequence of this group stays the same on every rank. The
/// sub-group emulates no link, which would delay the messages.
pub fn measure_clock(group: &Group) -> Result<ClockOffset> {
    measure(group, || now_ns() as i64, clock_id())
}

/// Like [`measure_clock`], with any clock. Ranks that pass the same number as `clock` read the same clock.
fn measure(group: &Group, now: impl Fn() -> i64, clock: Option<i64>) -> Result<ClockOffset> {
    let Some(pairs) = group.split_apart(Some(0))? else { return Ok(ClockOffset::default()) };
    // Per rank: offset, round trip, and whether the clock is rank 0's.
    let mut found = vec![[0i64; 3]; pairs.world_size()];
    found[0][2] = 1;
    if pairs.rank() == 0 {
        for (peer, found) in found.iter_mut().enumerate().skip(1) {
            let (best, other) = ask(&pairs, peer, &now)?;
            let is_same = clock.is_some_and(|own| other == [1, own]);
            *found = [best.offset_ns, best.round_trip_ns as i64, i64::from(is_same)];
        }
    } else {
        answer(&pairs, &now, clock)?;
    }
    pairs.broadcast_slice(found.as_flattened_mut(), 0)?;
    let [offset_ns, round_trip_ns, is_same] = found[pairs.rank()];
    let measured = RoundTrip { offset_ns, round_trip_ns: round_trip_ns as u64 };
    let is_same_clock = is_same == 1;
    let (offset_ns, error_ns) =
        if is_same_clock { (0, 0) } else { (offset_ns, measured.error_ns()) };
    Ok(ClockOffset { offset_ns, error_ns, is_same_clock, measured })
}

/// The fastest of all exchanges with a peer, and the peer's clock: 1 if it is known and 0 if not, then its number.
fn ask(
    group: &Group,
    peer: usize,
    now: &impl Fn() -> i64,
) -> Result<(RoundTrip, [i64; 2]), CollectiveError> {
    let mut best: Option<RoundTrip> = None;
    let (question, reply) = (group.copy_of(&[0i64])?, group.copy_of(&[0i64; 4])?);
    for _ in 0..NUM_EXCHANGES {
        let t0 = now();
        group.send(&question, peer)?;
        group.recv(&reply, peer)?;
        let t3 = now();
        let times = reply.read::<i64>()?;
        let exchange = RoundTrip::new(t0, times[0], times[1], t3);
        if best.is_none_or(|best| exchange.round_trip_ns < best.round_trip_ns) {
            best = Some(exchange);
        }
    }
    let clock = reply.read::<i64>()?;
    Ok((best.unwrap_or_default(), [clock[2], clock[3]]))
}

fn answer(group: &Group, now: &impl Fn() -> i64, clock: Option<i64>) -> Result<()> {
    let (question, reply) = (group.copy_of(&[0i64])?, group.copy_of(&[0i64; 4])?);
    let [is_known, number] = [i64::from(clock.is_some()), clock.unwrap_or_default()];
    for _ in 0..NUM_EXCHANGES {
        group.recv(&question, 0)?;
        let t1 = now();
        reply.write()?.copy_from_slice(&[t1, now(), is_known, number]);
        group.send(&reply, 0)?;
    }
    Ok(())
}

/// A number that identifies the `CLOCK_MONOTONIC` of this process. The clock belongs to the kernel, and a time namespace
/// adds an offset to it, so both are part of the number. `None` if the system does not say.
fn clock_id() -> Option<i64> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = std::fs::read_link("/proc/self/ns/time").ok()?;
    let mut hasher = DefaultHasher::new();
    (kernel, namespace).hash(&mut hasher);
    Some(hasher.finish() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupOptions, Link};

    /// What each of `world` threads measures if the clock of rank `r` is `skew_ns * r` ahead.
    fn measured(world: usize, skew_ns: i64, clock: fn(usize) -> Option<i64>) -> Vec<ClockOffset> {
        std::thread::scope(|scope| {
            let ranks = Group::threads(world).into_iter().map(|group| {
                scope.spawn(move || {
                    let ahead_ns = skew_ns * group.rank() as i64;
                    let now = || now_ns() as i64 + ahead_ns;
                    measure(&group, now, clock(group.rank())).unwrap()
                })
            });
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_offset_of_a_clock_is_found_within_the_error() {
        for world in [1, 2, 4] {
            for (rank, found) in measured(world, 5_000_000_000, |_| None).iter().enumerate() {
                let true_ns = -5_000_000_000 * rank as i64;
                assert!(found.offset_ns.abs_diff(true_ns) <= found.error_ns, "{rank}: {found:?}");
                assert_eq!(found.is_same_clock, rank == 0);
            }
        }
    }

    #[test]
    fn one_clock_has_no_offset_but_the_messages_measure_one() {
        for found in measured(3, 0, |_| Some(7)) {
            assert_eq!((found.offset_ns, found.error_ns, found.is_same_clock), (0, 0, true));
            let measured = found.measured;
            assert!(measured.offset_ns.unsigned_abs() <= measured.error_ns(), "{measured:?}");
        }
    }

    #[test]
    fn clocks_are_the_same_only_where_both_say_so() {
        let same = |clock| measured(2, 0, clock)[1].is_same_clock;
        assert!(same(|_| Some(0)));
        assert!(!same(|rank| Some(rank as i64)));
        assert!(!same(|rank| (rank == 0).then_some(0)));
        assert!(!same(|rank| (rank == 1).then_some(0)));
    }

    #[test]
    fn threads_read_one_clock() {
        assert_eq!(clock_id(), std::thread::spawn(clock_id).join().unwrap());
        assert!(clock_id().is_some());
    }

    #[test]
    fn ways_of_different_length_err_within_half_the_round_trip() {
        // 100 there, 30 at the peer, 20 back; the peer's clock is 1000 ahead.
        let exchange = RoundTrip::new(0, 1100, 1130, 150);
        assert_eq!(exchange, RoundTrip { offset_ns: -1040, round_trip_ns: 120 });
        assert_eq!(exchange.error_ns(), 60);
    }

    #[test]
    fn the_sequence_of_the_group_stays_the_same_on_every_rank() {
        let link = Link { bytes_per_s: 1e6, latency_s: 0.2 };
        let seqs = std::thread::scope(|scope| {
            let groups = Group::threads_with(3, GroupOptions::for_local_ranks(3)).unwrap();
            let ranks = groups.into_iter().map(|group| {
                scope.spawn(move || {
                    // If the link delayed the messages, this would take half a minute.
                    group.set_emulator(link);
                    measure_clock(&group).unwrap();
                    let mut records = Vec::new();
                    group.fresh_records(&mut records);
                    records.last().unwrap().seq
                })
            });
            ranks.collect::<Vec<_>>().into_iter().map(|r| r.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(seqs, [seqs[0]; 3]);
    }
}
