//! Computes when buckets are done if their gradients are ready at given times and the buckets travel one
//! after the other.
//!
//! Operations form a queue: each starts when its gradients are ready and the operation before it is done. An operation that
//! the backward pass waits for, such as that of a synchronized batch norm, takes its turn in the queue too.
//! So the ready times of a run, together with the cost of messages on a link, tell how long other buckets
//! or another link would have taken. This module does not know where the ready times, buckets and costs come from.

/// Gradients that travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The numbers of its gradients, each an index into [`Backward::ready`].
    pub gradients: Vec<usize>,
    /// Size of the message in bytes.
    pub bytes: u64,
}

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

/// An operation for which the backward pass waits.
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
    /// How long the pass waits for operations.
    pub blocked: f64,
}

impl Played {
    /// The exposed communication: within the pass, and after it.
    pub fn exposed(&self) -> f64 {
        self.blocked + self.exposed_after()
    }

    /// The time from the end of the pass until the last bucket is done.
    fn exposed_after(&self) -> f64 {
        self.buckets.last().map_or(0.0, |last| (last.done - self.end).max(0.0))
    }

    /// The hidden communication: the time that buckets take before the end of the pass.
    pub fn hidden(&self) -> f64 {
        let before = |of: &BucketTimes| (of.done.min(self.end) - of.sent).max(0.0);
        self.buckets.iter().map(before).sum()
    }

