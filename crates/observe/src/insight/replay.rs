//! Computes when buckets are done if their gradients are ready at given times and the buckets travel one
//! after the other.
//!
//! Operations form a queue: each starts when its gradients are ready and the operation before it is done. A
//! synchronized batch norm takes its turn in the queue too, and the backward pass waits for it.
//! So the ready times of a run, together with the cost of messages on a link, tell how long other buckets
//! or another link would have taken. This module does not know where the ready times and costs come from.

use paceline_model::Layout;
use paceline_strategies::{Bucket, BucketCaps, SHARED_SUMS_BYTES, plan_buckets};

/// Times of one bucket in milliseconds since the step began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BucketTimes {
    /// When its gradients are final.
    pub ready: f64,
    /// When its operation starts.
    pub sent: f64,
    /// When its operation is done.
    pub done: f64,
}

/// The times of buckets on a link that is busy until `free`. For each bucket, `buckets` has the time at
/// which it is ready, and its cost. All times are in milliseconds.
pub fn queue(mut free: f64, buckets: impl IntoIterator<Item = (f64, f64)>) -> Vec<BucketTimes> {
    let times = |(ready, cost): (f64, f64)| {
        let sent = free.max(ready);
        free = sent + cost;
        BucketTimes { ready, sent, done: free }
    };
    buckets.into_iter().map(times).collect()
}

/// The exposed communication: the time from `end`, the end of the backward pass, until the last bucket is
/// done.
pub fn exposed(buckets: &[BucketTimes], end: f64) -> f64 {
    buckets.last().map_or(0.0, |last| (last.done - end).max(0.0))
}

/// The hidden communication: the time that operations take before `end`.
pub fn hidden(buckets: &[BucketTimes], end: f64) -> f64 {
    buckets.iter().map(|bucket| (bucket.done.min(end) - bucket.sent).max(0.0)).sum()
}

/// An operation for which the backward pass waits: the sums of a synchronized batch norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Blocking {
    /// When the pass comes to it, in milliseconds since the step began, without the waits for those before it.
    pub at: f64,
    /// Size of the message in bytes.
    pub bytes: u64,
}

/// A backward pass as replayed.
#[derive(Clone, Debug, PartialEq)]
pub struct Played {
    /// The buckets, in order.
    pub buckets: Vec<BucketTimes>,
    /// The end of the pass.
    pub end: f64,
    /// For how long the pass waits for operations.
    pub blocked: f64,
    /// For how long it prepares buckets for sending.
    pub prepared: f64,
}

impl Played {
    /// The exposed communication: within the pass, and after it.
    pub fn exposed(&self) -> f64 {
        self.blocked + exposed(&self.buckets, self.end)
    }

    /// When the pass has ended and all buckets are there.
    pub fn finish(&self) -> f64 {
        self.end + exposed(&self.buckets, self.end)
    }

    /// The same, if each bucket of `bytes` bytes takes `after(bytes)` milliseconds more once it has arrived, one after the
    /// other.
    pub fn finish_after(
        &self,
        bytes: impl Iterator<Item = u64>,
        after: impl Fn(u64) -> f64,
    ) -> f64 {
        let arrived = self.buckets.iter().zip(bytes);
        arrived.fold(self.end, |now, (bucket, bytes)| now.max(bucket.done) + after(bytes))
    }
}

/// A model's gradients, and when each of them is final. Times do not contain the waits for `blocking`.
#[derive(Clone, Debug)]
pub struct Backward<'a> {
    /// Where the gradients lie.
    pub layout: &'a Layout,
    /// When each gradient is final, in milliseconds since the step began, indexed by parameter. Entries
    /// of frozen parameters have no meaning.
    pub ready: Vec<f64>,
    /// The begin of the backward pass, when the sums of the loss are sent, in milliseconds since the step
    /// began.
    pub begin: f64,
    /// The end of the backward pass, in milliseconds since the step began.
    pub end: f64,
    /// The operations for which the pass waits, in order.
    pub blocking: Vec<Blocking>,
}

/// Bytes of the sums of the loss, which travel before everything else.
pub const LOSS_BYTES: u64 = SHARED_SUMS_BYTES as u64;

