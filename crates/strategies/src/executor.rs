//! Carries out a rank's list of actions. What is drawn is what runs.
//!
//! Input: a step and a plan. Output: the passes of all micro-batches, in the order of the list. A plain training step is a
//! list too, of one stage. This file knows nothing of how gradients are synchronized.

use paceline_collectives::{OpTimes, Work};
use paceline_memory::Tensor;
use paceline_model::Saved;
use paceline_schedule::{Action, Kind, Plan};
use paceline_trace::{Span, now_ns};

use crate::Result;
use crate::step::Step;

/// An action as it was carried out. Times are nanoseconds of [`now_ns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acted {
    /// The action.
    pub action: Action,
    /// Arithmetic: when it ran. A message: when it was handed to its queue.
    pub span: Span,
    /// Since when the rank had nothing else to do, and the message for which it waited, if the arithmetic needs one.
    pub awaited: Option<(u64, OpTimes)>,
}

/// What a stage has of a micro-batch between its actions.
#[derive(Default)]
struct Flight {
    /// The input, while it arrives from another rank.
    input: Option<Arriving>,
    output: Option<Tensor>,
    saved: Option<Saved>,
    /// What the weight half of the loss needs, if it is put off.
    of_loss: Option<Saved>,
    /// The gradient of the output: while it arrives from another rank, or for the weight half.
    d_output: Option<Arriving>,
    d_input: Option<Tensor>,
}

struct Arriving {
    tensor: Tensor,
    work: Option<Work>,
}

/// What a step leaves behind.
#[derive(Debug, Default)]
pub(crate) struct Executed {
    /// What has been carried out, in order.
    pub(crate) acted: Vec<Acted>,
    /// Messages that may still travel, with what they carry. Who sends need not wait for who receives: its optimizer is next.
    sending: Vec<(Work, Tensor)>,
}

/// Carries out the actions of this rank, and notes each.
pub(crate) fn run(step: &mut Step, plan: &Plan, executed: &mut Executed) -> Result<()> {
    let Executed { acted, sending } = executed;
    for (work, _) in sending.drain(..) {
        step.wait(work)?;
    }
    acted.clear();
    let pipeline = &step.replica.pipeline;
    let (placement, rank) = (pipeline.placement, pipeline.rank);
    let (micro_batches, stages) = (plan.shape().micro_batches, placement.stages());
    let place = |stage: usize, at: usize| placement.chunk(stage) * micro_batches + at;
    let mut flights: Vec<Flight> = Vec::new();
    flights.resize_with(placement.chunks() * micro_batches, Flight::default);
    let is_here = |stage: usize| placement.rank(stage) == rank;
    for &Action { stage, kind, micro_batch: at } in plan.actions(rank) {
        let own = place(stage, at);
        let blocks = pipeline.blocks_of(stage);
        let asked_ns = now_ns();
        let mut message = None;
        match kind {
            Kind::Forward => {
                let input = match stage.checked_sub(1) {
                    None => step.passed[at].batch.inputs().clone(),
                    Some(before) if is_here(before) => {
                        flights[place(before, at)].output.take().expect("checked with the plan")
                    }
                    Some(_) => arrived(step, flights[own].input.take(), &mut message)?,
                };
                let (output, saved) = step.forward(at, blocks.clone(), input)?;
                flights[own].output = Some(output);
                flights[own].saved = Some(saved);
            }
            Kind::Backward | Kind::BackwardInput => {
                let d_output = if stage + 1 == stages {
                    let output = flights[own].output.take().expect("checked with the plan");
                    let has_halves = step.replica.model.objective.has_halves();
                    let puts_off =
                        kind == Kind::BackwardInput && has_halves && !pipeline.head_at_once;
                    flights[own].of_loss = puts_off.then(Saved::default);
                    step.loss(at, output, flights[own].of_loss.as_mut())?
                } else if is_here(stage + 1) {
                    flights[place(stage + 1, at)].d_input.take().expect("checked with the plan")
                } else {
                    arrived(step, flights[own].d_output.take(), &mut message)?
                };
                let mut saved = flights[own].saved.take().expect("checked with the plan");
                if kind == Kind::Backward {
                    flights[own].d_input = step.backward(at, blocks.clone(), saved, d_output)?;
                } else {
                    let d_input = step.backward_input(at, blocks.clone(), &mut saved, &d_output)?;
                    flights[own].d_input = d_input;
                    flights[own].saved = Some(saved);
                    flights[own].d_output = Some(Arriving { tensor: d_output, work: None });
                }
            }
            Kind::BackwardWeight => {
                let saved = flights[own].saved.take().expect("checked with the plan");
                let d_output = arrived(step, flights[own].d_output.take(), &mut message)?;
                let of_loss = flights[own].of_loss.take();
                step.backward_weight(at, blocks.clone(), saved, &d_output, of_loss)?;
            }
            Kind::SendForward | Kind::SendBackward => {
                let is_forward = kind == Kind::SendForward;
                let flight = &mut flights[own];
                let made = if is_forward { &mut flight.output } else { &mut flight.d_input };
                let tensor = made.take().expect("checked with the plan");
                let sent = sending.extract_if(.., |(work, _)| work.is_finished());
                sent.map(|(work, _)| step.wait(work)).collect::<Result<Vec<_>>>()?;
                sending.push((pipeline.send(stage, is_forward, &tensor)?, tensor));
            }
            Kind::ReceiveForward | Kind::ReceiveBackward => {
                let is_forward = kind == Kind::ReceiveForward;
                let batch = &step.passed[at].batch;
                // The gradient of an output has the shape of the next stage's input.
                let shaped_like = if is_forward { stage } else { stage + 1 };
                let tensor = pipeline.input(step.replica, batch, shaped_like)?;
                let work = Some(pipeline.receive(stage, is_forward, &tensor)?);
                let arriving = Some(Arriving { tensor, work });
                let flight = &mut flights[own];
                if is_forward { flight.input = arriving } else { flight.d_output = arriving }
            }
        }
        let start_ns = message.map_or(asked_ns, |(_, there_ns)| there_ns);
        acted.push(Acted {
            action: Action { stage, kind, micro_batch: at },
            span: Span { start_ns, end_ns: now_ns() },
            awaited: message.map(|(times, _)| (asked_ns, times)),
        });
    }
    Ok(())
}

/// What has been received, once it is there. Notes the times of the message, and when the rank had it.
fn arrived(
    step: &mut Step,
    arriving: Option<Arriving>,
    message: &mut Option<(OpTimes, u64)>,
) -> Result<Tensor> {
    let Arriving { tensor, work } = arriving.expect("checked with the plan");
    if let Some(work) = work {
        let times = step.wait(work)?;
        *message = Some((times, now_ns()));
    }
    Ok(tensor)
}
