//! The books of a step: which gradients have been written, and which are final.
//!
//! A step has one pass per micro-batch, and a pass one use of a parameter per layer that holds it. The
//! first of all these overwrites the gradient, the others add to it; after the last use of a pass it
//! is final as far as that pass goes. The books know no values.

use crate::{Layout, ParamId};

/// Which gradients have been written in a step, and which uses of the current pass are ahead.
#[derive(Clone, Debug, Default)]
pub struct GradientBooks {
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    num_uses: u32,
    /// Uses in the current pass that are ahead.
    num_left: u32,
    is_written: bool,
}

impl GradientBooks {
    /// The books of a step in which nothing has been written. Frozen parameters are no matter of
    /// theirs.
    pub fn new(layout: &Layout) -> Self {
        let entry = |param: &crate::Param| {
            let num_uses = if param.is_frozen { 0 } else { param.num_uses };
            Entry { num_uses, num_left: num_uses, is_written: false }
        };
        Self { entries: layout.params().iter().map(entry).collect() }
    }

    /// A new step: gradients are overwritten.
    pub fn begin_step(&mut self) {
        for entry in &mut self.entries {
            entry.is_written = false;
        }
    }

    /// A new micro-batch: all uses are ahead.
    pub(crate) fn begin_pass(&mut self) {
        for entry in &mut self.entries {
            entry.num_left = entry.num_uses;
        }
    }

    /// Whether there is something in a gradient that this step has written.
    pub fn is_written(&self, id: ParamId) -> bool {
        self.entries[id.0].is_written
    }

    /// Enters a use; whether it was the last one. An error if there was none left.
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
