//! A sequence of layers of different kinds, as one layer.

use paceline_kernels::linear::Activation;
use paceline_memory::Tensor;

use super::{Chain, Relu};
use crate::{Context, Half, Layer, Result, Saved};

/// Each layer's output is the next one's input.
///
/// ```
/// use paceline_kernels::linear::Activation;
/// use paceline_model::layers::{Linear, Sequence};
/// use paceline_model::{LayoutBuilder, gradcheck};
///
/// let mut layout = LayoutBuilder::new();
/// let mut unit = layout.unit("mlp");
/// let first = Linear::new(&mut unit, 3, 8, Activation::None);
/// let mlp = Sequence::new().then(first).then(Linear::new(&mut unit, 8, 2, Activation::None));
/// assert!(gradcheck::worst_error(&mlp, &layout.finish(1), &[4, 3], 42)? < 1e-7);
/// # Ok::<(), paceline_model::ModelError>(())
/// ```
#[derive(Default)]
pub struct Sequence {
    pub(super) layers: Vec<Box<dyn Layer>>,
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

    /// The same sequence with one more layer.
    pub fn then(mut self, layer: impl Layer + 'static) -> Self {
        self.push(layer);
        self
    }

    /// The same sequence with a layer and ReLU, as one fused operation or as two.
    pub fn then_relu<L: Layer + 'static>(
        self,
        is_fused: bool,
        layer: impl FnOnce(Activation) -> L,
    ) -> Self {
        if is_fused {
            self.then(layer(Activation::Relu))
        } else {
            self.then(layer(Activation::None)).then(Relu)
        }
    }
}

impl Layer for Sequence {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        Chain(&self.layers).forward(cx, input)
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        Chain(&self.layers).backward(cx, saved, d_output, half)
    }

    fn forward_onto(
        &self,
        cx: &mut Context,
        input: Tensor,
        onto: &Tensor,
    ) -> Result<(Tensor, Saved)> {
        Chain(&self.layers).forward_onto(cx, input, onto)
    }

    fn backward_onto(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
        onto: &Tensor,
    ) -> Result<Option<Tensor>> {
        Chain(&self.layers).backward_onto(cx, saved, d_output, half, onto)
    }
}
