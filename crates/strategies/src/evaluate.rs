//! A forward pass without a backward pass.

use std::sync::Arc;

use paceline_memory::{Category, Tensor};
use paceline_model::{Batch, Context, Layer, OpenUnits};

use crate::hooks::StepHooks;
use crate::{Replica, Result, StepContext, Strategy};

/// Computes the output of the last block for this rank's share of a batch, and passes it to `then`, such as
/// [`Model::evaluate`](paceline_model::Model::evaluate). In a pipeline, only the last stage does. Computes no gradients. All ranks
/// call this together.
pub fn evaluate(
    strategy: &mut dyn Strategy,
    cx: &mut StepContext,
    batch: &Batch,
    mut then: impl FnMut(&mut Context, &Tensor) -> paceline_model::Result<()>,
) -> Result<()> {
    let Replica { model, compute, storage, pipeline, .. } = cx.replica;
    let (placement, rank) = (pipeline.placement, pipeline.rank);
    let is_here = |stage: usize| placement.rank(stage) == rank;
    let received = if pipeline.ranks.is_some() { cx.stage_inputs(batch)? } else { Arc::default() };
    let mut units = OpenUnits::new(&model.layout);
    let mut hooks = StepHooks::new(strategy, cx.reborrow());
    let mut cx = Context::evaluation(compute, storage, &mut units, &mut hooks).with_batch(batch);
    cx.open_roots()?;
    let mut made = None::<Tensor>;
    for stage in (0..placement.stages()).filter(|stage| is_here(*stage)) {
        let input = match (stage, made) {
            (0, _) => batch.inputs().clone(),
            (_, Some(made)) if is_here(stage - 1) => made,
            _ => {
                let (shape, dtype) = received[stage];
                let input = compute.allocator.tensor(dtype, shape, Category::Activations)?;
                pipeline.receive(stage, true, &input)?.wait()?;
                input
            }
        };
        made = None;
        let blocks = pipeline.blocks_of(stage).clone();
        let (output, _) = model.stage(blocks).forward(&mut cx, input)?;
        if stage + 1 == placement.stages() {
            then(&mut cx, &output)?;
        } else if is_here(stage + 1) {
            made = Some(output);
        } else {
            pipeline.send(stage, true, &output)?.wait()?;
        }
    }
    Ok(cx.close_roots()?)
}