    /// When the pass has ended and all buckets are there.
    pub fn finish(&self) -> f64 {
        self.end + self.exposed_after()
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

/// A rank's operation that a pass waited for: when the pass came to it, when it was done, and its bytes.
pub type Waited = (f64, f64, u64);

/// A backward pass, and when each gradient is final. Times do not contain the waits for `blocking`.
#[derive(Clone, Debug)]
pub struct Backward {
    /// When each gradient is final, in milliseconds since the step began, indexed by its number. Entries
    /// of gradients that no bucket has mean nothing.
    pub ready: Vec<f64>,
    /// The start of the backward pass, in milliseconds since the step began.
    pub begin: f64,
    /// The end of the backward pass, in milliseconds since the step began.
    pub end: f64,
    /// Bytes of a message that is sent as the pass begins, before all buckets: the sums of the loss, for example.
    pub opening_bytes: Option<u64>,
    /// The operations for which the pass waits, in order.
    pub blocking: Vec<Blocking>,
}

impl Backward {
    /// The backward pass of a rank, from when its gradients were final. The waits for `waited` are taken out of the times;
    /// waits before the pass do not count.
    pub fn new(
        mut ready: Vec<f64>,
        [begin, end]: [f64; 2],
        opening_bytes: Option<u64>,
        waited: &[Waited],
    ) -> Self {
        let within = || waited.iter().filter(|(at, ..)| *at >= begin);
        let waited = |until: f64| -> f64 {
            within().filter(|(_, done, _)| *done <= until).map(|(at, done, _)| done - at).sum()
        };
        ready.iter_mut().for_each(|at| *at -= waited(*at));
        let blocking =
            within().map(|(at, _, bytes)| Blocking { at: at - waited(*at), bytes: *bytes });
        let blocking = blocking.collect();
        Self { ready, begin, end: end - waited(end), opening_bytes, blocking }
    }

    /// Replays the pass with these buckets, in the order of sending. A message of `bytes` bytes takes `cost(bytes)`
    /// milliseconds.
    pub fn play(&self, plan: &[Bucket], cost: impl Fn(u64) -> f64) -> Played {
        self.play_with(plan, &cost, &cost, |_| 0.0)
    }

    /// The same, where a bucket of `bytes` bytes takes `bucket_cost(bytes)` milliseconds, and the pass takes `before(bytes)`
    /// milliseconds to prepare it.
    pub fn play_with(
        &self,
        plan: &[Bucket],
        cost: impl Fn(u64) -> f64,
        bucket_cost: impl Fn(u64) -> f64,
        before: impl Fn(u64) -> f64,
    ) -> Played {
        let mut free = self.opening_done(&cost);
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
        for Bucket { gradients, bytes } in plan {
            let bytes = *bytes;
            let ready = gradients.iter().map(|id| self.ready[*id]).fold(0.0, f64::max);
            last_ready = ready.max(last_ready);
            wait_until(last_ready, &mut free, &mut blocked, prepared);
            prepared += before(bytes);
            let ready = ready + blocked + prepared;
            let sent = free.max(ready);
            free = sent + bucket_cost(bytes);
            buckets.push(BucketTimes { ready, sent, done: free });
        }
        wait_until(f64::INFINITY, &mut free, &mut blocked, prepared);
        Played { buckets, end: self.end + blocked + prepared, blocked }
    }

    /// When the opening message has left the link.
    pub fn opening_done(&self, cost: impl Fn(u64) -> f64) -> f64 {
        self.begin + self.opening_bytes.map_or(0.0, cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    /// Buckets of `each` gradients of this size, from the last gradient to the first. The first bucket to be sent has `first`.
    fn plan(count: usize, bytes: u64, first: usize, each: usize) -> Vec<Bucket> {
        let mut left: Vec<usize> = (0..count).collect();
        let mut plan = Vec::new();
        while !left.is_empty() {
            let of = if plan.is_empty() { first } else { each };
            let gradients = left.split_off(left.len().saturating_sub(of));
            plan.push(Bucket { bytes: bytes * gradients.len() as u64, gradients });
        }
        plan
    }

    fn backward(ready: Vec<f64>, begin: f64, end: f64) -> Backward {
        Backward { ready, begin, end, opening_bytes: None, blocking: Vec::new() }
    }

    #[test]
    fn buckets_queue() {
        let costs = |bytes: u64| bytes as f64;
        let of = |id: usize, bytes: u64| Bucket { gradients: vec![id], bytes };
        let buckets = [of(0, 5), of(1, 1), of(2, 2)];
        let played = backward(vec![4.0, 6.0, 20.0], 0.0, 21.0).play(&buckets, costs);
        let done: Vec<f64> = played.buckets.iter().map(|bucket| bucket.done).collect();
        assert_eq!(done, [9.0, 10.0, 22.0]);
        assert_eq!(played.buckets[1], BucketTimes { ready: 6.0, sent: 9.0, done: 10.0 });
        assert_eq!((played.exposed(), played.hidden()), (1.0, 7.0));
        let played = Played { end: 30.0, ..played };
        assert_eq!((played.exposed(), played.finish()), (0.0, 30.0));
        assert_eq!(Played { end: 9.5, ..played }.hidden(), 5.5);
        // The link is busy with the opening message.
        let opening = Backward { opening_bytes: Some(7), ..backward(vec![4.0], 0.0, 1.0) };
        assert_eq!(opening.play(&buckets[..1], costs).buckets[0].sent, 7.0);
        assert_eq!(opening.play(&[], costs).exposed(), 0.0);
    }

    #[test]
    fn smaller_buckets_hide_more_until_latency_counts() {
        // Eight gradients of 1 MiB, one every 10 ms from the last to the first; 8 ms per MiB.
        let ready = (0..8).map(|at| 10.0 * f64::from(8 - at)).collect();
        let backward = backward(ready, -100.0, 80.0);
        let cost = |latency: f64| move |bytes: u64| latency + 8.0 * bytes as f64 / MB as f64;
        assert_eq!(backward.play(&plan(8, MB, 8, 8), cost(0.0)).exposed(), 64.0);
        assert_eq!(backward.play(&plan(8, MB, 1, 1), cost(0.0)).exposed(), 8.0);
        // With 40 ms each, eight operations take 384 ms, so fewer and larger ones win.
        let exposed = |each: usize| backward.play(&plan(8, MB, each, each), cost(40.0)).exposed();
        assert!(exposed(4) < exposed(1) && exposed(4) < 300.0, "{} {}", exposed(4), exposed(1));
    }

    #[test]
    fn the_pass_waits_for_operations_that_wait_for_buckets() {
        // Two gradients of 1 MiB, ready at 10 and 20 ms. 8 ms per MiB, and 2 ms for each operation.
        let cost = |bytes: u64| 2.0 + 8.0 * bytes as f64 / MB as f64;
        let without = backward(vec![20.0, 10.0], -100.0, 20.0);
        let blocking = vec![Blocking { at: 12.0, bytes: 0 }];
        let backward = Backward { blocking, ..without.clone() };
        let each = plan(2, MB, 1, 1);
        let played = backward.play(&each, cost);
        // The first bucket travels from 10 to 20, the statistics until 22: the pass waits from 12 on.
        assert_eq!(played.buckets[1], BucketTimes { ready: 30.0, sent: 30.0, done: 40.0 });
        assert_eq!((played.end, played.blocked, played.exposed()), (30.0, 10.0, 20.0));
        // In one bucket, the statistics have the link for themselves.
        let played = backward.play(&plan(2, MB, 2, 2), cost);
        assert_eq!((played.end, played.blocked, played.exposed()), (22.0, 2.0, 20.0));
        assert_eq!(without.play(&each, cost).exposed(), 10.0);
    }

    #[test]
    fn waits_are_taken_out_of_the_times() {
        // The forward pass waits from 3 to 8 ms, the backward pass from 22 to 28.
        let waited = [(3.0, 8.0, 0), (22.0, 28.0, 0)];
        let backward = Backward::new(vec![56.0, 46.0, 36.0, 20.0], [10.0, 56.0], None, &waited);
        assert_eq!(backward.ready, [50.0, 40.0, 30.0, 20.0]);
        assert_eq!((backward.begin, backward.end), (10.0, 50.0));
        assert_eq!(backward.blocking, [Blocking { at: 22.0, bytes: 0 }]);
    }

    #[test]
    fn converting_delays_what_comes_after_it() {
        let plan = plan(2, MB, 1, 1);
        let backward = backward(vec![20.0, 10.0], -100.0, 20.0);
        let played = backward.play_with(&plan, |_| 0.0, |_| 4.0, |_| 1.0);
        // Prepared from 10 to 11 and from 21 to 22; the pass ends 2 ms later.
        assert_eq!(played.buckets[1], BucketTimes { ready: 22.0, sent: 22.0, done: 26.0 });
        assert_eq!((played.end, played.finish()), (22.0, 26.0));
        // The first bucket is widened while the second one travels.
        assert_eq!(played.finish_after(plan.iter().map(|of| of.bytes), |_| 0.5), 26.5);
    }
}