impl Backward<'_> {
    /// The buckets of `ddp` with these sizes, in the order of sending.
    pub fn plan(&self, caps: BucketCaps) -> Vec<Bucket> {
        plan_buckets(self.layout, ELEM_BYTES, caps)
    }

    /// When each of these buckets is ready, in milliseconds, and its bytes.
    fn of_plan(&self, plan: &[Bucket]) -> impl Iterator<Item = (f64, u64)> {
        plan.iter().map(|bucket| {
            let ready = bucket.params.iter().map(|id| self.ready[id.0]).fold(0.0, f64::max);
            (ready, bytes_of(bucket))
        })
    }

    /// The buckets of `ddp` with these sizes: when each is ready, in milliseconds, and its bytes.
    pub fn buckets(&self, caps: BucketCaps) -> Vec<(f64, u64)> {
        self.of_plan(&self.plan(caps)).collect()
    }

    /// The times of these buckets, if a message of `bytes` bytes takes `cost(bytes)` milliseconds.
    pub fn ddp(&self, caps: BucketCaps, cost: impl Fn(u64) -> f64) -> Vec<BucketTimes> {
        self.play(caps, cost).buckets
    }

    /// Replays the pass with buckets of these sizes. A message of `bytes` bytes takes `cost(bytes)` milliseconds.
    pub fn play(&self, caps: BucketCaps, cost: impl Fn(u64) -> f64) -> Played {
        self.play_plan(&self.plan(caps), &cost, &cost, |_| 0.0)
    }

    /// Replays the pass with these buckets. A message of `bytes` bytes takes `cost(bytes)` milliseconds, a bucket of so
    /// many bytes `bucket_cost(bytes)`. The pass takes `before(bytes)` milliseconds to prepare the bucket.
    pub fn play_plan(
        &self,
        plan: &[Bucket],
        cost: impl Fn(u64) -> f64,
        bucket_cost: impl Fn(u64) -> f64,
        before: impl Fn(u64) -> f64,
    ) -> Played {
        let mut free = self.loss_done(&cost);
        // By how much the pass is late: it has waited for operations, and prepared buckets.
        let (mut blocked, mut prepared) = (0.0, 0.0);
        let mut blocking = self.blocking.iter().peekable();
        let mut wait_until = |at: f64, free: &mut f64, blocked: &mut f64, prepared: f64| {
            while let Some(of) = blocking.next_if(|of| of.at <= at) {
                let here = of.at + *blocked + prepared;
                *free = free.max(here) + cost(of.bytes);
                *blocked += *free - here;
            }
        };
        let mut buckets = Vec::new();
        // Buckets are sent in order, so one that is ready early waits for those before it.
        let mut last_ready = f64::NEG_INFINITY;
        for (ready, bytes) in self.of_plan(plan) {
            last_ready = ready.max(last_ready);
            wait_until(last_ready, &mut free, &mut blocked, prepared);
            prepared += before(bytes);
            let ready = ready + blocked + prepared;
            let sent = free.max(ready);
            free = sent + bucket_cost(bytes);
            buckets.push(BucketTimes { ready, sent, done: free });
        }
        wait_until(f64::INFINITY, &mut free, &mut blocked, prepared);
        Played { buckets, end: self.end + blocked + prepared, blocked, prepared }
    }

    /// When the sums of the loss have left the link.
    pub fn loss_done(&self, cost: impl Fn(u64) -> f64) -> f64 {
        self.begin + cost(LOSS_BYTES)
    }

    /// Tries all pairs of [`sizes`], and returns the pair with which `ddp` leaves the least communication exposed, and
    /// that exposed time in milliseconds. Only among equals, the largest sizes win, because they need the fewest
    /// operations. A pair that is nearly as good never wins: then a cost that is nowhere lower could have a better result.
    pub fn best_caps(&self, cost: impl Fn(u64) -> f64) -> (BucketCaps, f64) {
        let of = |caps| (caps, self.play(caps, &cost).exposed());
        // Times are in milliseconds, so this only keeps rounding from making a difference.
        let equal = self.end.abs() * 1e-12;
        let best = sizes().map(of).reduce(|best, of| if of.1 < best.1 - equal { of } else { best });
        best.unwrap_or((BucketCaps::new(25 << 20), 0.0))
    }
}

/// All pairs of sizes that are powers of two from 16 KiB to 1 GiB, the largest first.
pub fn sizes() -> impl Iterator<Item = BucketCaps> {
    let sizes = || (14..=30).rev().map(|shift| 1usize << shift);
    sizes().flat_map(move |bytes| {
        let firsts = sizes().filter(move |first| *first <= bytes);
        firsts.map(move |first_bytes| BucketCaps { first_bytes, bytes })
    })
}

/// Bytes of a gradient.
const ELEM_BYTES: usize = size_of::<f32>();

/// Bytes of a bucket.
pub fn bytes_of(bucket: &Bucket) -> u64 {
    (bucket.range.len() * ELEM_BYTES) as u64
}

#[cfg(test)]
mod tests {
    use paceline_model::{Init, LayoutBuilder};

    use super::*;

    #[test]
    fn buckets_queue() {
        let times = queue(0.0, [(4.0, 5.0), (6.0, 1.0), (20.0, 2.0)]);
        let done: Vec<f64> = times.iter().map(|bucket| bucket.done).collect();
        assert_eq!(done, [9.0, 10.0, 22.0]);
        assert_eq!(times[1], BucketTimes { ready: 6.0, sent: 9.0, done: 10.0 });
        assert_eq!(queue(7.0, [(4.0, 5.0)])[0].sent, 7.0);
        assert_eq!((exposed(&times, 21.0), exposed(&times, 30.0)), (1.0, 0.0));
        assert_eq!(exposed(&[], 1.0), 0.0);
        assert_eq!((hidden(&times, 21.0), hidden(&times, 9.5)), (7.0, 5.5));
    }

