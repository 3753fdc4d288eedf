//! The context of a pass: how a layer reaches parameters, gradients, memory and the batch.
//!
//! Input: storage, open units, and the hooks of the code that runs the pass. Output: tensors for layers, and calls of
//! the hooks. A context knows nothing of ranks or strategies.

use paceline_kernels::{Compute, cast};
use paceline_memory::{Category, DType, Shape, Tensor};

use crate::cache::KeyValueCache;
use crate::{
    Batch, BufferId, Half, Layer, ModelError, OpenUnits, ParamId, PartExchange, Result, Storage,
    UnitId, View,
};

/// The hooks by which a pass asks the code that runs it for views, and reports which gradients are final.
pub trait PassHooks {
    /// Opens a unit before it is used in a pass, in training and in evaluation: returns where its values are and, in a
    /// backward pass, where its gradients go. By default both are in `storage`.
    fn open(&mut self, storage: &Storage, _unit: UnitId, _pass: UnitPass) -> Result<View> {
        Ok(View::whole(storage))
    }

    /// Called after a unit was used in a pass, with its view no longer in use.
    fn close(&mut self, _unit: UnitId, _pass: UnitPass) -> Result<()> {
        Ok(())
    }

    /// Called when the gradient of a parameter is final.
    fn gradient_ready(&mut self, id: ParamId) -> Result<()>;

    /// Whether [`PassHooks::computed`] does anything.
    fn observes(&self) -> bool {
        false
    }

