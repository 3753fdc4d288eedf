//! Work as late as the program allows, in a drawn order.
//!
//! Tasks and what they wait for are a graph without circles, because each waits for earlier ones only. A wait for an event
//! collects the tasks before it, and runs one that is ready after the other; the seed draws which.

use std::sync::Mutex;

use super::{Accelerator, Task, lock};
use crate::event::{Event, EventState};

/// The work that nobody has waited for.
pub(super) struct Late(Mutex<State>);

struct State {
    /// In the order in which they were put into their streams.
    tasks: Vec<Task>,
    random: u64,
}

impl Late {
    pub(super) fn new(seed: u64) -> Self {
        // Any odd number; with zero, the generator would stay at zero.
        Self(Mutex::new(State { tasks: Vec::new(), random: seed.wrapping_mul(2) | 1 }))
    }

    pub(super) fn push(&self, task: Task) {
        lock(&self.0).tasks.push(task);
    }

    /// Runs the work of `event` and all that comes before it.
    pub(super) fn run_before(&self, sim: &Accelerator, event: &Event) {
        loop {
            let mut state = lock(&self.0);
            let wanted = state.before(event);
            if wanted.is_empty() {
                return;
            }
            // Work of others, such as a collective, may itself wait for work of this device.
            let is_ours = |event: &Event| state.tasks.iter().any(|task| task.event.is_same(event));
            let foreign = wanted.iter().flat_map(|at| &state.tasks[*at].waits);
            let mut foreign = foreign.filter(|event| !is_ours(event) && is_pending(event));
            if let Some(event) = foreign.next().cloned() {
                drop(state);
                event.block();
                continue;
            }
            state.run(sim, wanted);
            return;
        }
    }
}

fn is_pending(event: &Event) -> bool {
    event.peek() == EventState::Pending
}

impl State {
    /// The places of the tasks that come before an event, in ascending order.
    fn before(&self, event: &Event) -> Vec<usize> {
        let mut wanted = vec![false; self.tasks.len()];
        let mut open: Vec<&Event> = vec![event];
        while let Some(event) = open.pop() {
            let Some(at) = self.tasks.iter().position(|task| task.event.is_same(event)) else {
                continue;
            };
            if !std::mem::replace(&mut wanted[at], true) {
                open.extend(self.tasks[at].waits.iter().chain(&self.tasks[at].before));
            }
        }
        (0..wanted.len()).filter(|at| wanted[*at]).collect()
    }

    /// Runs these tasks in a drawn order.
    fn run(&mut self, sim: &Accelerator, wanted: Vec<usize>) {
        let mut left: Vec<Task> =
            wanted.into_iter().rev().map(|at| self.tasks.remove(at)).collect();
        while !left.is_empty() {
            let is_ready = |task: &Task| {
                let mut before = task.waits.iter().chain(&task.before);
                before.all(|event| !is_pending(event))
            };
            let ready: Vec<usize> = (0..left.len()).filter(|at| is_ready(&left[*at])).collect();
            let Some(&at) = ready.get(self.draw(ready.len())) else {
                unreachable!(
                    "a task waits for earlier ones only, and these are done or among the rest"
                )
            };
            sim.run(left.swap_remove(at));
        }
    }

    /// A number below `limit`.
    fn draw(&mut self, limit: usize) -> usize {
        // Knuth's multiplier, as in MMIX.
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.random >> 33) as usize) % limit.max(1)
    }
}
