//! The interface of a layer.
//!
//! Input: a batch, and parameters from the context. Output: the layer's output, and gradients written and announced. A
//! layer knows nothing of ranks or strategies.

use paceline_kernels::elementwise;
use paceline_memory::Tensor;

use crate::{Context, ModelError, Result};

/// The part of a backward pass that a call computes.
///
/// ```
/// use paceline_model::Half;
///
/// let first_layer = Half::Whole { wants_input: false };
/// assert!(first_layer.writes_weights() && !first_layer.wants_input());
/// assert!(!Half::Weight.wants_input());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Both halves. The gradients of the parameters are announced before the gradient of the input is computed, so that
    /// communication starts early.
    Whole {
        /// Whether somebody needs the gradient of the input.
        wants_input: bool,
    },
    /// The gradient of the input.
    Input {
        /// Whether somebody needs it. Without it, a chain stops at the gradient of its first layer's output.
        wants_input: bool,
    },
    /// The gradients of the parameters.
    Weight,
}

impl Half {
    /// Whether the gradients of the parameters are computed and announced.
    pub fn writes_weights(self) -> bool {
        !matches!(self, Self::Input { .. })
    }

    /// Whether the gradient of the input is computed and returned.
    pub fn wants_input(self) -> bool {
        matches!(self, Self::Whole { wants_input: true } | Self::Input { wants_input: true })
    }
}

/// Tensors that a layer saves for one micro-batch between its passes.
///
/// ```
/// use paceline_memory::{Allocator, Category, DType};
/// use paceline_model::Saved;
///
/// let input = Allocator::new().tensor(DType::F32, [4, 3], Category::Activations)?;
/// let saved = Saved::of([input]);
/// let [input] = saved.tensors()?;
/// assert_eq!(input.dims(), [4, 3]);
/// assert!(saved.tensors::<2>().is_err());
/// # Ok::<(), paceline_model::ModelError>(())
/// ```
#[derive(Debug, Default)]
pub struct Saved {
    tensors: Vec<Tensor>,
    /// Tensors that one half of the backward pass has computed and the other half needs too.
    kept: Vec<Tensor>,
    /// Whether the weight half does without the gradient of the output after the input half.
    is_kept_enough: bool,
    /// The saved tensors of the parts of a composed layer, in order of the forward pass. A layer around another one that
    /// has parameters of its own saves the inner layer's here, since that one may keep less for its weight half than the outer
    /// layer needs.
    pub parts: Vec<Saved>,
    /// The gradient of this part's output, until the other half of the backward pass has used it. It
    /// belongs to the chain that has this part.
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

    /// Keeps a tensor for the weight half, in place of the gradient of the output.
    pub(crate) fn keep_for_weights(&mut self, tensor: Tensor) {
        self.keep(tensor);
        self.is_kept_enough = true;
    }

    /// Called after the input half. Frees the gradient of the output if the weight half does not need it.
    pub(crate) fn release_d_output(&mut self) {
        if self.is_kept_enough {
            self.d_output = self.kept.first().cloned();
        }
    }

    /// Takes what the parts from number `at` on have saved.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        Self { parts: self.parts.split_off(at), ..Self::default() }
    }

    /// Puts `to` in the place of all that is in the memory of `from`.
    pub(crate) fn replace(&mut self, from: &Tensor, to: &Tensor) {
        let own = self.tensors.iter_mut().filter(|own| own.buffer().is_same(from.buffer()));
        own.for_each(|own| *own = to.clone());
        self.parts.iter_mut().for_each(|part| part.replace(from, to));
    }

    /// Whether a pass that comes later needs the memory of this tensor.
    pub(crate) fn holds(&self, tensor: &Tensor) -> bool {
        let own = self.tensors.iter().chain(&self.kept).chain(&self.d_output);
        own.into_iter().any(|own| own.buffer().is_same(tensor.buffer()))
            || self.parts.iter().any(|part| part.holds(tensor))
    }
}

