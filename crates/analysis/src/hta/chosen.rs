//! Which steps and collectives of a trace are analyzed.
//!
//! Input: a timeline and options. Output: the choice from which the rank's figures were computed. An analysis
//! across ranks that uses the same choice covers the same events, so its sums agree with the rank's row.

use foldhash::HashMap;

use super::kernels::KernelKind;
use super::steps::{self, Window};
use super::{Options, Step, work};
use crate::timeline::{Kernel, Timeline};

/// The part of a trace that is analyzed.
pub(crate) struct Chosen {
    /// Sorted by start; empty if the trace names no steps and is analyzed as a whole.
    pub(crate) steps: Vec<Step>,
    window: Window,
    /// When the host began to launch each analyzed communication kernel, by the kernel's index. `None` if all
    /// kernels are analyzed, whatever launched them.
    launched_ns: Option<HashMap<u32, i64>>,
}

impl Chosen {
    /// The choice that the analysis of the rank makes.
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
        Self { steps: crate::steps::of(timeline), window: Window(None), launched_ns: None }
    }

    /// When the host began to launch a communication kernel, or the kernel's own start if the launch is not
    /// known or the whole trace is chosen. `index` is the index of `kernel`. `None` if the kernel is not
    /// analyzed.
    pub(crate) fn kernel(&self, index: u32, kernel: &Kernel) -> Option<i64> {
        match &self.launched_ns {
            None => Some(kernel.time.start_ns),
            Some(launched_ns) => launched_ns.get(&index).copied(),
        }
    }

    /// Whether work that the host began at this time is analyzed.
    pub(crate) fn holds(&self, start_ns: i64) -> bool {
        self.window.holds(start_ns)
    }
}
