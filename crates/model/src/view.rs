//! Open units: where the parameters and gradients of a unit are while a pass uses them.
//!
//! A pass opens a unit, uses it and closes it. The code that runs the pass decides where the view lies: in whole
//! storage, or in memory that holds only this unit for the moment. A view knows nothing of ranks.

use std::ops::Range;

use paceline_memory::Tensor;

use crate::{GradReadiness, Held, Layout, ModelError, Param, ParamId, Result, Storage, UnitId};

/// Where the values and the gradients of a unit are.
#[derive(Clone, Debug)]
pub struct View {
    values: Held,
    /// `None` if the view is for a pass that computes no gradients.
    grads: Option<Held>,
    starts_over: bool,
}

impl View {
    /// All of `storage`, which every unit can use as its view. Its gradients accumulate over the passes of a step.
    pub fn whole(storage: &Storage) -> Self {
        let (values, grads) = (storage.values().clone(), Some(storage.grads().clone()));
        Self { values, grads, starts_over: false }
    }

    /// Values and gradients in any memory that holds the unit. If the gradients start over, the first use overwrites those of
    /// an earlier pass.
    pub fn new(values: Held, grads: Option<Held>, starts_over: bool) -> Self {
        Self { values, grads, starts_over }
    }
}

/// The units of a model during a step: the views of the open units, and which gradients are written.
#[derive(Clone, Debug, Default)]
pub struct OpenUnits {
    /// By the number of the unit.
    views: Vec<Option<View>>,
    /// Which gradients are written, and which are final.
    pub readiness: GradReadiness,
}

impl OpenUnits {
    /// All units are closed, and no gradient is written.
    pub fn new(layout: &Layout) -> Self {
        let views = layout.units().iter().map(|_| None).collect();
        Self { views, readiness: GradReadiness::new(layout) }
    }

    /// Begins a new step: all units are closed, also after a step that has failed, and all gradients start again.
    /// See [`GradReadiness::begin_step`].
    pub fn begin_step(&mut self, num_passes: usize, each_pass: bool) {
        self.views.fill(None);
        self.readiness.begin_step(num_passes, each_pass);
    }

    pub(crate) fn is_open(&self, unit: UnitId) -> bool {
        self.views[unit.0].is_some()
    }

    pub(crate) fn open(&mut self, unit: UnitId, view: View) {
        if view.starts_over && view.grads.is_some() {
            self.readiness.start_unit_over(unit);
        }
        self.views[unit.0] = Some(view);
    }

    pub(crate) fn close(&mut self, unit: UnitId) {
        self.views[unit.0] = None;
    }

    /// Closes a unit after its backward pass. If its gradients have started again, those that
    /// the pass has not written are set to zero.
    pub(crate) fn close_backward(&mut self, layout: &Layout, unit: UnitId) -> Result<()> {
        if self.views[unit.0].as_ref().is_some_and(|view| view.starts_over) {
            for (id, param) in layout.trained() {
                if param.unit == unit && !self.readiness.is_written(id) {
                    self.grad(layout, id)?.fill_zero()?;
                }
            }
        }
        self.close(unit);
        Ok(())
    }

    /// The values of parameters that lie side by side in one unit, as a flat tensor. Errors unless they do, or if the
    /// unit is closed.
    pub(crate) fn values(&self, layout: &Layout, ids: &[ParamId]) -> Result<Tensor> {
        let (range, first) = side_by_side(layout, ids)?;
        self.view(layout, first)?.1.values.slice(range)
    }

    /// The gradients of parameters that lie side by side in one unit, as a flat tensor. Errors as
    /// [`OpenUnits::values`], or if the unit is open without gradients.
    pub(crate) fn grads(&self, layout: &Layout, ids: &[ParamId]) -> Result<Tensor> {
        let (range, first) = side_by_side(layout, ids)?;
        let (param, view) = self.view(layout, first)?;
        let grads = view.grads.as_ref().ok_or_else(|| closed(layout, param, "the gradient"))?;
        grads.slice(range)
    }

    /// The values of a parameter. Errors if its unit is closed.
    pub(crate) fn value(&self, layout: &Layout, id: ParamId) -> Result<Tensor> {
        Ok(self.values(layout, &[id])?.view(layout.param(id).shape)?)
    }

    /// The gradient of a parameter. Errors if its unit is closed, or open without gradients.
    pub(crate) fn grad(&self, layout: &Layout, id: ParamId) -> Result<Tensor> {
        Ok(self.grads(layout, &[id])?.view(layout.param(id).shape)?)
    }

    fn view<'a>(&'a self, layout: &'a Layout, id: ParamId) -> Result<(&'a Param, &'a View)> {
        let param = layout.param(id);
        let view = self.views[param.unit.0].as_ref();
        Ok((param, view.ok_or_else(|| closed(layout, param, "the value"))?))
    }
}

/// The elements of parameters that lie side by side in one unit, and the first parameter.
fn side_by_side(layout: &Layout, ids: &[ParamId]) -> Result<(Range<usize>, ParamId)> {
    let params = || ids.iter().map(|id| layout.param(*id));
    let meet = |(a, b): (&Param, &Param)| a.unit == b.unit && a.range().end == b.start;
    match (ids, params().next_back()) {
        (&[first, ..], Some(last)) if params().zip(params().skip(1)).all(meet) => {
            Ok((layout.param(first).start..last.range().end, first))
        }
        _ => {
            let names: Vec<&str> = params().map(|param| &*param.name).collect();
            let reason = format!("the parameters {} do not lie side by side", names.join(", "));
            Err(ModelError::Config(reason))
        }
    }
}

fn closed(layout: &Layout, param: &Param, what: &'static str) -> ModelError {
    let unit = layout.unit(param.unit).name.clone();
    ModelError::Closed { unit, what, name: param.name.clone() }
}