    /// Called in training with each tensor that layouts of ranks have in common. Does nothing by default.
    fn computed(&mut self, _of: Computed, _tensor: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Whether batch statistics are computed over all ranks that share the batch.
    fn syncs_statistics(&self) -> bool {
        false
    }

    /// Sums a small f64 tensor over all ranks that share the batch, in place. Does nothing by default.
    fn sum_over_ranks(&mut self, _sums: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Starts to exchange a tensor with the ranks that divide the layers. Nobody uses it before it has been finished. Does nothing by
    /// default.
    fn start_exchange(&mut self, _: PartExchange) -> Result<()> {
        Ok(())
    }

    /// Waits until the exchange that was started first is over.
    fn finish_exchange(&mut self) -> Result<()> {
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
    /// Only the output is needed. Some layers behave differently in training.
    Evaluate,
}

/// The reason why a unit is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitPass {
    /// A forward pass.
    Forward,
    /// A backward pass.
    Backward {
        /// Whether gradients of parameters are written. The input half of a backward pass writes none.
        writes_grads: bool,
    },
}

/// A tensor of a pass, by the part of the model to which it belongs.
#[derive(Clone, Copy)]
pub enum Computed<'a> {
    /// The output of a block, in the forward pass. If the backward pass computes it again, this is not reported.
    Output(&'a dyn Layer),
    /// The gradient of the input of a block.
    InputGradient(&'a dyn Layer),
    /// The gradient of the output of the last block.
    LossGradient,
    /// The gradient of a parameter from one micro-batch, before others are added.
    Gradient(ParamId),
}

const WHOLE_BACKWARD: UnitPass = UnitPass::Backward { writes_grads: true };

/// Access of a layer to parameters, memory and the batch during one pass.
///
/// A layer fetches parameters through the context when it uses them, and does not keep them. So the parameters of a closed
/// unit may be moved or freed.
pub struct Context<'a> {
    /// Threads, instructions and memory.
    pub compute: &'a Compute,
    pub(crate) storage: &'a Storage,
    units: &'a mut OpenUnits,
    pub(crate) hooks: &'a mut dyn PassHooks,
    batch: Option<&'a Batch>,
    cache: Option<&'a mut KeyValueCache>,
    mode: Mode,
    /// Whether running statistics stay as they are.
    keeps_statistics: bool,
}

impl<'a> Context<'a> {
    /// The context of a forward and a backward pass. Layers announce all gradients in this pass.
    pub fn training(
        compute: &'a Compute,
        storage: &'a Storage,
        units: &'a mut OpenUnits,
        hooks: &'a mut dyn PassHooks,
    ) -> Self {
        units.readiness.begin_pass(|_| true);
        Self::resumed(compute, storage, units, hooks)
    }

    /// The context of a pass that has begun in another context, for micro-batches that take turns.
    pub fn resumed(
        compute: &'a Compute,
        storage: &'a Storage,
        units: &'a mut OpenUnits,
        hooks: &'a mut dyn PassHooks,
    ) -> Self {
        Self::new(Mode::Train, compute, storage, units, hooks)
    }

    /// The context of a forward pass without a backward pass.
    pub fn evaluation(
        compute: &'a Compute,
        storage: &'a Storage,
        units: &'a mut OpenUnits,
        hooks: &'a mut dyn PassHooks,
    ) -> Self {
        Self::new(Mode::Evaluate, compute, storage, units, hooks)
    }

    fn new(
        mode: Mode,
        compute: &'a Compute,
        storage: &'a Storage,
        units: &'a mut OpenUnits,
        hooks: &'a mut dyn PassHooks,
    ) -> Self {
        let (batch, cache, keeps_statistics) = (None, None, mode == Mode::Evaluate);
        Self { compute, storage, units, hooks, batch, cache, mode, keeps_statistics }
    }

    /// The same, whose running statistics stay as they are if `keeps` is true.
    pub fn keeping_statistics(self, keeps: bool) -> Self {
        Self { keeps_statistics: keeps, ..self }
    }

    /// Begins another backward pass in the same context.
    pub fn begin_pass(&mut self) {
        self.units.readiness.begin_pass(|_| true);
    }

    /// The same, with the batch that objectives and some layers look at.
    pub fn with_batch(self, batch: &'a Batch) -> Self {
        Self { batch: Some(batch), ..self }
    }

    /// The same, with the keys and values of the text before the batch, for attention.
    pub(crate) fn with_cache(self, cache: Option<&'a mut KeyValueCache>) -> Self {
        Self { cache, ..self }
    }

    /// The keys and values of the text before the batch, if the pass goes on from one.
    pub(crate) fn cache(&mut self) -> Option<&mut KeyValueCache> {
        self.cache.as_deref_mut()
    }

    /// A tensor of the batch, such as its targets. Errors if the batch has none of this name.
    pub fn batch(&self, name: &'static str) -> Result<&'a Tensor> {
        let tensor = self.batch.and_then(|batch| batch.get(name));
        tensor.ok_or(ModelError::NotInBatch { name })
    }

    /// A tensor that the batch may have, such as the lengths of its sequences.
    pub fn optional(&self, name: &str) -> Option<&'a Tensor> {
        self.batch.and_then(|batch| batch.get(name))
    }

    /// Opens the root units, whose parameters several blocks use, for both passes, until [`Context::close_roots`].
    pub fn open_roots(&mut self) -> Result<()> {
        self.open_each(|unit| unit.is_root)
    }

    /// Opens all units, to run a layer outside of a block.
    pub fn open_all(&mut self) -> Result<()> {
        self.open_each(|_| true)
    }

    fn open_each(&mut self, is_meant: impl Fn(&crate::Unit) -> bool) -> Result<()> {
        let layout = self.storage.layout();
        for (at, _) in layout.units().iter().enumerate().filter(|(_, unit)| is_meant(unit)) {
            self.open(UnitId(at), self.whole_step())?;
        }
        Ok(())
    }

    /// Closes the root units.
    pub fn close_roots(&mut self) -> Result<()> {
        let layout = self.storage.layout();
        for (at, _) in layout.units().iter().enumerate().filter(|(_, unit)| unit.is_root) {
            self.close(UnitId(at), self.whole_step())?;
        }
        Ok(())
    }

    /// The pass for which a unit is opened that stays open.
    fn whole_step(&self) -> UnitPass {
        match self.mode {
            Mode::Train => WHOLE_BACKWARD,
            Mode::Evaluate => UnitPass::Forward,
        }
    }

    /// Runs a part of a forward pass with a unit open. An open unit stays open.
    pub fn forward_unit<T>(
        &mut self,
        unit: UnitId,
        run: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.within(unit, UnitPass::Forward, run)
    }

    /// Runs a part of a backward pass with a unit open. An open unit stays open.
    pub fn backward_unit<T>(
        &mut self,
        unit: UnitId,
        half: Half,
        run: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.within(unit, UnitPass::Backward { writes_grads: half.writes_weights() }, run)
    }

    fn within<T>(
        &mut self,
        unit: UnitId,
        pass: UnitPass,
        run: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        if self.units.is_open(unit) {
            return run(self);
        }
        self.open(unit, pass)?;
        let outcome = run(self)?;
        self.close(unit, pass)?;
        Ok(outcome)
    }

    fn open(&mut self, unit: UnitId, pass: UnitPass) -> Result<()> {
        let view = self.hooks.open(self.storage, unit, pass)?;
        self.units.open(unit, view);
        Ok(())
    }

    fn close(&mut self, unit: UnitId, pass: UnitPass) -> Result<()> {
        match pass {
            WHOLE_BACKWARD => self.units.close_backward(self.storage.layout(), unit)?,
            _ => self.units.close(unit),
        }
        self.hooks.close(unit, pass)
    }

    pub(crate) fn unit_name(&self, unit: UnitId) -> &str {
        &self.storage.layout().unit(unit).name
    }

    /// The purpose of the pass.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Reports a tensor of a training pass (rows, columns), with the rows of all ranks that divide the layers.
    pub(crate) fn computed(&mut self, of: Computed, tensor: &Tensor) -> Result<()> {
        if self.mode == Mode::Evaluate || !self.hooks.observes() {
            return Ok(());
        }
        let tensor = self.all_rows(tensor)?;
        self.hooks.computed(of, &tensor)
    }

    /// Runs a forward pass again within a backward pass. Running statistics stay as they are.
    pub fn recompute<T>(&mut self, forward: impl FnOnce(&mut Self) -> T) -> T {
        let outer = std::mem::replace(&mut self.keeps_statistics, true);
        let outcome = forward(self);
        self.keeps_statistics = outer;
        outcome
    }

    /// Whether a layer updates its running statistics in this pass.
    pub fn updates_statistics(&self) -> bool {
        self.mode == Mode::Train && !self.keeps_statistics
    }

    /// The type of the activations that a layer writes, unless they are wide. An input may be of another type, such as
    /// integers; its gradient has the same type.
    pub fn dtype(&self) -> DType {
        self.storage.precision().compute
    }

    /// The type of parameters, of statistics that a layer saves, and of activations that many layers add to, such as the
    /// residual stream of a transformer. It is f32 if the parameters of a model that is not trained were rounded to 16 bits.
    pub fn wide_dtype(&self) -> DType {
        match self.storage.precision().master {
            DType::BF16 | DType::F16 => DType::F32,
            master => master,
        }
    }

    /// The same numbers in the type [`Context::wide_dtype`].
    pub fn widened(&self, tensor: Tensor) -> Result<Tensor> {
        if tensor.dtype() == self.wide_dtype() {
            return Ok(tensor);
        }
        let widened = self.wide_activation(tensor.shape())?;
        cast::widen(self.compute, &tensor, &widened)?;
        Ok(widened)
    }

    /// A parameter, for reading. Errors if the unit of the parameter is closed.
    pub fn param(&self, id: ParamId) -> Result<Tensor> {
        self.units.value(self.storage.layout(), id)
    }

    /// Parameters that lie side by side in one unit, as a flat tensor, for reading. Errors unless they do, or if the unit
    /// is closed.
    pub fn params(&self, ids: &[ParamId]) -> Result<Tensor> {
        self.units.values(self.storage.layout(), ids)
    }

    /// A buffer, for reading. A training pass may update it.
    pub fn buffer(&self, id: BufferId) -> Result<Tensor> {
        self.storage.buffer(id)
    }

    /// Whether a parameter is trained. A layer computes no gradients of other parameters.
    pub fn trains(&self, id: ParamId) -> bool {
        !self.storage.layout().param(id).is_frozen
    }

    /// The memory of a parameter's gradient. The layer overwrites it, or adds to it if
    /// [`Context::accumulates`] is true. Errors if the unit of the parameter is closed.
    pub fn grad(&self, id: ParamId) -> Result<Tensor> {
        self.units.grad(self.storage.layout(), id)
    }

    /// The memory of the gradients of parameters that lie side by side in one unit, as a flat tensor: see
    /// [`Context::grad`]. All of them accumulate, or none does.
    pub fn grads(&self, ids: &[ParamId]) -> Result<Tensor> {
        self.units.grads(self.storage.layout(), ids)
    }

    /// Whether the layer must add to a gradient instead of overwriting it, because an earlier micro-batch of
    /// the step, or another layer that uses the same parameter, has already written it to this view.
    pub fn accumulates(&self, id: ParamId) -> bool {
        self.mode == Mode::Train && self.units.readiness.is_written(id)
    }

    /// Announces that a layer has written its part of a parameter's gradient. After the last layer that uses
    /// the parameter, the gradient is final and the hook is called.
    pub fn gradient_ready(&mut self, id: ParamId) -> Result<()> {
        if self.mode == Mode::Evaluate {
            return Ok(());
        }
        if self.hooks.observes() && !self.accumulates(id) {
            let grad = self.grad(id)?;
            self.hooks.computed(Computed::Gradient(id), &grad)?;
        }
        let is_final = self.units.readiness.write(id).map_err(|problem| {
            let name = self.storage.layout().param(id).name.clone();
            ModelError::Announcement { name, problem }
        })?;
        if is_final { self.hooks.gradient_ready(id) } else { Ok(()) }
    }

    /// Whether batch statistics are computed over all ranks that share the batch.
    pub fn syncs_statistics(&self) -> bool {
        self.mode == Mode::Train && self.hooks.syncs_statistics()
    }

    /// Sums a small f64 tensor over all ranks that share the batch, in place; see
    /// [`Context::syncs_statistics`].
    pub fn sum_over_ranks(&mut self, sums: &Tensor) -> Result<()> {
        match self.mode {
            Mode::Train => self.hooks.sum_over_ranks(sums),
            Mode::Evaluate => Ok(()),
        }
    }

    /// Allocates memory for a layer's output, of the type [`Context::dtype`]. Its contents are unspecified.
    pub fn activation(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.scratch(self.dtype(), shape)
    }

    /// Allocates memory of the type [`Context::wide_dtype`]. Its contents are unspecified.
    pub fn wide_activation(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.scratch(self.wide_dtype(), shape)
    }

    /// Allocates memory for the gradient of an activation: of its type and its shape. Its contents are unspecified.
    pub fn gradient_of(&self, activation: &Tensor) -> Result<Tensor> {
        self.scratch(activation.dtype(), activation.shape())
    }

    /// Allocates memory of any type, to save between passes or to use within one. Its contents are unspecified.
    pub fn scratch(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        Ok(self.compute.allocator.tensor(dtype, shape, Category::Activations)?)
    }
}
