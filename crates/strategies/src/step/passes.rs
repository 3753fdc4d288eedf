//! The passes of one micro-batch through some blocks, which the executor puts in order.
//!
//! Input: a step in progress, and tensors. Output: activations and gradients, with spans of the main track.
//! This file knows no plans.

use std::ops::Range;

use paceline_kernels::loss::SUMS_LEN;
use paceline_memory::Tensor;
use paceline_model::{Context, Half, Layer, Saved, UnitId};

use super::TrainStep;
use crate::observer::Phase;
use crate::{AccumulationOrder, Replica, Result, StepState, span};

impl TrainStep<'_> {
    /// The forward pass of micro-batch number `at` through `blocks`, from the input of the first of them.
    /// Returns the output of the last block, and what the backward pass needs.
    pub(crate) fn forward(
        &mut self,
        at: usize,
        blocks: Range<usize>,
        input: Tensor,
    ) -> Result<(Tensor, Saved)> {
        let is_first = blocks.start == 0;
        let stage = self.replica().model.stage(blocks);
        let forward = |cx: &mut Context| stage.forward(cx, input);
        let outcome = self.timed(span::FORWARD, |step| step.pass(Some(at), forward))?;
        if is_first {
            let tensors = self.samples[at].batch.tensors().iter().enumerate();
            for (number, (name, tensor)) in tensors {
                self.observe_input((number, name), tensor)?;
            }
        }
        Ok(outcome)
    }

    /// The loss of micro-batch number `at`, from the output of the model's last block. Returns the gradient of the
    /// output. After the loss of the last micro-batch, the all-reduce of the losses starts.
    ///
    /// If the objective has parameters, their gradients are written here. With `saved` they are put off: the weight
    /// half of [`TrainStep::backward`] takes it.
    pub(crate) fn loss(
        &mut self,
        at: usize,
        output: Tensor,
        saved: Option<&mut Saved>,
    ) -> Result<Tensor> {
        let Replica { model, pipeline, .. } = self.replica();
        if model.objective.has_parameters() && saved.is_none() {
            self.begin_backward(at, &pipeline.units_of_objective(model))?;
        }
        self.timed(span::FORWARD, |step| {
            let StepState { loss_scale, ref sums, .. } = *step.hooks.cx.state;
            let sums = if step.replica().options.is_one_tree() {
                sums.own.slice(at * SUMS_LEN..(at + 1) * SUMS_LEN)?
            } else {
                sums.own.clone()
            };
            // The gradients of this rank's samples are scaled. A loss scale that is a power of two changes no digit.
            let num_averaged = step.replica().num_averaged() as f64;
            let scale = loss_scale * (num_averaged / step.count_of_all()? as f64);
            let d_output =
                step.pass(Some(at), |cx| model.differentiate(cx, &output, scale, &sums, saved))?;
            drop(output);
            step.num_losses += 1;
            if step.num_losses == step.micro_batches.len() && !step.defers() {
                step.send_loss()?;
            }
            Ok(d_output)
        })
    }

    /// The backward pass of micro-batch number `at` through `blocks`, or a half of it, from the gradient of their output and what
    /// their forward pass saved, where the input half leaves what the weight half needs. Returns the gradient of their input, if the
    /// half wants it. `of_loss` is for the weight half of the loss, if that was put off.
    pub(crate) fn backward(
        &mut self,
        at: usize,
        blocks: Range<usize>,
        half: Half,
        saved: &mut Saved,
        d_output: Tensor,
        of_loss: Option<Saved>,
    ) -> Result<Option<Tensor>> {
        let Replica { model, pipeline, .. } = self.replica();
        if half.writes_weights() {
            let of_blocks = model.blocks[blocks.clone()].iter().map(|block| block.unit);
            let of_objective = of_loss.iter().flat_map(|_| pipeline.units_of_objective(model));
            self.begin_backward(at, &of_blocks.chain(of_objective).collect::<Vec<_>>())?;
        }
        let stage = model.stage(blocks);
        self.timed(span::BACKWARD, |step| {
            step.pass(Some(at), |cx| {
                if let Some(of_loss) = of_loss {
                    model.backward_weight_of_objective(cx, &of_loss)?;
                }
                stage.backward(cx, saved, d_output, half)
            })
        })
    }

    /// Begins the part of a micro-batch's backward pass that writes the gradients of these units. If the micro-batch
    /// is new, ends the pass of the one before, or puts its gradients aside if they are added up as a tree.
    fn begin_backward(&mut self, at: usize, units: &[UnitId]) -> Result<()> {
        let Replica { storage, compute, options, pipeline, .. } = self.replica();
        let is_new = self.current != Some(at);
        if is_new {
            if self.current.is_some() && self.reduces_each() {
                self.hooks.is_last = false;
                self.hooks.end_backward(&self.units.readiness)?;
            }
            if self.current.is_some() && !options.no_sync {
                self.finish_gradients()?;
                self.begin_gradients()?;
            }
            self.current = Some(at);
            self.num_backward += 1;
        }
        let readiness = &mut self.units.readiness;
        if !pipeline.is_alone {
            readiness.begin_pass(|unit| units.contains(&unit));
        } else if is_new {
            // Also the units that this pass leaves out.
            readiness.begin_pass(|_| true);
        }
        if options.no_sync && options.accumulation == AccumulationOrder::Sequential {
            return Ok(());
        }
        let partial_sums = &mut self.hooks.cx.state.partial_sums;
        partial_sums.visit(compute, storage, readiness, at, units)
    }

    fn observe_input(&mut self, of: (usize, &str), tensor: &Tensor) -> Result<()> {
        let compute = &self.replica().compute;
        let Some(observer) = &mut self.hooks.cx.state.executor.observer else { return Ok(()) };
        observer.add(compute, Phase::Input, of, (tensor.dims(), 0), tensor)
    }

    /// Runs a part of a pass, with the hooks of the strategy.
    pub(super) fn pass<T>(
        &mut self,
        at: Option<usize>,
        run: impl FnOnce(&mut Context) -> paceline_model::Result<T>,
    ) -> Result<T> {
        let Replica { compute, storage, group, options, .. } = self.replica();
        self.hooks.is_last = self.num_backward == self.micro_batches.len();
        let first = self.hooks.cx.state.partial_sums.leaves().start;
        let has_statistics = at == Some(first) && group.rank() == 0;
        let keeps_statistics = options.is_one_tree() && !has_statistics;
        let samples = at.filter(|at| self.samples[*at].batch.num_samples() > 0);
        if let Some(observer) = &mut self.hooks.cx.state.executor.observer {
            observer.begin_pass(samples, self.samples.len(), group.rank());
        }
        let cx = Context::resumed(compute, storage, &mut self.units, &mut self.hooks);
        let mut cx = cx.keeping_statistics(keeps_statistics);
        if let Some(at) = at {
            cx = cx.with_batch(&self.samples[at].batch);
        }
        Ok(run(&mut cx)?)
    }

    /// Records a span of the main track, and ends the phase of memory of the same name.
    fn timed<T>(
        &mut self,
        name: &'static str,
        run: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        if self.is_graph() {
            return run(self);
        }
        let start_ns = self.hooks.cx.track.begin(name);
        let outcome = run(self)?;
        self.hooks.cx.track.end(name, start_ns);
        self.replica().compute.allocator.end_phase(name);
        Ok(outcome)
    }
}