    #[test]
    fn smaller_buckets_hide_more_until_latency_counts() {
        let mut builder = LayoutBuilder::new();
        for at in 0..8 {
            builder.unit(format!("u{at}"));
            builder.param("weight", [1 << 18], Init::Constant(0.0));
        }
        let layout = builder.finish(1);
        // Eight gradients of 1 MiB, one every 10 ms from the last to the first; 8 ms per MiB.
        let ready = (0..8).map(|at| 10.0 * f64::from(8 - at)).collect();
        let backward =
            Backward { layout: &layout, ready, begin: -100.0, end: 80.0, blocking: Vec::new() };
        let cost = |latency: f64| move |bytes: u64| latency + 8.0 * bytes as f64 / 1048576.0;
        let all = BucketCaps { first_bytes: 8 << 20, bytes: 8 << 20 };
        assert_eq!(exposed(&backward.ddp(all, cost(0.0)), 80.0), 64.0);
        let each = BucketCaps { first_bytes: 1 << 20, bytes: 1 << 20 };
        assert_eq!(exposed(&backward.ddp(each, cost(0.0)), 80.0), 8.0);
        assert_eq!(backward.best_caps(cost(0.0)), (each, 8.0));
        // With 40 ms each, eight operations take 384 ms, so fewer and larger ones win.
        let (caps, least) = backward.best_caps(cost(40.0));
        assert!(caps.bytes > 1 << 20 && least < 300.0, "{caps:?}: {least}");
    }

    #[test]
    fn the_pass_waits_for_statistics_that_wait_for_buckets() {
        let mut builder = LayoutBuilder::new();
        for at in 0..2 {
            builder.unit(format!("u{at}"));
            builder.param("weight", [1 << 18], Init::Constant(0.0));
        }
        let layout = builder.finish(1);
        // Two gradients of 1 MiB, ready at 10 and 20 ms. 8 ms per MiB, and 2 ms for each operation.
        let cost = |bytes: u64| 2.0 + 8.0 * bytes as f64 / 1048576.0;
        let blocking = vec![Blocking { at: 12.0, bytes: 0 }];
        let ready = vec![20.0, 10.0];
        let backward = Backward { layout: &layout, ready, begin: -100.0, end: 20.0, blocking };
        let each = BucketCaps { first_bytes: 1 << 20, bytes: 1 << 20 };
        let played = backward.play(each, cost);
        // The first bucket travels from 10 to 20, the statistics until 22: the pass waits from 12 on.
        assert_eq!(played.buckets[1], BucketTimes { ready: 30.0, sent: 30.0, done: 40.0 });
        assert_eq!((played.end, played.blocked, played.exposed()), (30.0, 10.0, 20.0));
        // In one bucket, the statistics have the link for themselves.
        let all = BucketCaps { first_bytes: 2 << 20, bytes: 2 << 20 };
        let played = backward.play(all, cost);
        assert_eq!((played.end, played.blocked, played.exposed()), (22.0, 2.0, 20.0));
        let without = Backward { blocking: Vec::new(), ..backward };
        assert_eq!(without.play(each, cost).exposed(), 10.0);
    }

    #[test]
    fn the_best_sizes_are_never_better_where_operations_cost_more() {
        let mut builder = LayoutBuilder::new();
        for at in 0..128 {
            builder.unit(format!("u{at}"));
            builder.param("weight", [1 << 16], Init::Constant(0.0));
        }
        let layout = builder.finish(1);
        let ready = (0..128).map(|at| 60.0 + f64::from(128 - at)).collect();
        let backward =
            Backward { layout: &layout, ready, begin: 60.0, end: 188.0, blocking: Vec::new() };
        // More ranks move more bytes and headers: 2 (n-1)/n of the message.
        let least = |ranks: f64| {
            let cost = move |bytes: u64| {
                0.015 + (88.0 * (ranks - 1.0) + 2.0 * (ranks - 1.0) / ranks * bytes as f64) / 12.5e6
            };
            backward.best_caps(cost).1
        };
        let all: Vec<f64> = [2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0].map(least).into();
        assert!(all.is_sorted(), "{all:?}");
    }

    #[test]
    fn converting_delays_what_comes_after_it() {
        let mut builder = LayoutBuilder::new();
        for at in 0..2 {
            builder.unit(format!("u{at}"));
            builder.param("weight", [1 << 18], Init::Constant(0.0));
        }
        let layout = builder.finish(1);
        let backward = Backward {
            layout: &layout,
            ready: vec![20.0, 10.0],
            begin: -100.0,
            end: 20.0,
            blocking: Vec::new(),
        };
        let plan = backward.plan(BucketCaps { first_bytes: 1 << 20, bytes: 1 << 20 });
        let played = backward.play_plan(&plan, |_| 0.0, |_| 4.0, |_| 1.0);
        // Prepared from 10 to 11 and from 21 to 22; the pass ends 2 ms later.
        assert_eq!(played.buckets[1], BucketTimes { ready: 22.0, sent: 22.0, done: 26.0 });
        assert_eq!((played.end, played.prepared, played.finish()), (22.0, 2.0, 26.0));
        // The first bucket is widened while the second one travels.
        assert_eq!(played.finish_after(plan.iter().map(bytes_of), |_| 0.5), 26.5);
    }
}
