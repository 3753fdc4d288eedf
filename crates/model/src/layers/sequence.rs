//! A sequence of layers, as one layer.

use paceline_memory::Tensor;

use crate::{Context, Layer, Result, Saved, Which};

/// Each layer's output is the next one's input.
#[derive(Default)]
pub struct Sequence {
    layers: Vec<Box<dyn Layer>>,
}

impl Sequence {
    /// An empty sequence, which is the identity.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a layer.
    pub fn push(&mut self, layer: impl Layer + 'static) {
        self.layers.push(Box::new(layer));
    }
}

impl Layer for Sequence {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let mut saved = Saved::default();
        let mut value = input;
        for layer in &self.layers {
            let (output, part) = layer.forward(cx, value)?;
            value = output;
            saved.parts.push(part);
        }
        Ok((value, saved))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        which: Which,
    ) -> Result<Option<Tensor>> {
        let mut gradient = Some(d_output);
        for (at, layer) in self.layers.iter().enumerate().rev() {
            let Some(d_output) = gradient else { break };
            // Only the first layer can leave out its input gradient. The others' input gradients are needed
            // by the layers before them.
            let which = match which {
                Which::Weight if at > 0 => Which::Both,
                which => which,
            };
            if which == Which::Input {
                gradient = layer.backward(cx, &mut saved.parts[at], d_output, which)?;
            } else {
                // What the layer saved is freed as soon as the layer is done.
                let mut part = std::mem::take(&mut saved.parts[at]);
                gradient = layer.backward(cx, &mut part, d_output, which)?;
            }
        }
        Ok(gradient)
    }
}
