//! Open units: where the parameters and gradients of a unit are while a pass uses them.
//!
//! A pass opens a unit, uses it and closes it. The code that runs the pass decides where the view lies: in whole
//! storage, or in memory that holds only this unit for the moment. A view knows nothing of ranks.

use paceline_memory::Tensor;

use crate::{GradReadiness, Held, Layout, ModelError, Param, ParamId, Result, Storage, UnitId};

/// Where the values and the gradients of a unit are.
#[derive(Clone, Debug)]
pub struct View {
    values: Held,
    /// `None` if the view is for a pass that computes no gradients.
    grads: Option<Held>,
    starts_anew: bool,
}

impl View {
    /// All of `storage`, which every unit can use as its view. Its gradients accumulate over the passes of a step.
    pub fn whole(storage: &Storage) -> Self {
        let (values, grads) = (storage.values().clone(), Some(storage.grads().clone()));
        Self { values, grads, starts_anew: false }
    }

    /// Values and gradients in any memory that holds the unit. If the gradients start anew, the place holds none from an
    /// earlier pass, so the first use overwrites it.
    pub fn new(values: Held, grads: Option<Held>, starts_anew: bool) -> Self {
        Self { values, grads, starts_anew }
    }
}

fn of_param(all: &Held, param: &Param) -> Result<Tensor> {
    Ok(all.slice(param.range())?.view(param.shape)?)
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

    /// Begins a new step: all units are closed, also after a step that has failed, and all gradients start anew.
    pub fn begin_step(&mut self) {
        self.views.fill(None);
        self.readiness.start_anew();
    }

    pub(crate) fn is_open(&self, unit: UnitId) -> bool {
        self.views[unit.0].is_some()
    }

    pub(crate) fn open(&mut self, unit: UnitId, view: View) {
        if view.starts_anew && view.grads.is_some() {
            self.readiness.start_unit_anew(unit);
        }
        self.views[unit.0] = Some(view);
    }

    pub(crate) fn close(&mut self, unit: UnitId) {
        self.views[unit.0] = None;
    }

    /// Closes a unit after its backward pass. If the gradients of the unit have started anew, this sets the gradients that
    /// the pass has not written to zero.
    pub(crate) fn close_backward(&mut self, layout: &Layout, unit: UnitId) -> Result<()> {
        if self.views[unit.0].as_ref().is_some_and(|view| view.starts_anew) {
            for (id, param) in layout.trained() {
                if param.unit == unit && !self.readiness.is_written(id) {
                    self.grad(layout, id)?.fill_zero()?;
                }
            }
        }
        self.close(unit);
        Ok(())
    }

    /// The values of a parameter. Errors if its unit is closed.
    pub(crate) fn value(&self, layout: &Layout, id: ParamId) -> Result<Tensor> {
        let (param, view) = self.view(layout, id)?;
        of_param(&view.values, param)
    }

    /// The gradient of a parameter. Errors if its unit is closed, or open without gradients.
    pub(crate) fn grad(&self, layout: &Layout, id: ParamId) -> Result<Tensor> {
        let (param, view) = self.view(layout, id)?;
        let grads = view.grads.as_ref().ok_or_else(|| closed(layout, param, "the gradient"))?;
        of_param(grads, param)
    }

    fn view<'a>(&'a self, layout: &'a Layout, id: ParamId) -> Result<(&'a Param, &'a View)> {
        let param = layout.param(id);
        let view = self.views[param.unit.0].as_ref();
        Ok((param, view.ok_or_else(|| closed(layout, param, "the value"))?))
    }
}

fn closed(layout: &Layout, param: &Param, what: &'static str) -> ModelError {
    let unit = layout.unit(param.unit).name.clone();
    ModelError::Closed { unit, what, name: param.name.clone() }
}
