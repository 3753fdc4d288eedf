//! The step of a rank of a pipeline without arithmetic: the memory that its micro-batches in flight take.
//!
//! Input: a model, its stages, a place on the axis `pp`, and a micro-batch of a device without contents. Output: the layout of the
//! rank's stages, and the rehearsal of its list. The tensors live as long as in the executor; a message that was sent lives until the
//! next one is. This file knows no groups and sends nothing.

use std::collections::HashMap;
use std::sync::Arc;

use paceline_kernels::Compute;
use paceline_memory::{Category, DType, Shape, Tensor};
use paceline_model::{Batch, Context, Half, Layer, Layout, Model, Precision, Rehearsal, Saved};
use paceline_schedule::{Action, Kind};

use crate::pipeline::Pipeline;
use crate::{Result, Stages};

/// Rehearses the list of a rank of `ranks` in a step. Also returns the part of the model that it holds.
///
/// # Errors
///
/// If the model cannot be divided like this, or if `compute` is not of the device without contents.
pub fn rehearse_stages(
    model: &Model,
    stages: &Stages,
    (ranks, rank): (usize, usize),
    precision: Precision,
    compute: &Compute,
    batch: &Batch,
) -> Result<(Arc<Layout>, Rehearsal)> {
    let pipeline = Pipeline::without_groups(model, stages, ranks, rank)?;
    let (layout, plan) = (pipeline.part(model)?, pipeline.plan(stages.micro_batches)?);
    let inputs = pipeline.inputs(model, precision, batch)?;
    let mut passes = StagePasses {
        model,
        pipeline: &pipeline,
        inputs,
        outputs: HashMap::new(),
        d_inputs: HashMap::new(),
        saved: HashMap::new(),
        saved_of_loss: HashMap::new(),
        sent: None,
    };
    let run = |cx: &mut Context, sums: &Tensor, batch: &Batch| {
        plan.actions(rank).iter().try_for_each(|action| passes.run(cx, sums, batch, *action))
    };
    let (batches, extra) = (std::slice::from_ref(batch), (None, false));
    let part = layout.clone();
    let rehearsal = Rehearsal::of_passes(part, precision, compute, batches, extra, run)?;
    Ok((layout, rehearsal))
}

/// The tensors in memory between two actions, by stage and micro-batch.
struct StagePasses<'a> {
    model: &'a Model,
    pipeline: &'a Pipeline,
    /// The shapes of the inputs of all stages.
    inputs: Vec<(Shape, DType)>,
    /// Outputs, by the stage whose input they are.
    outputs: HashMap<(usize, usize), Tensor>,
    d_inputs: HashMap<(usize, usize), Tensor>,
    saved: HashMap<(usize, usize), Saved>,
    saved_of_loss: HashMap<usize, Saved>,
    /// The last message.
    sent: Option<Tensor>,
}

/// Every tensor is there when an action needs it.
const CHECKED: &str = "checked with the plan";

impl StagePasses<'_> {
    fn run(
        &mut self,
        cx: &mut Context,
        sums: &Tensor,
        batch: &Batch,
        action: Action,
    ) -> paceline_model::Result<()> {
        let Action { stage, kind, micro_batch: at } = action;
        let received = |of: usize| {
            let (shape, dtype) = self.inputs[of];
            cx.compute.allocator.tensor(dtype, shape, Category::Activations)
        };
        match kind {
            Kind::Forward => {
                let input = match stage {
                    0 => batch.inputs().clone(),
                    _ => self.outputs.remove(&(stage, at)).expect(CHECKED),
                };
                let blocks = self.pipeline.blocks_of(stage).clone();
                let (output, saved) = self.model.stage(blocks).forward(cx, input)?;
                self.outputs.insert((stage + 1, at), output);
                self.saved.insert((stage, at), saved);
            }
            Kind::Backward | Kind::BackwardInput | Kind::BackwardWeight => {
                self.backward(cx, sums, action)?;
            }
            Kind::SendForward => self.sent = self.outputs.remove(&(stage + 1, at)),
            Kind::SendBackward => self.sent = self.d_inputs.remove(&(stage, at)),
            Kind::ReceiveForward => self.outputs.extend([((stage, at), received(stage)?)]),
            // The gradient of an output has the shape of the next stage's input.
            Kind::ReceiveBackward => {
                self.d_inputs.extend([((stage + 1, at), received(stage + 1)?)]);
            }
            Kind::WaitSendForward | Kind::WaitSendBackward => {}
        }
        Ok(())
    }

    fn backward(
        &mut self,
        cx: &mut Context,
        sums: &Tensor,
        Action { stage, kind, micro_batch: at }: Action,
    ) -> paceline_model::Result<()> {
        let Self { model, pipeline, .. } = *self;
        let blocks = pipeline.blocks_of(stage).clone();
        let wants_input = blocks.start > 0;
        let half = match kind {
            Kind::BackwardInput => Half::Input { wants_input },
            Kind::BackwardWeight => Half::Weight,
            _ => Half::Whole { wants_input },
        };
        let is_last = stage + 1 == pipeline.placement.stages();
        cx.begin_pass();
        let d_output = if is_last && half != Half::Weight {
            let output = self.outputs.remove(&(stage + 1, at)).expect(CHECKED);
            let halves = model.objective.has_halves() && !pipeline.stages.head_at_once;
            let puts_off = kind == Kind::BackwardInput && halves;
            let of_loss = puts_off.then(|| self.saved_of_loss.entry(at).or_default());
            model.differentiate(cx, &output, 1.0, sums, of_loss)?
        } else {
            self.d_inputs.remove(&(stage + 1, at)).expect(CHECKED)
        };
        cx.begin_pass();
        if is_last
            && half.writes_weights()
            && let Some(of_loss) = self.saved_of_loss.remove(&at)
        {
            model.backward_weight_of_objective(cx, &of_loss)?;
        }
        if kind == Kind::BackwardInput {
            // The weight half needs it too.
            self.d_inputs.insert((stage + 1, at), d_output.clone());
        }
        let mut saved = self.saved.remove(&(stage, at)).expect(CHECKED);
        let d_input = model.stage(blocks).backward(cx, &mut saved, d_output, half)?;
        if kind == Kind::BackwardInput {
            self.saved.insert((stage, at), saved);
        }
        self.d_inputs.extend(d_input.map(|tensor| ((stage, at), tensor)));
        Ok(())
    }
}
