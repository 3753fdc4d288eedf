//! The durations of actions.

use crate::{Action, Kind, Placement};

/// The durations of all actions, in any unit of time.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// The forward pass of a micro-batch through each stage.
    pub forward: Vec<f64>,
    /// The input half of its backward pass.
    pub backward_input: Vec<f64>,
    /// The weight half.
    pub backward_weight: Vec<f64>,
    /// A message from one rank to another.
    pub message: f64,
    /// The duration of a pair of passes, as a part of both durations together, on a device that runs them side by
    /// side: both begin when both can, and end together. `None` if one runs after the other.
    pub side_by_side: Option<f64>,
}

impl Costs {
    /// Stages that are all alike, and messages that take no time. The three durations are those of all stages of a rank
    /// together, so that ranks with several stages have as much to do.
    pub fn even(placement: &Placement, forward: f64, input: f64, weight: f64) -> Self {
        let each = |whole: f64| vec![whole / placement.chunks() as f64; placement.stages()];
        let (forward, backward_input, backward_weight) = (each(forward), each(input), each(weight));
        Self { forward, backward_input, backward_weight, message: 0.0, side_by_side: None }
    }

    /// The same model in another number of stages: each stage of now is cut into equal parts, or is one with the next ones.
    pub fn resampled(&self, stages: usize) -> Self {
        let each = |of: &Vec<f64>| {
            let part = |stage: usize, at: usize| {
                let (begin, end) = (stage * of.len(), (stage + 1) * of.len());
                let overlap = end.min((at + 1) * stages).saturating_sub(begin.max(at * stages));
                of[at] * overlap as f64 / stages as f64
            };
            (0..stages).map(|stage| (0..of.len()).map(|at| part(stage, at)).sum()).collect()
        };
        Self {
            forward: each(&self.forward),
            backward_input: each(&self.backward_input),
            backward_weight: each(&self.backward_weight),
            ..self.clone()
        }
    }

    /// The time that an action takes of its rank. A message takes no time of a rank: it travels by itself.
    pub fn of(&self, action: &Action) -> f64 {
        let (input, weight) =
            (self.backward_input[action.stage], self.backward_weight[action.stage]);
        match action.kind {
            Kind::Forward => self.forward[action.stage],
            Kind::Backward => input + weight,
            Kind::BackwardInput => input,
            Kind::BackwardWeight => weight,
            _ => 0.0,
        }
    }
}
