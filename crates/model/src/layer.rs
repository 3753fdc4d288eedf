//! The interface of a layer, and what it works with.

use paceline_kernels::Compute;
use paceline_memory::{Category, DType, Shape, Tensor};

use crate::{BufferId, GradientBooks, ModelError, ParamId, Result, Storage};

/// Which gradients a backward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Those of the parameters, announced first, then that of the input.
    Both,
    /// That of the input only.
    Input,
    /// Those of the parameters only; the layer returns no input gradient if it can avoid it.
    Weight,
}

/// What a pass tells to, and asks of, whoever runs it.
pub trait PassHooks {
    /// The gradient of a parameter is final.
    fn gradient_ready(&mut self, id: ParamId) -> Result<()>;

    /// Whether statistics of the batch are to be taken over all who share it.
    fn syncs_statistics(&self) -> bool {
        false
    }

    /// Adds up a small f64 tensor over all who share the batch, in place. As it is, nobody does.
    fn sum_over_ranks(&mut self, _sums: &Tensor) -> Result<()> {
        Ok(())
    }
}

/// Who only wants to know when gradients are final.
impl<F: FnMut(ParamId) -> Result<()>> PassHooks for F {
    fn gradient_ready(&mut self, id: ParamId) -> Result<()> {
        self(id)
    }
}

/// What a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A backward pass follows.
    Train,
    /// Only the output counts; layers that behave otherwise in training do not now.
    Evaluate,
}

/// What a layer computes with during one pass.
///
/// Parameters are fetched through it when they are used and not kept, so that whoever owns the
/// storage may move or free them between the passes.
pub struct Context<'a> {
    /// Threads, instructions and memory.
    pub compute: &'a Compute,
    storage: &'a Storage,
    /// None when the pass has no gradients.
    training: Option<(&'a mut GradientBooks, &'a mut dyn PassHooks)>,
}

impl<'a> Context<'a> {
    /// For a forward and a backward pass over `storage`, as far as the step has come by `books`.
    pub fn training(
        compute: &'a Compute,
        storage: &'a Storage,
        books: &'a mut GradientBooks,
        hooks: &'a mut dyn PassHooks,
    ) -> Self {
        books.begin_pass();
        Self { compute, storage, training: Some((books, hooks)) }
    }

    /// For a forward pass alone.
    pub fn evaluation(compute: &'a Compute, storage: &'a Storage) -> Self {
        Self { compute, storage, training: None }
    }

    /// What the pass is for.
    pub fn mode(&self) -> Mode {
        if self.training.is_some() { Mode::Train } else { Mode::Evaluate }
    }

    /// A parameter, to be read.
    pub fn param(&self, id: ParamId) -> Result<Tensor> {
        self.storage.value(id)
    }

    /// A buffer, to be read, and updated by a pass in training.
    pub fn buffer(&self, id: BufferId) -> Result<Tensor> {
        self.storage.buffer(id)
    }

    /// Whether a parameter is trained. A layer computes no gradient of one that is not.
    pub fn trains(&self, id: ParamId) -> bool {
        !self.storage.layout().param(id).is_frozen
    }

    /// The place for a parameter's gradient, to be written, or added to if
    /// [`Context::accumulates`].
    pub fn grad(&self, id: ParamId) -> Result<Tensor> {
        self.storage.grad(id)
    }

    /// Whether a gradient is added to what is there: an earlier micro-batch of the step, or another
    /// layer that uses the same parameter, has been here.
    pub fn accumulates(&self, id: ParamId) -> bool {
        self.training.as_ref().is_some_and(|(books, _)| books.is_written(id))
    }

    /// Announces that a layer has done its part of a parameter's gradient. After the last layer that
    /// uses the parameter, the gradient is final.
    pub fn gradient_ready(&mut self, id: ParamId) -> Result<()> {
        let Some((books, hooks)) = &mut self.training else { return Ok(()) };
        let is_final = books.write(id).map_err(|problem| {
            let name = self.storage.layout().param(id).name.clone();
            ModelError::Announcement { name, problem }
        })?;
        if is_final { hooks.gradient_ready(id) } else { Ok(()) }
    }

    /// Whether statistics of the batch are to be taken over all who share it.
    pub fn syncs_statistics(&self) -> bool {
        self.training.as_ref().is_some_and(|(_, hooks)| hooks.syncs_statistics())
    }

    /// Adds up a small f64 tensor over all who share the batch, in place; see
    /// [`Context::syncs_statistics`].
    pub fn sum_over_ranks(&mut self, sums: &Tensor) -> Result<()> {
        match &mut self.training {
            Some((_, hooks)) => hooks.sum_over_ranks(sums),
            None => Ok(()),
        }
    }

    /// Memory for a layer's output, or for a gradient that travels between layers. Its contents are
    /// unspecified.
    pub fn activation(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        Ok(self.compute.allocator.tensor(dtype, shape, Category::Activations)?)
    }
}

/// What a layer keeps of one micro-batch between its two passes.
#[derive(Debug, Default)]
pub struct Saved {
    tensors: Vec<Tensor>,
    /// What the parts of a composed layer keep, in order of the forward pass.
    pub parts: Vec<Saved>,
}

impl Saved {
    /// Keeps these tensors.
    pub fn of<const N: usize>(tensors: [Tensor; N]) -> Self {
        Self { tensors: tensors.into(), parts: Vec::new() }
    }

    /// The tensors given to [`Saved::of`]; an error if there were not exactly `N`.
    pub fn tensors<const N: usize>(&self) -> Result<&[Tensor; N]> {
        let found = self.tensors.len();
        self.tensors.as_slice().try_into().map_err(|_| ModelError::Saved { expected: N, found })
    }
}

/// A layer: a function with an explicit derivative.
///
/// It holds sizes and parameter numbers, never values, and nothing of a batch: that is what
/// [`Saved`] is for, so that several micro-batches can be under way.
pub trait Layer: Send + Sync {
    /// Computes the output, and what the backward pass will need.
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)>;

    /// Computes gradients from `d_output`, that of the output. With [`Which::Both`] the gradients of
    /// parameters come first and are announced before the input's is computed, so that their
    /// communication starts early. May free what `saved` holds, except with [`Which::Input`].
    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        which: Which,
    ) -> Result<Option<Tensor>>;
}
