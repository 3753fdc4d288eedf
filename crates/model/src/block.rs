//! A block: a layer whose parameters are opened before each use and closed after it.

use std::fmt;

use paceline_memory::Tensor;

use crate::layers::Checkpointed;
use crate::{Computed, Context, Half, Layer, LayoutBuilder, Result, Saved, UnitBuilder, UnitId};

/// A part of a model, with the unit that holds its parameters. A pass opens the unit before it runs the block and
/// closes it afterwards. A block may also use parameters of root units, which are open for the whole step.
///
/// [`LayoutBuilder::block`] makes one with a unit of its own: see [`Model`](crate::Model).
pub struct Block {
    /// The unit that holds the block's parameters.
    pub unit: UnitId,
    layer: Box<dyn Layer>,
}

impl Block {
    /// A block that computes `layer`, whose parameters are those of `unit`.
    pub fn new(unit: UnitId, layer: impl Layer + 'static) -> Self {
        Self { unit, layer: Box::new(layer) }
    }

    /// The same block with activation checkpointing: see [`Checkpointed`].
    pub fn checkpointed(self) -> Self {
        Self::new(self.unit, Checkpointed(self.layer))
    }
}

impl LayoutBuilder {
    /// A block with a unit of its own, to which the parameters of its layer belong.
    pub fn block<L: Layer + 'static>(
        &mut self,
        name: impl Into<String>,
        layer: impl FnOnce(&mut UnitBuilder) -> L,
    ) -> Block {
        let mut unit = self.unit(name);
        let layer = layer(&mut unit);
        Block::new(unit.id, layer)
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:?})", self.unit)
    }
}

impl Layer for Block {
    fn name(&self) -> &'static str {
        self.layer.name()
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let outcome = cx.forward_unit(self.unit, |cx| self.layer.forward(cx, input));
        let outcome = outcome.map_err(|error| error.in_unit(cx.unit_name(self.unit)))?;
        cx.computed(Computed::Output(self), &outcome.0)?;
        Ok(outcome)
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let run = |cx: &mut Context| self.layer.backward(cx, saved, d_output, half);
        let outcome = cx.backward_unit(self.unit, half, run);
        let d_input = outcome.map_err(|error| error.in_unit(cx.unit_name(self.unit)))?;
        d_input.iter().try_for_each(|of| cx.computed(Computed::InputGradient(self), of))?;
        Ok(d_input)
    }
}
