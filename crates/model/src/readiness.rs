//! Which gradients a training step has written, and which of them are final.
//!
//! A step has one pass per micro-batch, and in each pass every layer that holds a parameter uses it once. The first
//! use overwrites the gradient, and all others add to it. After the last use of the step the gradient is final, in
//! any order of the passes; or after the last use of each pass, if each is reduced.
//! This file does not know the values of gradients.

use crate::{Layout, ParamId, UnitId};

/// Records which gradients have been written, and which uses remain.
#[derive(Clone, Debug, Default)]
pub struct GradReadiness {
    entries: Vec<ParamUses>,
}

#[derive(Clone, Copy, Debug)]
struct ParamUses {
    unit: UnitId,
    /// Uses in a pass.
    num_uses: u32,
    /// Uses that remain before the gradient is final.
    num_left: u32,
    /// Whether the gradient is final after each pass.
    is_of_pass: bool,
    is_root: bool,
    is_written: bool,
}

impl GradReadiness {
    /// Nothing has been written, and a single pass follows. Frozen parameters are not tracked.
    pub fn new(layout: &Layout) -> Self {
        let entry = |param: &crate::Param| {
            let is_here = !param.is_frozen && !param.is_elsewhere;
            let num_uses = if is_here { param.num_uses } else { 0 };
            let (unit, is_root) = (param.unit, layout.unit(param.unit).is_root);
            ParamUses {
                unit,
                num_uses,
                num_left: num_uses,
                is_of_pass: true,
                is_root,
                is_written: false,
            }
        };
        Self { entries: layout.params().iter().map(entry).collect() }
    }

    /// Begins a step of `num_passes` passes: the next use of each gradient overwrites it. If `each_pass`, the gradients of
    /// all units but roots are final after each pass.
    pub fn begin_step(&mut self, num_passes: usize, each_pass: bool) {
        for entry in &mut self.entries {
            entry.is_of_pass = each_pass && !entry.is_root;
            let passes = if entry.is_of_pass { 0 } else { num_passes as u32 };
            entry.num_left = entry.num_uses * passes;
            entry.is_written = false;
        }
    }

    /// Says whether the next use of a gradient adds to it or overwrites it, after it was put aside or
    /// brought back.
    pub fn set_written(&mut self, id: ParamId, is_written: bool) {
        self.entries[id.0].is_written = is_written;
    }

    /// The next use of each gradient of one unit overwrites it, because the unit is in other memory now.
    pub(crate) fn start_unit_over(&mut self, unit: UnitId) {
        for entry in self.entries.iter_mut().filter(|entry| entry.unit == unit) {
            entry.is_written = false;
        }
    }

    /// Begins the pass of a new micro-batch through some units, in which all uses of a pass remain.
    pub fn begin_pass(&mut self, is_of_pass: impl Fn(UnitId) -> bool) {
        let is_meant = |entry: &&mut ParamUses| entry.is_of_pass && is_of_pass(entry.unit);
        for entry in self.entries.iter_mut().filter(is_meant) {
            entry.num_left = entry.num_uses;
        }
    }

    /// Whether a gradient has been written since the step, or its unit, started.
    pub fn is_written(&self, id: ParamId) -> bool {
        self.entries[id.0].is_written
    }

    /// Records one use. Returns whether the gradient is final now. Errors if no use was left.
    pub(crate) fn write(&mut self, id: ParamId) -> Result<bool, &'static str> {
        let entry = &mut self.entries[id.0];
        entry.num_left = entry.num_left.checked_sub(1).ok_or("more often than it is used")?;
        entry.is_written = true;
        Ok(entry.num_left == 0)
    }

    /// The parameters whose gradients should be final at the end of a pass, or of the step after the last pass, and are not.
    pub fn unfinished(&self, is_last: bool) -> impl Iterator<Item = ParamId> {
        let entries = self.entries.iter().enumerate();
        let is_meant = move |entry: &ParamUses| entry.num_left > 0 && (is_last || entry.is_of_pass);
        entries.filter(move |(_, entry)| is_meant(entry)).map(|(at, _)| ParamId(at))
    }
}
