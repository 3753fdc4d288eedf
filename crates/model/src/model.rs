//! A model: a network, its parameters' layout and its loss.

use std::fmt;
use std::sync::Arc;

use crate::{Layer, Layout, Loss, Result};

/// A network with a loss, ready to be given storage.
pub struct Model {
    /// Its name on the command line and in reports.
    pub name: &'static str,
    /// The function it computes.
    pub network: Box<dyn Layer>,
    /// Where its parameters lie.
    pub layout: Arc<Layout>,
    /// What its output is measured against.
    pub loss: Loss,
    /// Elements of activations that one sample keeps until its backward pass, at least.
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
