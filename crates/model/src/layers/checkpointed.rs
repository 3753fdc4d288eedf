//! A layer that keeps only its input between its passes.

use paceline_memory::Tensor;

use crate::{Context, Half, Layer, Result, Saved};

/// Activation checkpointing: the backward pass runs the inner layer's forward pass again, instead of keeping what that
/// saved. Of all layers that are wrapped like this, only one at a time holds what it saves, so the activations of
/// `n` wrapped layers take the memory of their `n` inputs and of the largest layer, for about a third more computing
/// time. The results are the same to the last bit. Source: Chen and others, Training Deep Nets with Sublinear Memory
/// Cost (2016).
pub struct Checkpointed<L>(pub L);

impl<L: Layer> Checkpointed<L> {
    /// The tensors that the inner layer saves, computed when the first half of the backward pass needs it.
    fn recompute<'a>(&self, cx: &mut Context, saved: &'a mut Saved) -> Result<&'a mut Saved> {
        if saved.parts.is_empty() {
            let [input] = saved.tensors()?;
            let input = input.clone();
            let (_, part) = cx.recompute(|cx| self.0.forward(cx, input))?;
            saved.parts.push(part);
        }
        Ok(&mut saved.parts[0])
    }
}

impl<L: Layer> Layer for Checkpointed<L> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn has_parameters(&self) -> bool {
        self.0.has_parameters()
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let (output, _) = self.0.forward(cx, input.clone())?;
        Ok((output, Saved::of([input])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let part = self.recompute(cx, saved)?;
        self.0.backward(cx, part, d_output, half)
    }
}
