//! Computes when buckets are done if their gradients are ready at given times and the buckets travel one
//! after the other.
//!
//! Operations form a queue: each starts when its gradients are ready and the operation before it is done.
//! So the ready times of a run, together with the cost of messages on a link, tell how long other buckets
//! or another link would have taken. This module does not know where the ready times and costs come from.

use paceline_model::Layout;
use paceline_strategies::{Bucket, BucketCaps, plan_buckets};

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

/// A model's gradients, and when each of them is final.
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
}

/// Bytes of the sums of the loss, which travel before everything else.
pub const LOSS_BYTES: u64 = 16;

impl Backward<'_> {
    /// The buckets of `ddp` with these sizes: when each is ready, in milliseconds, and its bytes.
    pub fn buckets(&self, caps: BucketCaps) -> Vec<(f64, u64)> {
        let elem_bytes = size_of::<f32>();
        let of = |bucket: Bucket| {
            let ready = bucket.params.iter().map(|id| self.ready[id.0]).fold(0.0, f64::max);
            (ready, (bucket.range.len() * elem_bytes) as u64)
        };
        plan_buckets(self.layout, elem_bytes, caps).into_iter().map(of).collect()
    }

    /// The times of these buckets, if a message of `bytes` bytes takes `cost(bytes)` milliseconds.
    pub fn ddp(&self, caps: BucketCaps, cost: impl Fn(u64) -> f64) -> Vec<BucketTimes> {
        let buckets = self.buckets(caps).into_iter().map(|(ready, bytes)| (ready, cost(bytes)));
        queue(self.loss_done(&cost), buckets)
    }

    /// When the sums of the loss have left the link.
    pub fn loss_done(&self, cost: impl Fn(u64) -> f64) -> f64 {
        self.begin + cost(LOSS_BYTES)
    }

    /// Tries all pairs of sizes that are powers of two from 16 KiB to 1 GiB, and returns the pair with
    /// which `ddp` leaves the least communication exposed, and that exposed time in milliseconds. Among
    /// equals (within a thousandth of the time at which the backward pass ends), the largest sizes win,
    /// because they need the fewest operations.
    pub fn best_caps(&self, cost: impl Fn(u64) -> f64) -> (BucketCaps, f64) {
        let exposed_of = |caps| exposed(&self.ddp(caps, &cost), self.end);
        let sizes = || (14..=30).rev().map(|shift| 1usize << shift);
        let all = sizes().flat_map(|bytes| {
            let firsts = sizes().filter(move |first| *first <= bytes);
            firsts.map(move |first_bytes| BucketCaps { first_bytes, bytes })
        });
        let mut best: Option<(BucketCaps, f64)> = None;
        for caps in all {
            let exposed = exposed_of(caps);
            if best.is_none_or(|(_, least)| exposed < least - self.end * 1e-3) {
                best = Some((caps, exposed));
            }
        }
        best.unwrap_or((BucketCaps::new(25 << 20), 0.0))
    }
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
        let backward = Backward { layout: &layout, ready, begin: -100.0, end: 80.0 };
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
}
