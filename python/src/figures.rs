//! What the operations of a group have done so far.
//!
//! Input: the times of operations that have ended. Output: sums for each kind of operation.

use std::collections::BTreeMap;
use std::sync::Mutex;

use paceline_collectives::OpTimes;
use paceline_trace::lock;

/// Calls, bytes, the seconds queued, waiting and moving, and the seconds of waiting for each rank that came last.
pub(crate) type Sums = (u64, u64, [f64; 3], BTreeMap<usize, f64>);

/// The sums of each kind of operation, by its name.
#[derive(Debug, Default)]
pub(crate) struct Figures(Mutex<BTreeMap<&'static str, Sums>>);

impl Figures {
    /// Counts an operation that has ended.
    pub(crate) fn count(&self, name: &'static str, bytes: usize, times: &OpTimes) {
        let seconds =
            [times.queue_ns(), times.wait_ns(), times.move_ns()].map(|ns| ns as f64 / 1e9);
        let mut all = lock(&self.0);
        let (calls, all_bytes, sums, waited_for) = all.entry(name).or_default();
        *calls += 1;
        *all_bytes += bytes as u64;
        sums.iter_mut().zip(seconds).for_each(|(sum, seconds)| *sum += seconds);
        if let Some(rank) = times.slowest {
            *waited_for.entry(rank).or_default() += seconds[1];
        }
    }

    pub(crate) fn all(&self) -> BTreeMap<&'static str, Sums> {
        lock(&self.0).clone()
    }
}
