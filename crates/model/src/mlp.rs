//! A multi-layer perceptron whose sizes the caller chooses.

use paceline_kernels::linear::Activation;

use crate::layers::{Bias, ColumnsOfPart, Linear, Relu, Sequence, TensorParallel};
use crate::{
    Block, Divided, Init, LayoutBuilder, MeanSquaredError, Model, ModelError, ParamPart, Result,
    UnitId,
};

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

    /// The same model with layers in equal parts, of which each of several ranks can have some ([`TensorParallel`]): `divided` has their
    /// number. Two linear layers are a block: the first is divided by its outputs, the second by its inputs. An odd last layer is divided by
    /// its inputs.
    ///
    /// Errors also if the width of the hidden layers is no multiple of the parts, or if layers are tied.
    pub fn build_divided(&self, world_size: usize, divided: Divided) -> Result<Model> {
        let Self { input_dim, hidden_dim, output_dim, num_layers, tie_layers } = *self;
        let parts = divided.parts;
        let problem = if tie_layers {
            "tied layers cannot be divided, because every second one would be divided by its inputs"
                .to_owned()
        } else if num_layers == 0 {
            "a model without hidden layers cannot be divided".to_owned()
        } else if !hidden_dim.is_multiple_of(parts) {
            format!(
                "hidden layers of width {hidden_dim} cannot be divided into {parts} equal parts"
            )
        } else {
            LayoutBuilder::check_world_size(world_size)?;
            return self.build_parts(world_size, divided, [input_dim, hidden_dim, output_dim]);
        };
        Err(ModelError::Config(problem))
    }

    fn build_parts(
        &self,
        world_size: usize,
        divided: Divided,
        [input_dim, hidden_dim, output_dim]: [usize; 3],
    ) -> Result<Model> {
        let (count, num_linear) = (divided.parts, self.num_layers + 1);
        let own = hidden_dim / count;
        let mut layout = LayoutBuilder::new();
        let mut blocks = Vec::new();
        for at in (0..num_linear).step_by(2) {
            // The last layer alone has no layer by whose outputs it would be divided.
            let (is_pair, last) = (at + 1 < num_linear, num_linear.min(at + 2) - 1);
            let (inputs, is_end) =
                (if at == 0 { input_dim } else { hidden_dim }, last + 1 == num_linear);
            let outputs = if is_end { output_dim } else { hidden_dim };
            let mut unit = layout.unit(format!("fc{at}"));
            let name = format!("fc{last}");
            let mut layer = TensorParallel::new(count, |index| {
                let part = ParamPart { index, count, dim: 0 };
                let first = if is_pair {
                    let mut unit = unit.of_part(&format!("fc{at}"), Some(part));
                    Sequence::new().then(Linear::new(&mut unit, inputs, own, Activation::Relu))
                } else {
                    Sequence::new().then(ColumnsOfPart { part })
                };
                let mut unit = unit.of_part(&name, Some(ParamPart { dim: 1, ..part }));
                let parts = [("weight", outputs)];
                let last = Linear::projection(&mut unit, own, &parts, Init::fan_in(hidden_dim))?;
                Ok(first.then(last.into_residual()))
            })?;
            (layer.gathers, layer.scatters) = (at > 0, !is_end);
            let activation = if is_end { Activation::None } else { Activation::Relu };
            let bias = (outputs, Init::fan_in(hidden_dim));
            let bias = Bias::new(&mut unit.of_part(&name, None), "bias", bias, activation, !is_end);
            blocks.push(Block::new(unit.id, Sequence::new().then(layer).then(bias)));
        }
        Ok(Model::new("mlp", blocks, MeanSquaredError, layout.finish_divided(world_size, divided)))
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
