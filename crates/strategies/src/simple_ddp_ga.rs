//! [`SimpleDdp`] with gradient accumulation: the ranks exchange gradients once in several batches.
//!
//! The gradients of all micro-batches of a step but the last stay where they are and add up; only after
//! the last one, which may come early at the end of an epoch, are they exchanged as `simple_ddp` does.
//! Every strategy can do that ([`Strategy::train_step`] is given micro-batches); this one is for it, and
//! accumulates [`SimpleDdpGa::ACCUMULATION`] batches where nothing else is asked for.
//!
//! Operations per step: one per parameter, so per batch a part of that. Bytes: likewise. Memory:
//! nothing beyond the gradients, but the inputs of all micro-batches of a step are there at once. It
//! wins over `simple_ddp` by its factor wherever communication shows, at the price of fewer and larger
//! optimizer steps.

use paceline_trace::SpanTrack;

use crate::{Exactness, Replica, Result, SimpleDdp, Strategy};

/// Exchanges gradients once per step of several micro-batches, one blocking all-reduce per parameter.
#[derive(Debug, Default)]
pub struct SimpleDdpGa;

impl SimpleDdpGa {
    /// Micro-batches of a step where no number is given.
    pub const ACCUMULATION: usize = 4;
}

impl Strategy for SimpleDdpGa {
    fn name(&self) -> &'static str {
        "simple_ddp_ga"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Exact
    }

    fn finish(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        SimpleDdp.finish(replica, track)
    }
}
