//! `--model mlp`: linear layers with ReLU between them, the model of the scaling benchmark.

use std::sync::Arc;

use clap::{ArgMatches, Args};
use paceline_data::Dataset;
use paceline_failure::numbers::within;
use paceline_failure::{Failure, Result};
use paceline_model::{CrossEntropy, Divided, MlpConfig, Model, ModelError};

use super::{Defaults, FuseFlag, ModelSettings, OfModel, Samples};
use crate::registry::{Choice, flags_of, read, width};

/// A larger number of hidden layers is taken for a mistake.
const MAX_LAYERS: usize = 10_000;

/// The choice.
pub(super) const MLP: Choice<OfModel> = Choice {
    name: "mlp",
    aliases: &[],
    about: "Linear layers with ReLU",
    flags: flags_of::<Flags>,
    of: OfModel { width_flags: &["hidden-dim"], resolve },
};

/// The flags. With all defaults filled in, they are the settings.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
struct Flags {
    /// MLP: number of inputs
    #[arg(long, value_name = "N", default_value = "4096", value_parser = width())]
    input_dim: usize,
    /// MLP: width of the hidden layers
    #[arg(long, value_name = "N", default_value = "4096", value_parser = width())]
    hidden_dim: usize,
    /// MLP: number of outputs
    #[arg(long, value_name = "N", default_value = "2048", value_parser = width())]
    output_dim: usize,
    /// MLP: number of hidden layers
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = within(0, MAX_LAYERS))]
    num_layers: usize,
    /// MLP: all hidden layers after the first share their parameters
    #[arg(long)]
    tie_layers: bool,
    /// Whether operations are fused.
    #[command(flatten)]
    fuse: FuseFlag,
}

fn resolve(settings: &ArgMatches) -> Result<Arc<dyn ModelSettings>> {
    let flags: Flags = read(settings)?;
    let Flags { num_layers, tie_layers, .. } = flags;
    if tie_layers && num_layers < 3 {
        return Err(Failure::Usage(format!(
            "--tie-layers: of {num_layers} hidden layers, none has another one to share with; pass \
             --num-layers 3 or more"
        )));
    }
    Ok(Arc::new(flags))
}

impl ModelSettings for Flags {
    fn samples(&self) -> Samples {
        Samples::Vectors { input_dim: self.input_dim, output_dim: self.output_dim }
    }

    fn defaults(&self) -> Defaults {
        Defaults { epochs: 5, batch_size: 256, bucket_cap_mb: 50.0 }
    }

    fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError> {
        let build = if self.fuse.fuse { MlpConfig::build } else { MlpConfig::build_unfused };
        Ok(with_objective(build(&self.config(), world_size)?, dataset))
    }

    fn build_divided(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
        divided: Divided,
    ) -> std::result::Result<Model, ModelError> {
        Ok(with_objective(self.config().build_divided(world_size, divided)?, dataset))
    }
}

impl Flags {
    fn config(&self) -> MlpConfig {
        MlpConfig {
            input_dim: self.input_dim,
            hidden_dim: self.hidden_dim,
            output_dim: self.output_dim,
            num_layers: self.num_layers,
            tie_layers: self.tie_layers,
        }
    }
}

/// The loss is the mean squared error, or the cross-entropy if the data set has classes.
fn with_objective(mut model: Model, dataset: &dyn Dataset) -> Model {
    if dataset.num_classes().is_some() {
        model.objective = Box::new(CrossEntropy);
    }
    model
}
