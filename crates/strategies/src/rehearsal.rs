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
use paceline_schedule::{Action, Kind, Plan};

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
    let pipeline = Pipeline::rehearsed(model, stages, ranks, rank)?;
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
    let run = |cx: &mut Context, sums: &Tensor| passes.run(cx, sums, &plan, batch);
    let rehearsal = Rehearsal::of_passes(layout.clone(), precision, compute, batch, run)?;
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
        plan: &Plan,
        batch: &Batch,
    ) -> paceline_model::Result<()> {
        for action in plan.actions(self.pipeline.rank) {
            let Action { stage, kind, micro_batch: at } = *action;
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
                    self.backward(cx, sums, *action)?;
                }
                Kind::SendForward => self.sent = self.outputs.remove(&(stage + 1, at)),
                Kind::SendBackward => self.sent = self.d_inputs.remove(&(stage, at)),
                Kind::ReceiveForward => {
                    self.outputs.insert((stage, at), self.received(cx, stage)?);
                }
                Kind::ReceiveBackward => {
                    self.d_inputs.insert((stage + 1, at), self.received(cx, stage + 1)?);
                }
                Kind::WaitSendForward | Kind::WaitSendBackward => {}
            }
        }
        Ok(())
    }

    fn received(&self, cx: &Context, stage: usize) -> paceline_model::Result<Tensor> {
        let (shape, dtype) = self.inputs[stage];
        Ok(cx.compute.allocator.tensor(dtype, shape, Category::Activations)?)
    }

    fn backward(
        &mut self,
        cx: &mut Context,
        sums: &Tensor,
        action: Action,
    ) -> paceline_model::Result<()> {
        let Action { stage, kind, micro_batch: at } = action;
        let blocks = self.pipeline.blocks_of(stage).clone();
        let wants_input = blocks.start > 0;
        cx.begin_pass();
        let d_output = self.d_output(cx, sums, action)?;
        cx.begin_pass();
        let half = match kind {
            Kind::BackwardInput => {
                // The weight half needs it too.
                self.d_inputs.insert((stage + 1, at), d_output.clone());
                Half::Input { wants_input }
            }
            Kind::BackwardWeight => Half::Weight,
            _ => Half::Whole { wants_input },
        };
        if half.writes_weights()
            && let Some(of_loss) = self.saved_of_loss.remove(&at).filter(|_| self.is_last(stage))
        {
            self.model.backward_weight_of_objective(cx, &of_loss)?;
        }
        let mut saved = self.saved.remove(&(stage, at)).expect(CHECKED);
        let d_input = self.model.stage(blocks).backward(cx, &mut saved, d_output, half)?;
        if kind == Kind::BackwardInput {
            self.saved.insert((stage, at), saved);
        }
        self.d_inputs.extend(d_input.map(|tensor| ((stage, at), tensor)));
        Ok(())
    }

    fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.pipeline.placement.stages()
    }

    /// The gradient of a stage's output: that of the loss, or one that is there.
    fn d_output(
        &mut self,
        cx: &mut Context,
        sums: &Tensor,
        Action { stage, kind, micro_batch: at }: Action,
    ) -> paceline_model::Result<Tensor> {
        if !self.is_last(stage) || kind == Kind::BackwardWeight {
            return Ok(self.d_inputs.remove(&(stage + 1, at)).expect(CHECKED));
        }
        let output = self.outputs.remove(&(stage + 1, at)).expect(CHECKED);
        let halves = self.model.objective.has_halves() && !self.pipeline.stages.head_at_once;
        let puts_off = kind == Kind::BackwardInput && halves;
        let of_loss = puts_off.then(|| self.saved_of_loss.entry(at).or_default());
        self.model.differentiate(cx, &output, 1.0, sums, of_loss)
    }
}
