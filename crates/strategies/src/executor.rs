//! Carries out a rank's list of actions.
//!
//! Input: a step and a plan. Output: the passes of all micro-batches, in the order of the list. A plain training step is a
//! list too, of one stage. This file knows nothing of how gradients are synchronized.

use std::collections::HashMap;

use paceline_collectives::{OpTimes, Work};
use paceline_memory::{Category, Tensor};
use paceline_model::{Half, Saved};
use paceline_schedule::{Action, Kind, Plan};
use paceline_trace::{Span, now_ns};

use crate::step::TrainStep;
use crate::{ActionTimes, Result};

/// The state of the micro-batches between two actions, by stage and micro-batch.
#[derive(Default)]
struct InFlight {
    /// Inputs of stages, which are the outputs of the stages before them.
    inputs: HashMap<(usize, usize), Parcel>,
    /// The gradients of the inputs of stages.
    d_inputs: HashMap<(usize, usize), Parcel>,
    saved: HashMap<(usize, usize), Saved>,
    /// For the weight half of the loss, if it is put off, by micro-batch.
    saved_of_loss: HashMap<usize, Saved>,
    /// The times of the message for which the last action has waited, and when the rank had it.
    message: Option<(OpTimes, u64)>,
}

/// A tensor between two stages.
struct Parcel {
    tensor: Tensor,
    /// The message that brings it, if it comes from another rank.
    work: Option<Work>,
}

/// Every tensor is there when an action needs it.
const CHECKED: &str = "checked with the plan";

/// Carries out the actions of this rank, and records when.
pub(crate) fn run(step: &mut TrainStep, plan: &Plan) -> Result<()> {
    let rank = step.replica().pipeline.rank;
    let executor = &mut step.cx().state.executor;
    executor.actions.clear();
    let sent: Vec<_> = executor.sending.drain(..).collect();
    sent.iter().try_for_each(|(work, _)| step.cx().wait(work).map(drop))?;
    let mut in_flight = InFlight::default();
    for &action in plan.actions(rank) {
        let asked_ns = now_ns();
        in_flight.message = None;
        in_flight.carry_out(step, action)?;
        let message = in_flight.message;
        let start_ns = message.map_or(asked_ns, |(_, there_ns)| there_ns);
        step.cx().state.executor.actions.push(ActionTimes {
            action,
            span: Span { start_ns, end_ns: now_ns() },
            awaited: message.map(|(times, _)| (asked_ns, times)),
        });
    }
    Ok(())
}

impl InFlight {
    fn carry_out(&mut self, step: &mut TrainStep, action: Action) -> Result<()> {
        let Action { stage, kind, micro_batch: at } = action;
        match kind {
            Kind::Forward => self.forward(step, stage, at),
            Kind::Backward | Kind::BackwardInput | Kind::BackwardWeight => {
                self.backward(step, action)
            }
            Kind::SendForward | Kind::SendBackward => self.send(step, action),
            Kind::ReceiveForward | Kind::ReceiveBackward => self.receive(step, action),
            // Our own lists have no such waits: a message keeps what it sends.
            Kind::WaitSendForward | Kind::WaitSendBackward => Ok(()),
        }
    }

    fn forward(&mut self, step: &mut TrainStep, stage: usize, at: usize) -> Result<()> {
        let input = match stage {
            0 => step.samples[at].batch.inputs().clone(),
            _ => self.arrived(step, true, (stage, at))?,
        };
        let blocks = step.replica().pipeline.blocks_of(stage).clone();
        let (output, saved) = step.forward(at, blocks, input)?;
        self.inputs.insert((stage + 1, at), Parcel { tensor: output, work: None });
        self.saved.insert((stage, at), saved);
        Ok(())
    }

