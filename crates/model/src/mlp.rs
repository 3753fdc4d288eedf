//! A multi-layer perceptron whose sizes the caller chooses.

use paceline_kernels::linear::Activation;

use crate::layers::{Linear, Relu, Sequence};
use crate::{Block, LayoutBuilder, MeanSquaredError, Model, ModelError, Result, UnitId};

/// `num_layers` linear layers with ReLU, then a linear layer without ReLU. The loss is the mean squared error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlpConfig {
    /// Number of inputs.
    pub input_dim: usize,
    /// Width of the hidden layers.
    pub hidden_dim: usize,
    /// Number of outputs.
    pub output_dim: usize,
    /// Number of hidden layers.
    pub num_layers: usize,
    /// Whether all hidden layers after the first use the same parameters.
    pub tie_layers: bool,
}

impl MlpConfig {
    /// Builds the model for `world_size` ranks. Errors if a width or the number of ranks is zero.
    pub fn build(&self, world_size: usize) -> Result<Model> {
        self.build_of(world_size, true)
    }

    /// The same model of operations that are not fused: each product with its bias, and each activation, writes its result to
    /// memory, where the next one reads it.
    pub fn build_unfused(&self, world_size: usize) -> Result<Model> {
        self.build_of(world_size, false)
    }

    fn build_of(&self, world_size: usize, is_fused: bool) -> Result<Model> {
        let Self { input_dim, hidden_dim, output_dim, num_layers, tie_layers } = *self;
        if [input_dim, hidden_dim, output_dim].contains(&0) {
            return Err(ModelError::Config(format!("an MLP needs widths above zero: {self:?}")));
        }
        LayoutBuilder::check_world_size(world_size)?;
        let mut layout = LayoutBuilder::new();
        let mut blocks = Vec::new();
        let mut inputs = input_dim;
        let mut last: Option<(UnitId, Linear)> = None;
        let with = if is_fused { Activation::Relu } else { Activation::None };
        for at in 0..num_layers {
            let (unit, layer) = match &last {
                Some((unit, last)) if tie_layers && at > 1 => {
                    (*unit, Linear::tied_to(&mut layout, last, with))
                }
                _ => {
                    let mut unit = layout.unit(format!("fc{at}"));
                    (unit.id, Linear::new(&mut unit, inputs, hidden_dim, with))
                }
            };
            blocks.push(if is_fused {
                Block::new(unit, layer.clone())
            } else {
                Block::new(unit, Sequence::new().then(layer.clone()).then(Relu))
            });
            last = Some((unit, layer));
            inputs = hidden_dim;
        }
        blocks.push(layout.block(format!("fc{num_layers}"), |unit| {
            Linear::new(unit, inputs, output_dim, Activation::None)
        }));
        Ok(Model::new("mlp", blocks, MeanSquaredError, layout.finish(world_size)))
    }
}
