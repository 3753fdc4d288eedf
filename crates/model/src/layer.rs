//! The interface of a layer, and what it works with.

use paceline_kernels::Compute;
use paceline_memory::{Category, DType, Shape, Tensor};

use crate::{ModelError, ParamId, Result, Storage};

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

/// What a layer computes with during one pass.
///
/// Parameters are fetched through it when they are used and not kept, so that whoever owns the
/// storage may move or free them between the passes.
pub struct Context<'a> {
    /// Threads, instructions and memory.
    pub compute: &'a Compute,
    storage: &'a Storage,
    accumulate: bool,
    ready: &'a mut dyn FnMut(ParamId) -> Result<()>,
}

impl<'a> Context<'a> {
    /// A context over `storage`. Gradients are added to what is there if `accumulate`, else they
    /// overwrite it; `ready` is called with each parameter whose gradient is final.
    pub fn new(
        compute: &'a Compute,
        storage: &'a Storage,
        accumulate: bool,
        ready: &'a mut dyn FnMut(ParamId) -> Result<()>,
    ) -> Self {
        Self { compute, storage, accumulate, ready }
    }

    /// A parameter, to be read.
    pub fn param(&self, id: ParamId) -> Result<Tensor> {
        self.storage.value(id)
    }

    /// The place for a parameter's gradient, to be written, or added to if
    /// [`Context::accumulates`].
    pub fn grad(&self, id: ParamId) -> Result<Tensor> {
        self.storage.grad(id)
    }

    /// Whether gradients are added to what is there.
    pub fn accumulates(&self) -> bool {
        self.accumulate
    }

    /// Announces that the gradient of a parameter is final.
    pub fn gradient_ready(&mut self, id: ParamId) -> Result<()> {
        (self.ready)(id)
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