    fn backward(&mut self, step: &mut TrainStep, action: Action) -> Result<()> {
        let Action { stage, kind, micro_batch: at } = action;
        let pipeline = &step.replica().pipeline;
        let is_last = stage + 1 == pipeline.placement.stages();
        let blocks = pipeline.blocks_of(stage).clone();
        let wants_input = blocks.start > 0;
        let (half, d_output) = match kind {
            Kind::BackwardInput => {
                let d_output = self.d_output(step, stage, at, true)?;
                // The weight half needs it too.
                let parcel = Parcel { tensor: d_output.clone(), work: None };
                self.d_inputs.insert((stage + 1, at), parcel);
                (Half::Input { wants_input }, d_output)
            }
            Kind::BackwardWeight => (Half::Weight, self.arrived(step, false, (stage + 1, at))?),
            _ => (Half::Whole { wants_input }, self.d_output(step, stage, at, false)?),
        };
        let puts_off = kind == Kind::BackwardWeight && is_last;
        let of_loss = if puts_off { self.saved_of_loss.remove(&at) } else { None };
        let mut saved = self.saved.remove(&(stage, at)).expect(CHECKED);
        let d_input = step.backward(at, blocks, half, &mut saved, d_output, of_loss)?;
        if kind == Kind::BackwardInput {
            self.saved.insert((stage, at), saved);
        }
        let d_input = d_input.map(|tensor| ((stage, at), Parcel { tensor, work: None }));
        self.d_inputs.extend(d_input);
        Ok(())
    }

    /// The gradient of a stage's output: that of the loss, or of the input of the next stage. With `only_input`, the loss may put off
    /// those of its parameters.
    fn d_output(
        &mut self,
        step: &mut TrainStep,
        stage: usize,
        at: usize,
        only_input: bool,
    ) -> Result<Tensor> {
        let (model, pipeline) = (&step.replica().model, &step.replica().pipeline);
        if stage + 1 < pipeline.placement.stages() {
            return self.arrived(step, false, (stage + 1, at));
        }
        let output = self.inputs.remove(&(stage + 1, at)).expect(CHECKED).tensor;
        let puts_off = only_input && model.objective.has_halves() && !pipeline.stages.head_at_once;
        let of_loss = puts_off.then(|| self.saved_of_loss.entry(at).or_default());
        step.loss(at, output, of_loss)
    }

    /// An input of a stage, or its gradient, once it is there.
    fn arrived(
        &mut self,
        step: &mut TrainStep,
        is_forward: bool,
        at: (usize, usize),
    ) -> Result<Tensor> {
        let parcels = if is_forward { &mut self.inputs } else { &mut self.d_inputs };
        let Parcel { tensor, work } = parcels.remove(&at).expect(CHECKED);
        if let Some(work) = work {
            let times = step.cx().wait(&work)?;
            self.message = Some((times, now_ns()));
        }
        Ok(tensor)
    }

    fn send(
        &mut self,
        step: &mut TrainStep,
        Action { stage, kind, micro_batch }: Action,
    ) -> Result<()> {
        let is_forward = kind == Kind::SendForward;
        let parcels = if is_forward { &mut self.inputs } else { &mut self.d_inputs };
        let made_by = if is_forward { stage + 1 } else { stage };
        let tensor = parcels.remove(&(made_by, micro_batch)).expect(CHECKED).tensor;
        let sending = &mut step.cx().state.executor.sending;
        let sent: Vec<_> = sending.extract_if(.., |(work, _)| work.is_finished()).collect();
        sent.iter().try_for_each(|(work, _)| step.cx().wait(work).map(drop))?;
        let work = step.replica().pipeline.send(stage, is_forward, &tensor)?;
        step.cx().state.executor.sending.push((work, tensor));
        Ok(())
    }

    fn receive(
        &mut self,
        step: &mut TrainStep,
        Action { stage, kind, micro_batch: at }: Action,
    ) -> Result<()> {
        let is_forward = kind == Kind::ReceiveForward;
        // The gradient of an output has the shape of the next stage's input.
        let of = if is_forward { stage } else { stage + 1 };
        let batch = &step.samples[at].batch;
        let (shape, dtype) = step.cx().stage_inputs(batch)?[of];
        let memory = &step.replica().compute.allocator;
        let tensor = memory.tensor(dtype, shape, Category::Activations)?;
        let work = Some(step.replica().pipeline.receive(stage, is_forward, &tensor)?);
        let parcels = if is_forward { &mut self.inputs } else { &mut self.d_inputs };
        parcels.insert((of, at), Parcel { tensor, work });
        Ok(())
    }
}
