//! The interface of a layer, and the context in which it runs.
//!
//! Input: a batch, and parameters from storage. Output: the layer's output, and gradients written to storage
//! and announced. A layer knows nothing of ranks or strategies.

use paceline_kernels::Compute;
use paceline_memory::{Category, DType, Shape, Tensor};

use crate::{BufferId, GradientBooks, ModelError, ParamId, Result, Storage};

/// The hooks by which a pass reports to, and asks, the code that runs it.
pub trait PassHooks {
    /// Called when the gradient of a parameter is final.
    fn gradient_ready(&mut self, id: ParamId) -> Result<()>;

    /// Whether batch statistics are computed over all ranks that share the batch.
    fn syncs_statistics(&self) -> bool {
        false
    }

    /// Sums a small f64 tensor over all ranks that share the batch, in place. Does nothing by default.
    fn sum_over_ranks(&mut self, _sums: &Tensor) -> Result<()> {
        Ok(())
    }
}

/// A closure as hooks that are called only when a gradient is final.
impl<F: FnMut(ParamId) -> Result<()>> PassHooks for F {
    fn gradient_ready(&mut self, id: ParamId) -> Result<()> {
        self(id)
    }
}

/// The purpose of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A backward pass follows.
    Train,
    /// Only the output is needed. Layers behave as in evaluation, which for some differs from training.
    Evaluate,
}

/// What a layer works with during one pass.
///
/// A layer fetches parameters through the context when it uses them, and does not keep them. So the owner of
/// the storage may move or free parameters between the passes.
pub struct Context<'a> {
    /// Threads, instructions and memory.
    pub compute: &'a Compute,
    storage: &'a Storage,
    /// Whether a forward pass runs for the second time; see [`Context::recompute`].
    recomputes: bool,
    /// `None` if the pass computes no gradients.
    training: Option<(&'a mut GradientBooks, &'a mut dyn PassHooks)>,
}

impl<'a> Context<'a> {
    /// The context of a forward and a backward pass over `storage`. `books` records which gradients the step
    /// has already written.
    pub fn training(
        compute: &'a Compute,
        storage: &'a Storage,
        books: &'a mut GradientBooks,
        hooks: &'a mut dyn PassHooks,
    ) -> Self {
        books.begin_pass();
        Self { compute, storage, recomputes: false, training: Some((books, hooks)) }
    }

    /// The context of a forward pass without a backward pass.
    pub fn evaluation(compute: &'a Compute, storage: &'a Storage) -> Self {
        Self { compute, storage, recomputes: false, training: None }
    }

    /// The purpose of the pass.
    pub fn mode(&self) -> Mode {
        if self.training.is_some() { Mode::Train } else { Mode::Evaluate }
    }

    /// Runs a forward pass again within a backward pass, to compute what it saves for the second time. Running statistics
    /// stay as they are.
    pub fn recompute<T>(&mut self, forward: impl FnOnce(&mut Self) -> T) -> T {
        let outer = std::mem::replace(&mut self.recomputes, true);
        let outcome = forward(self);
        self.recomputes = outer;
        outcome
    }

    /// Whether a layer updates its running statistics in this pass.
    pub fn updates_statistics(&self) -> bool {
        self.training.is_some() && !self.recomputes
    }

    /// The type in which layers compute: that of activations and of gradients that go from layer to layer. An input may be
    /// of another type, such as integers.
    pub fn dtype(&self) -> DType {
        self.storage.values().dtype()
    }

    /// A parameter, for reading.
    pub fn param(&self, id: ParamId) -> Result<Tensor> {
        self.storage.value(id)
    }

    /// A buffer, for reading. A training pass may update it.
    pub fn buffer(&self, id: BufferId) -> Result<Tensor> {
        self.storage.buffer(id)
    }

    /// Whether a parameter is trained. A layer computes no gradient of a parameter that is not.
    pub fn trains(&self, id: ParamId) -> bool {
        !self.storage.layout().param(id).is_frozen
    }

    /// The memory of a parameter's gradient. The layer overwrites it, or adds to it if
    /// [`Context::accumulates`] is true.
    pub fn grad(&self, id: ParamId) -> Result<Tensor> {
        self.storage.grad(id)
    }

    /// Whether the layer must add to a gradient instead of overwriting it, because an earlier micro-batch of
    /// the step, or another layer that uses the same parameter, has already written it.
    pub fn accumulates(&self, id: ParamId) -> bool {
        self.training.as_ref().is_some_and(|(books, _)| books.is_written(id))
    }

    /// Announces that a layer has written its part of a parameter's gradient. After the last layer that uses
    /// the parameter, the gradient is final and the hook is called.
    pub fn gradient_ready(&mut self, id: ParamId) -> Result<()> {
        let Some((books, hooks)) = &mut self.training else { return Ok(()) };
        let is_final = books.write(id).map_err(|problem| {
            let name = self.storage.layout().param(id).name.clone();
            ModelError::Announcement { name, problem }
        })?;
        if is_final { hooks.gradient_ready(id) } else { Ok(()) }
    }

    /// Whether batch statistics are computed over all ranks that share the batch.
    pub fn syncs_statistics(&self) -> bool {
        self.training.as_ref().is_some_and(|(_, hooks)| hooks.syncs_statistics())
    }

    /// Sums a small f64 tensor over all ranks that share the batch, in place; see
    /// [`Context::syncs_statistics`].
    pub fn sum_over_ranks(&mut self, sums: &Tensor) -> Result<()> {
        match &mut self.training {
            Some((_, hooks)) => hooks.sum_over_ranks(sums),
            None => Ok(()),
        }
    }

    /// Allocates memory for a layer's output, or for a gradient that goes from layer to layer, of the type
    /// [`Context::dtype`]. Its contents are unspecified.
    pub fn activation(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.scratch(self.dtype(), shape)
    }

    /// Allocates memory of any type for what a layer saves between its passes, or needs within one. Its contents are
    /// unspecified.
    pub fn scratch(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        Ok(self.compute.allocator.tensor(dtype, shape, Category::Activations)?)
    }
}

/// What a layer saves for one micro-batch between its passes.
#[derive(Debug, Default)]
pub struct Saved {
    tensors: Vec<Tensor>,
    /// What one half of the backward pass has computed and the other half needs too.
    kept: Vec<Tensor>,
    /// What the parts of a composed layer save, in order of the forward pass.
    pub parts: Vec<Saved>,
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
/// A layer holds sizes and parameter numbers, but no values, and nothing of a batch. What it needs of a batch
/// goes into [`Saved`], so that several micro-batches can be in progress at once.
///
/// The backward pass has two halves, the gradients of the parameters and the gradient of the input. Both take
/// `d_output`, the gradient of the output. They can be called in either order, and at different times: a pipeline passes
/// the gradient of the input on first, and computes the gradients of the parameters when it would otherwise wait.
pub trait Layer: Send + Sync {
    /// Computes the output, and returns with it what the backward pass will need.
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

    /// Computes the gradient of the input.
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
        match wants_input {
            true => self.backward_input(cx, &mut saved, &d_output).map(Some),
            false => Ok(None),
        }
    }
}

impl Layer for Box<dyn Layer> {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        (**self).forward(cx, input)
    }

    fn backward_weight(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<()> {
        (**self).backward_weight(cx, saved, d_output)
    }

    fn backward_input(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        (**self).backward_input(cx, saved, d_output)
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: Saved,
        d_output: Tensor,
        wants_input: bool,
    ) -> Result<Option<Tensor>> {
        (**self).backward(cx, saved, d_output, wants_input)
    }
}
