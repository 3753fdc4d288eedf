//! Work as late as the program allows, in a drawn order.
//!
//! Work and the events that it waits for are a graph without circles, because work waits for earlier work only. A wait for an
//! event collects the work before it, and repeats: the seed draws one piece among those that are ready, and that one runs.

use std::sync::Mutex;

use paceline_trace::lock;

use super::event::{Event, EventState};
use super::work::QueuedWork;

/// The work that nobody has waited for.
pub(super) struct LateWork(Mutex<Unrun>);

struct Unrun {
    /// In the order of submission.
    queued: Vec<QueuedWork>,
    random: u64,
}

impl LateWork {
    pub(super) fn new(seed: u64) -> Self {
        // Any odd number; with zero, the generator would stay at zero.
        Self(Mutex::new(Unrun { queued: Vec::new(), random: seed.wrapping_mul(2) | 1 }))
    }

    pub(super) fn push(&self, work: QueuedWork) {
        lock(&self.0).queued.push(work);
    }

    /// Runs the work of `event` and all work before it.
    pub(super) fn run_before(&self, event: &Event, run: impl Fn(QueuedWork)) {
        loop {
            let mut unrun = lock(&self.0);
            let wanted = unrun.before(event);
            if wanted.is_empty() {
                return;
            }
            // Work of others, such as a collective, may itself wait for work of this device.
            let is_ours = |event: &Event| unrun.queued.iter().any(|own| own.event.is_same(event));
            let foreign = wanted.iter().flat_map(|at| &unrun.queued[*at].waits);
            let mut foreign = foreign.filter(|event| !is_ours(event) && is_pending(event));
            if let Some(event) = foreign.next().cloned() {
                drop(unrun);
                event.block();
                continue;
            }
            unrun.run(wanted, run);
            return;
        }
    }
}

fn is_pending(event: &Event) -> bool {
    event.peek() == EventState::Pending
}

impl Unrun {
    /// The indices of the work before an event, in ascending order.
    fn before(&self, event: &Event) -> Vec<usize> {
        let mut wanted = vec![false; self.queued.len()];
        let mut open: Vec<&Event> = vec![event];
        while let Some(event) = open.pop() {
            let Some(at) = self.queued.iter().position(|own| own.event.is_same(event)) else {
                continue;
            };
            if !std::mem::replace(&mut wanted[at], true) {
                open.extend(self.queued[at].waits.iter().chain(&self.queued[at].before));
            }
        }
        (0..wanted.len()).filter(|at| wanted[*at]).collect()
    }

    /// Runs this work in a drawn order.
    fn run(&mut self, wanted: Vec<usize>, run: impl Fn(QueuedWork)) {
        let mut left: Vec<QueuedWork> =
            wanted.into_iter().rev().map(|at| self.queued.remove(at)).collect();
        while !left.is_empty() {
            let is_ready = |work: &QueuedWork| {
                let mut before = work.waits.iter().chain(&work.before);
                before.all(|event| !is_pending(event))
            };
            let ready: Vec<usize> = (0..left.len()).filter(|at| is_ready(&left[*at])).collect();
            // Some work is ready, because work waits for earlier work only, which is done or still left.
            run(left.swap_remove(ready[self.draw(ready.len())]));
        }
    }

    /// A number below `limit`.
    fn draw(&mut self, limit: usize) -> usize {
        // Knuth's multiplier, as in MMIX.
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.random >> 33) as usize) % limit
    }
}
