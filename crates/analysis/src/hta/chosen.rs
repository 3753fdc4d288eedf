//! Which steps and collectives of a trace are analysed.
//!
//! A timeline and options go in. The choice by which the figures of the rank were computed comes out, so that an
//! analysis across ranks covers the same events and its sums agree with the rank's row.

use std::collections::HashMap;

use super::kernels::KernelKind;
use super::steps::{self, Window};
use super::{Options, Step, work};
use crate::timeline::{Kernel, Timeline};

/// What of a trace is looked at.
pub(crate) struct Chosen {
    /// Sorted by begin; empty where the trace names none, and is looked at as a whole.
    pub(crate) steps: Vec<Step>,
    window: Window,
    /// Of kernels that communicate and are looked at, by index: when the host began to launch them. `None`
    /// where all are looked at, whatever launched them.
    launched_ns: Option<HashMap<u32, i64>>,
}

impl Chosen {
    /// What the analysis looks at.
    pub(crate) fn of(timeline: &Timeline, options: &Options) -> Self {
        let (steps, window) = steps::choose(timeline, options);
        let items = work::chosen_kernels(timeline, options, window).items;
        let communicate = items
            .into_iter()
            .filter(|item| item.collective.is_some() || item.kind == KernelKind::Communication);
        let launched = |item: work::Item| {
            let call = item.launch.map(|launch| timeline.launches[launch as usize].time.start_ns);
            (item.kernel, call.unwrap_or(item.start_ns))
        };
        let launched_ns = Some(communicate.map(launched).collect());
        Self { steps: steps.chosen, window, launched_ns }
    }

    /// The whole trace.
    pub(crate) fn everything(timeline: &Timeline) -> Self {
        Self { steps: crate::steps::of(timeline), window: Window::All, launched_ns: None }
    }

    /// When the host began to launch a kernel that communicates, given with its index, if that is known and
    /// else its own begin; `None` where it is not looked at.
    pub(crate) fn kernel(&self, index: u32, kernel: &Kernel) -> Option<i64> {
        match &self.launched_ns {
            None => Some(kernel.time.start_ns),
            Some(launched_ns) => launched_ns.get(&index).copied(),
        }
    }

    /// Whether what the host began at a moment is looked at.
    pub(crate) fn holds(&self, start_ns: i64) -> bool {
        self.window.holds(start_ns)
    }
}
