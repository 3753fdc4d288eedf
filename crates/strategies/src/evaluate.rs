//! A forward pass without a backward pass.

use paceline_memory::Tensor;
use paceline_model::{Batch, Context, Layer, OpenUnits, ParamId, PassHooks, Storage, UnitId, View};
use paceline_trace::SpanTrack;

use crate::{Replica, Result, Strategy};

/// Adds the objective's sums over this rank's share of a batch to `sums`: f64 (3), see
/// [`Objective`](paceline_model::Objective). In a pipeline, only the last stage adds any. Computes no gradients. All ranks call this
/// together.
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
    let pipeline = &replica.pipeline;
    let (placement, rank) = (pipeline.placement, pipeline.rank);
    let is_here = |stage: usize| placement.rank(stage) == rank;
    let mut made: Option<Tensor> = None;
    for stage in (0..placement.stages()).filter(|stage| is_here(*stage)) {
        let input = match (stage, made.take()) {
            (0, _) => batch.inputs().clone(),
            (_, Some(made)) if is_here(stage - 1) => made,
            _ => {
                let input = pipeline.input(replica, batch, stage)?;
                pipeline.receive(stage, true, &input)?.wait()?;
                input
            }
        };
        let blocks = pipeline.blocks_of(stage).clone();
        let (output, _) = model.stage(blocks).forward(&mut cx, input)?;
        if stage + 1 == placement.stages() {
            model.evaluate(&mut cx, &output, sums)?;
        } else if is_here(stage + 1) {
            made = Some(output);
        } else {
            pipeline.send(stage, true, &output)?.wait()?;
        }
    }
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
