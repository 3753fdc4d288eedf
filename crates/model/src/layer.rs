//! The interface of a layer.
//!
//! Input: a batch, and parameters from the context. Output: the layer's output, and gradients written and announced. A
//! layer knows nothing of ranks or strategies.

use paceline_memory::Tensor;

use crate::{Context, ModelError, Result};

/// What a layer saves for one micro-batch between its passes.
#[derive(Debug, Default)]
pub struct Saved {
    tensors: Vec<Tensor>,
    /// Tensors that one half of the backward pass has computed and the other half needs too.
    kept: Vec<Tensor>,
    /// What the parts of a composed layer have saved, in order of the forward pass.
    pub parts: Vec<Saved>,
    /// The gradient of this part's output, from when it is known until the other half of the backward pass has used it.
    pub(crate) d_output: Option<Tensor>,
}

impl Saved {
    /// Saves these tensors.
    pub fn of<const N: usize>(tensors: [Tensor; N]) -> Self {
        Self { tensors: tensors.into(), ..Self::default() }
    }

    /// The tensors that were passed to [`Saved::of`]. Errors if there were not exactly `N`.
    pub fn tensors<const N: usize>(&self) -> Result<&[Tensor; N]> {
        let found = self.tensors.len();
        self.tensors.as_slice().try_into().map_err(|_| ModelError::Saved { expected: N, found })
    }

    /// The tensors that were passed to [`Saved::keep`], in that order.
    pub fn kept(&self) -> &[Tensor] {
        &self.kept
    }

    /// Keeps a tensor that one half of the backward pass has computed for the other half.
    pub fn keep(&mut self, tensor: Tensor) {
        self.kept.push(tensor);
    }
}

/// A layer: a function with an explicit derivative.
///
/// A layer holds sizes and parameter numbers, but no values and no data of a batch. Data of a batch that the backward
/// pass needs go into [`Saved`], so that several micro-batches can be in progress at once.
///
/// The backward pass has two halves, the gradients of the parameters and the gradient of the input. Both take
/// `d_output`, the gradient of the output. They can be called in either order, and at different times: a pipeline passes
/// the gradient of the input on first, and computes the gradients of the parameters when it would otherwise wait.
pub trait Layer: Send + Sync {
    /// The name of the layer in errors: its type.
    fn name(&self) -> &'static str {
        std::any::type_name::<Self>()
    }

    /// Whether the layer may have parameters. A chain whose input needs no gradient stops behind the layers that begin it
    /// without parameters.
    fn has_parameters(&self) -> bool {
        true
    }

    /// Computes the output. Returns the output, and what the backward pass needs. The output is of the type
    /// [`Context::dtype`], unless the layer says that it is wide; an input may be of either type.
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)>;

    /// Computes and announces the gradients of the parameters. A layer without parameters has nothing to do.
    fn backward_weight(
        &self,
        _cx: &mut Context,
        _saved: &mut Saved,
        _d_output: &Tensor,
    ) -> Result<()> {
        Ok(())
    }

    /// Computes the gradient of the input, which is of the input's type; see [`Context::gradient_of`].
    fn backward_input(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor>;

    /// Both halves. The gradients of the parameters are announced before the gradient of the input is computed, so that
    /// their communication starts early. Returns the gradient of the input if `wants_input`.
    fn backward(
        &self,
        cx: &mut Context,
        mut saved: Saved,
        d_output: Tensor,
        wants_input: bool,
    ) -> Result<Option<Tensor>> {
        self.backward_weight(cx, &mut saved, &d_output)?;
        if wants_input {
            self.backward_input(cx, &mut saved, &d_output).map(Some)
        } else {
            Ok(None)
        }
    }
}

/// What the backward pass gives to a layer.
const D_OUTPUT: &str = "gradient of the output";

/// Names the layer in its errors about the tensors that it got.
impl Layer for Box<dyn Layer> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn has_parameters(&self) -> bool {
        (**self).has_parameters()
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let given = ("input", input.dtype());
        (**self).forward(cx, input).map_err(|error| error.in_layer(self.name(), given))
    }

    fn backward_weight(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<()> {
        let outcome = (**self).backward_weight(cx, saved, d_output);
        outcome.map_err(|error| error.in_layer(self.name(), (D_OUTPUT, d_output.dtype())))
    }

    fn backward_input(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        let outcome = (**self).backward_input(cx, saved, d_output);
        outcome.map_err(|error| error.in_layer(self.name(), (D_OUTPUT, d_output.dtype())))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: Saved,
        d_output: Tensor,
        wants_input: bool,
    ) -> Result<Option<Tensor>> {
        let given = (D_OUTPUT, d_output.dtype());
        let outcome = (**self).backward(cx, saved, d_output, wants_input);
        outcome.map_err(|error| error.in_layer(self.name(), given))
    }
}
