//! A forward pass without a backward pass.

use paceline_memory::Tensor;
use paceline_model::{Batch, Context, Layer, OpenUnits, ParamId, PassHooks, Storage, UnitId, View};
use paceline_trace::SpanTrack;

use crate::{Replica, Result, Strategy};

/// Adds the objective's sums over this rank's share of a batch to `sums`: f64 (3), see
/// [`Objective`](paceline_model::Objective). Computes no gradients. All ranks call this together.
pub fn evaluate(
    strategy: &mut dyn Strategy,
    replica: &Replica,
    batch: &Batch,
    sums: &Tensor,
    track: &mut SpanTrack,
) -> Result<()> {
    let Replica { model, compute, storage, .. } = replica;
    let mut units = OpenUnits::new(&model.layout);
    let mut hooks = Hooks { strategy, replica, track };
    let mut cx = Context::evaluation(compute, storage, &mut units, &mut hooks).with_batch(batch);
    cx.open_roots()?;
    let (output, _) = model.network().forward(&mut cx, batch.inputs().clone())?;
    model.evaluate(&mut cx, &output, sums)?;
    Ok(cx.close_roots()?)
}

/// Lets the strategy open and close units.
struct Hooks<'a> {
    strategy: &'a mut dyn Strategy,
    replica: &'a Replica,
    track: &'a mut SpanTrack,
}

impl PassHooks for Hooks<'_> {
    fn pre_forward(&mut self, _: &Storage, unit: UnitId) -> paceline_model::Result<View> {
        Ok(self.strategy.pre_forward(self.replica, self.track, unit)?)
    }

    fn post_forward(&mut self, unit: UnitId) -> paceline_model::Result<()> {
        Ok(self.strategy.post_forward(self.replica, self.track, unit)?)
    }

    fn gradient_ready(&mut self, _: ParamId) -> paceline_model::Result<()> {
        Ok(())
    }
}