/// A layer: a function with an explicit derivative.
///
/// A layer holds sizes and parameter numbers, but no values and no data of a batch. Data of a batch that the backward
/// pass needs go into [`Saved`], so that several micro-batches can be in progress at once.
///
/// The two halves of the backward pass can be called
/// together, or in either order and at different times: a pipeline passes the gradient of the input on first, and computes the
/// gradients of the parameters when it would otherwise wait.
///
/// A layer without parameters:
///
/// ```
/// use paceline_kernels::{Stored, dispatch};
/// use paceline_memory::Tensor;
/// use paceline_model::{Context, Half, Layer, LayoutBuilder, Result, Saved, gradcheck};
///
/// /// y = x^2
/// struct Square;
///
/// impl Layer for Square {
///     fn has_parameters(&self) -> bool {
///         false
///     }
///
///     fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
///         let output = cx.activation(input.shape())?;
///         dispatch!("square", input.dtype(), S => {
///             for (y, x) in output.write::<S>()?.iter_mut().zip(input.read::<S>()?.iter()) {
///                 *y = S::store(x.load() * x.load());
///             }
///             Ok((output, Saved::of([input.clone()])))
///         })
///     }
///
///     fn backward(
///         &self,
///         cx: &mut Context,
///         saved: &mut Saved,
///         d_output: Tensor,
///         _: Half,
///     ) -> Result<Option<Tensor>> {
///         let [input] = saved.tensors()?;
///         let d_input = cx.gradient_of(input)?;
///         dispatch!("square", input.dtype(), S => {
///             let (x, dy) = (input.read::<S>()?, d_output.read::<S>()?);
///             for (at, dx) in d_input.write::<S>()?.iter_mut().enumerate() {
///                 *dx = S::store((x[at].load() + x[at].load()) * dy[at].load());
///             }
///             Ok(Some(d_input))
///         })
///     }
/// }
///
/// let error = gradcheck::worst_error(&Square, &LayoutBuilder::new().finish(1), &[4, 3], 42)?;
/// assert!(error < 1e-7);
/// # Ok::<(), paceline_model::ModelError>(())
/// ```
///
/// [`Elementwise`](crate::layers::Elementwise) makes such layers of a function and its derivatives.
pub trait Layer: Send + Sync {
    /// The name of the layer in errors: its type, without modules and parameters.
    fn name(&self) -> &'static str {
        let path = std::any::type_name::<Self>().split('<').next().unwrap_or_default();
        path.rsplit("::").next().unwrap_or(path)
    }

    /// Whether the layer may have parameters. Without them, only the gradient of its input is wanted, and its
    /// backward pass need not look at the half. A chain whose input needs no gradient stops after the first layer that may
    /// have some.
    fn has_parameters(&self) -> bool {
        true
    }

    /// Returns the output, and what the backward pass needs. The output is of the type
    /// [`Context::dtype`], unless the layer says that it is wide; an input may be of either type.
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)>;

    /// Computes these halves of the backward pass from `d_output`, the gradient of the output. The gradients of the parameters
    /// are written and announced: see [`Context::gradient_ready`]. Returns the gradient of the input
    /// ([`Context::gradient_of`]) if [`Half::wants_input`].
    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>>;

    /// The same as [`Layer::forward`], with `onto` added to the output, which is of its shape and type. A layer whose last operation
    /// can add does without a further pass over both.
    fn forward_onto(
        &self,
        cx: &mut Context,
        input: Tensor,
        onto: &Tensor,
    ) -> Result<(Tensor, Saved)> {
        let (output, saved) = self.forward(cx, input)?;
        Ok((sum(cx, &saved, onto, output)?, saved))
    }

    /// The same as [`Layer::backward`], with `onto` added to the gradient of the input.
    fn backward_onto(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
        onto: &Tensor,
    ) -> Result<Option<Tensor>> {
        let d_input = self.backward(cx, saved, d_output, half)?;
        d_input.map(|d_input| sum(cx, saved, onto, d_input)).transpose()
    }
}

/// `x + y`, in the memory of `y` if nobody else needs `y`.
pub(crate) fn sum(cx: &Context, saved: &Saved, x: &Tensor, y: Tensor) -> Result<Tensor> {
    let is_needed = saved.holds(&y) || x.buffer().is_same(y.buffer());
    let sum = if is_needed { cx.scratch(y.dtype(), y.shape())? } else { y.clone() };
    if is_needed {
        cx.compute.copy(&y, &sum)?;
    }
    elementwise::add(cx.compute, x, &sum)?;
    Ok(sum)
}

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

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        if !half.wants_input() && !self.has_parameters() {
            return Ok(None);
        }
        let given = ("gradient of the output", d_output.dtype());
        let outcome = (**self).backward(cx, saved, d_output, half);
        outcome.map_err(|error| error.in_layer(self.name(), given))
    }

    fn forward_onto(
        &self,
        cx: &mut Context,
        input: Tensor,
        onto: &Tensor,
    ) -> Result<(Tensor, Saved)> {
        let given = ("input", input.dtype());
        let outcome = (**self).forward_onto(cx, input, onto);
        outcome.map_err(|error| error.in_layer(self.name(), given))
    }

    fn backward_onto(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
        onto: &Tensor,
    ) -> Result<Option<Tensor>> {
        let given = ("gradient of the output", d_output.dtype());
        let outcome = (**self).backward_onto(cx, saved, d_output, half, onto);
        outcome.map_err(|error| error.in_layer(self.name(), given))
    }
}
