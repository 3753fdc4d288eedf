//! Which gradients a training step has written, and which of them are final.
//!
//! A step has one pass per micro-batch, and in each pass every layer that holds a parameter uses it once. The first
//! use overwrites the gradient, and all other uses add to it. After the last use in a pass, the gradient is final for
//! that pass. This file does not know the values of gradients.

use crate::{Layout, ParamId, UnitId};

/// Records which gradients have been written, and which uses remain in the current pass.
#[derive(Clone, Debug, Default)]
pub struct GradReadiness {
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    unit: UnitId,
    num_uses: u32,
    /// Uses that remain in the current pass.
    num_left: u32,
    is_written: bool,
}

impl GradReadiness {
    /// The state of a step in which nothing has been written. Frozen parameters are not tracked.
    pub fn new(layout: &Layout) -> Self {
        let entry = |param: &crate::Param| {
            let num_uses = if param.is_frozen { 0 } else { param.num_uses };
            Entry { unit: param.unit, num_uses, num_left: num_uses, is_written: false }
        };
        Self { entries: layout.params().iter().map(entry).collect() }
    }

    /// Begins a step: the next use of each gradient overwrites it.
    pub fn start_over(&mut self) {
        for entry in &mut self.entries {
            entry.is_written = false;
        }
    }

    /// The next use of each gradient of one unit overwrites it, because the unit has a new place in memory.
    pub(crate) fn start_unit_over(&mut self, unit: UnitId) {
        for entry in self.entries.iter_mut().filter(|entry| entry.unit == unit) {
            entry.is_written = false;
        }
    }

    /// Begins the pass of a new micro-batch, in which all uses remain.
    pub fn begin_pass(&mut self) {
        for entry in &mut self.entries {
            entry.num_left = entry.num_uses;
        }
    }

    /// Whether a gradient has been written since the step, or its unit, has started again.
    pub fn is_written(&self, id: ParamId) -> bool {
        self.entries[id.0].is_written
    }

    /// Records one use. Returns whether it was the last use in this pass. Errors if no use was left.
    pub(crate) fn write(&mut self, id: ParamId) -> Result<bool, &'static str> {
        let entry = &mut self.entries[id.0];
        entry.num_left = entry.num_left.checked_sub(1).ok_or("more often than it is used")?;
        entry.is_written = true;
        Ok(entry.num_left == 0)
    }

    /// The parameters whose gradients are not final in the current pass.
    pub fn unfinished(&self) -> impl Iterator<Item = ParamId> {
        let entries = self.entries.iter().enumerate();
        entries.filter(|(_, entry)| entry.num_left > 0).map(|(at, _)| ParamId(at))
    }
}
