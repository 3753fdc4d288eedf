//! Layers one after the other, as one layer.

use paceline_memory::Tensor;

use crate::layer::sum;
use crate::{Context, Half, Layer, Mode, ModelError, Result, Saved};

/// Each layer's output is the next one's input. Borrows the layers, so that any part of a row of layers can be run.
#[derive(Debug)]
pub struct Chain<'a, L>(pub &'a [L]);

impl<L: Layer> Chain<'_, L> {
    /// The first layer that may have parameters.
    fn first_with_parameters(&self) -> usize {
        self.0.iter().take_while(|layer| !layer.has_parameters()).count()
    }

    /// The gradient of the output of layer `at`. The first half of the backward pass computes it and keeps it
    /// for the other. Layers without parameters keep nothing once they are passed.
    fn d_output_of(
        &self,
        at: usize,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        // The first one that is kept is that of the last layer so far.
        let reached = saved.parts.iter().position(|part| part.d_output.is_some());
        let reached = reached.unwrap_or_else(|| {
            let last = self.0.len() - 1;
            saved.parts[last].d_output = Some(d_output.clone());
            last
        });
        for next in (at + 1..=reached).rev() {
            saved.parts[next - 1].d_output = Some(self.input_half(next, cx, saved)?);
        }
        Ok(kept(&saved.parts[at]))
    }

    /// The gradient of the input of layer `at`, the gradient of whose output is known.
    fn input_half(&self, at: usize, cx: &mut Context, saved: &mut Saved) -> Result<Tensor> {
        let (layer, part) = (&self.0[at], &mut saved.parts[at]);
        let (d_output, half) = (kept(part), Half::Input { wants_input: true });
        let d_input = layer.backward(cx, part, d_output, half)?;
        if layer.has_parameters() {
            part.release_d_output();
        } else {
            *part = Saved::default();
        }
        found(layer, d_input)
    }

    /// The forward pass, and `onto` added to the output if it is given.
    fn pass(
        &self,
        cx: &mut Context,
        input: Tensor,
        onto: Option<&Tensor>,
    ) -> Result<(Tensor, Saved)> {
        let (mut value, mut saved) = (input, Saved::default());
        for (at, layer) in self.0.iter().enumerate() {
            let (output, part) = match onto {
                Some(onto) if at + 1 == self.0.len() => layer.forward_onto(cx, value, onto)?,
                _ => layer.forward(cx, value)?,
            };
            value = output;
            if cx.mode() == Mode::Train {
                saved.parts.push(part);
            }
        }
        Ok((value, saved))
    }

    /// Both halves, and `onto` added to the gradient of the input if it is given. The parts of `saved` are freed as soon as their layers
    /// are done.
    fn whole(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        wants_input: bool,
        onto: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let mut gradient = d_output;
        let first = self.first_with_parameters();
        for (at, mut part) in saved.parts.drain(..).enumerate().rev() {
            // Only the first layer with parameters can leave out the gradient of its input.
            let half = Half::Whole { wants_input: wants_input || at > first };
            let layer = &self.0[at];
            let d_input = match onto {
                Some(onto) if at == 0 => {
                    layer.backward_onto(cx, &mut part, gradient, half, onto)?
                }
                _ => layer.backward(cx, &mut part, gradient, half)?,
            };
            if !half.wants_input() {
                return Ok(None);
            }
            gradient = found(layer, d_input)?;
        }
        Ok(Some(gradient))
    }

    /// Errors unless each layer has saved its part.
    fn check(&self, saved: &Saved) -> Result<()> {
        let (expected, found) = (self.0.len(), saved.parts.len());
        // They differ after a whole pass, for example, which frees all parts.
        if found == expected { Ok(()) } else { Err(ModelError::Saved { expected, found }) }
    }
}

fn kept(part: &Saved) -> Tensor {
    part.d_output.clone().expect("a gradient is kept until its layer has passed it on")
}

/// The gradient of a layer's input, which is needed.
fn found(layer: &impl Layer, d_input: Option<Tensor>) -> Result<Tensor> {
    d_input.ok_or_else(|| ModelError::NoInputGradient { layer: layer.name() })
}

impl<L: Layer> Layer for Chain<'_, L> {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        self.pass(cx, input, None)
    }

    fn forward_onto(
        &self,
        cx: &mut Context,
        input: Tensor,
        onto: &Tensor,
    ) -> Result<(Tensor, Saved)> {
        if self.0.is_empty() {
            return Ok((sum(cx, &Saved::default(), onto, input)?, Saved::default()));
        }
        self.pass(cx, input, Some(onto))
    }

    fn backward_onto(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
        onto: &Tensor,
    ) -> Result<Option<Tensor>> {
        if half == (Half::Whole { wants_input: true }) && !self.0.is_empty() {
            self.check(saved)?;
            return self.whole(cx, saved, d_output, true, Some(onto));
        }
        let d_input = self.backward(cx, saved, d_output, half)?;
        d_input.map(|d_input| sum(cx, saved, onto, d_input)).transpose()
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        self.check(saved)?;
        match half {
            _ if self.0.is_empty() => Ok(half.wants_input().then_some(d_output)),
            Half::Whole { wants_input } => self.whole(cx, saved, d_output, wants_input, None),
            Half::Input { wants_input } => {
                self.d_output_of(0, cx, saved, &d_output)?;
                wants_input.then(|| self.input_half(0, cx, saved)).transpose()
            }
            Half::Weight => {
                let with_parameters = |at: &usize| self.0[*at].has_parameters();
                for at in (0..self.0.len()).rev().filter(with_parameters) {
                    let d_output = self.d_output_of(at, cx, saved, &d_output)?;
                    self.0[at].backward(cx, &mut saved.parts[at], d_output, half)?;
                }
                Ok(None)
            }
        }
    }
}
