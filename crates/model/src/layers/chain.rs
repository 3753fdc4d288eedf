//! Layers one after the other, as one layer.

use paceline_memory::Tensor;

use crate::{Context, Layer, Result, Saved};

/// Each layer's output is the next one's input. Borrows the layers, so that any part of a row of layers can be run.
#[derive(Debug)]
pub struct Chain<'a, L>(pub &'a [L]);

impl<L: Layer> Chain<'_, L> {
    /// The input half of the backward pass, which leaves out the gradient of the first layer's input unless `wants_input`.
    pub fn input_half(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
        wants_input: bool,
    ) -> Result<Option<Tensor>> {
        if wants_input {
            self.backward_input(cx, saved, d_output).map(Some)
        } else {
            self.d_output_of(0, cx, saved, d_output).map(|_| None)
        }
    }

    /// The first layer that may have parameters.
    fn first_with_parameters(&self) -> usize {
        self.0.iter().take_while(|layer| !layer.has_parameters()).count()
    }

    /// The gradient of the output of layer `at`. The half of the backward pass that comes first computes it and keeps it
    /// for the other, so that neither repeats work. Layers without parameters keep nothing once they are passed.
    fn d_output_of(
        &self,
        at: usize,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        let last = self.0.len() - 1;
        // The first one that is kept is that of the layer that was reached last.
        let reached = saved.parts.iter().position(|part| part.d_output.is_some());
        let reached = reached.unwrap_or_else(|| {
            saved.parts[last].d_output = Some(d_output.clone());
            last
        });
        for next in (at + 1..=reached).rev() {
            let d_output = kept(&saved.parts[next]);
            let d_input = self.0[next].backward_input(cx, &mut saved.parts[next], &d_output)?;
            if !self.0[next].has_parameters() {
                saved.parts[next] = Saved::default();
            }
            saved.parts[next - 1].d_output = Some(d_input);
        }
        Ok(kept(&saved.parts[at]))
    }
}

fn kept(part: &Saved) -> Tensor {
    part.d_output.clone().expect("a gradient is kept until its layer has passed it on")
}

impl<L: Layer> Layer for Chain<'_, L> {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let mut saved = Saved::default();
        let mut value = input;
        for layer in self.0 {
            let (output, part) = layer.forward(cx, value)?;
            value = output;
            saved.parts.push(part);
        }
        Ok((value, saved))
    }

    fn backward_weight(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<()> {
        let with_parameters = |at: &usize| self.0[*at].has_parameters();
        for at in (0..self.0.len()).rev().filter(with_parameters) {
            let d_output = self.d_output_of(at, cx, saved, d_output)?;
            self.0[at].backward_weight(cx, &mut saved.parts[at], &d_output)?;
        }
        Ok(())
    }

    fn backward_input(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        let Some(first) = self.0.first() else { return Ok(d_output.clone()) };
        let d_output = self.d_output_of(0, cx, saved, d_output)?;
        first.backward_input(cx, &mut saved.parts[0], &d_output)
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: Saved,
        d_output: Tensor,
        wants_input: bool,
    ) -> Result<Option<Tensor>> {
        let mut gradient = d_output;
        let first = self.first_with_parameters();
        // What a layer saved is freed as soon as the layer is done.
        for (at, part) in saved.parts.into_iter().enumerate().rev() {
            // Only the first layer with parameters can leave out the gradient of its input. The layers before the others need
            // theirs.
            match self.0[at].backward(cx, part, gradient, wants_input || at > first)? {
                Some(d_input) => gradient = d_input,
                None => return Ok(None),
            }
        }
        Ok(Some(gradient))
    }
}
