//! [`SimpleDdp`] with gradient accumulation: the ranks exchange gradients once for several batches.
//!
//! The gradients of the micro-batches of a step are summed in place on each rank. They are exchanged, like in
//! `simple_ddp`, only after the last micro-batch; at the end of an epoch a step may have fewer micro-batches.
//! Every strategy can accumulate ([`train_step`](crate::train_step) takes several micro-batches). This one does so by
//! default, over [`SimpleDdpGa::ACCUMULATION`] batches.
//!
//! Operations per step: one per parameter. Per batch there are fewer operations and bytes, by the factor of
//! accumulation.
//! Memory: nothing beyond the gradients, but the inputs of all micro-batches of a step are in memory at once.
//! Communication takes less time than in `simple_ddp` by the factor of accumulation, at the price of fewer
//! and larger optimizer steps.

use paceline_collectives::MeshShape;

use crate::{Exactness, Result, SimpleDdp, StepContext, Strategy};

/// Exchanges gradients once per step of several micro-batches, one blocking all-reduce per parameter.
#[derive(Debug, Default)]
pub struct SimpleDdpGa;

impl SimpleDdpGa {
    /// The default number of micro-batches of a step.
    pub const ACCUMULATION: usize = 4;
}

impl Strategy for SimpleDdpGa {
    fn name(&self) -> &'static str {
        "simple_ddp_ga"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact
    }

    fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        SimpleDdp.finish_gradients(cx)
    }
}
