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
        match wants_input {
            true => self.backward_input(cx, saved, d_output).map(Some),
            false => self.d_output_of(0, cx, saved, d_output).map(|_| None),
        }
    }

    /// The first layer that may have parameters.
    fn first_with_parameters(&self) -> usize {
        self.0.iter().take_while(|layer| !layer.has_parameters()).count()
    }

    /// The gradient of the output of layer `at`. The first half of the backward pass computes it and keeps it for the
    /// second half, so that neither repeats work of the other.
    fn d_output_of(
        &self,
        at: usize,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        // The kept gradients are those of the last layers, the last layer's first.
        if saved.kept().is_empty() {
            saved.keep(d_output.clone());
        }
        let last = self.0.len() - 1;
        while saved.kept().len() <= last - at {
            let next = last + 1 - saved.kept().len();
            let d_output = saved.kept()[last - next].clone();
            let d_input = self.0[next].backward_input(cx, &mut saved.parts[next], &d_output)?;
            saved.keep(d_input);
        }
        Ok(saved.kept()[last - at].clone())
    }
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
        for at in (self.first_with_parameters()..self.0.len()).rev() {
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
