//! A model: a network, the layout of its parameters, and a loss.

use std::fmt;
use std::sync::Arc;

use crate::{Layer, Layout, Loss, Result};

/// A network with a loss, but without storage.
pub struct Model {
    /// The name on the command line and in reports.
    pub name: &'static str,
    /// The function that the model computes.
    pub network: Box<dyn Layer>,
    /// Where the parameters lie.
    pub layout: Arc<Layout>,
    /// The loss.
    pub loss: Loss,
    /// A lower bound of the activations, in elements, that one sample keeps until its backward pass.
    pub activation_elems: usize,
}

impl Model {
    /// Freezes the units of these names: see [`Layout::with_frozen`].
    pub fn freeze(&mut self, units: &[String]) -> Result<()> {
        self.layout = Arc::new(self.layout.with_frozen(units)?);
        Ok(())
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Model({}, {} parameters)", self.name, self.layout.num_params())
    }
}
