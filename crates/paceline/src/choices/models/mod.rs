//! The models that `--model` can name.
//!
//! | file | model |
//! |---|---|
//! | `cnn.rs` | convolutions and one hidden layer |
//! | `mlp.rs` | linear layers |

mod cnn;
mod mlp;

use std::fmt::Debug;
use std::sync::Arc;

use clap::ArgMatches;
use paceline_data::Dataset;
use paceline_model::{Model, ModelError};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::registry::{Choice, Registry};
use crate::Result;

/// All models. The first one is the default.
pub static MODELS: Registry<dyn ModelChoice> =
    Registry { key: "model", choices: &[&cnn::Cnn, &mlp::Mlp] };

/// A model that `--model` can name.
pub trait ModelChoice: Choice {
    /// Reads its flags, checks them and fills in the defaults.
    fn resolve(&self, settings: &ArgMatches) -> Result<Arc<dyn ModelSettings>>;
}

/// A model with its settings, all defaults filled in.
pub trait ModelSettings: Debug + Send + Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// The settings, as `config.json` has them.
    fn to_json(&self) -> Value;

    /// The kind of samples that it trains on.
    fn samples(&self) -> Samples;

    /// Whether it classifies, so that there is an accuracy.
    fn has_classes(&self) -> bool;

    /// Whether some of its layers keep running statistics.
    fn has_batch_norm(&self) -> bool {
        false
    }

    /// The defaults of a run's flags with this model.
    fn defaults(&self) -> Defaults;

    /// Whether the run prints the summary of the scaling benchmark at its end.
    fn ends_with_scaling_block(&self) -> bool {
        false
    }

    /// Builds the model for this data set on `world_size` ranks.
    fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError>;
}

/// The kind of samples that a model trains on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Samples {
    /// Images with a class each.
    Images,
    /// Vectors, with vectors as targets.
    Vectors {
        /// Number of elements of an input.
        input_dim: usize,
        /// Number of elements of a target.
        output_dim: usize,
    },
}

/// Defaults of a run that depend on its model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    /// Passes over the data.
    pub epochs: usize,
    /// Samples of a batch, per rank.
    pub batch_size: usize,
    /// Size of a bucket of gradients, in MB of 2^20 bytes.
    pub bucket_cap_mb: f64,
}

/// The model of a run.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    settings: Arc<dyn ModelSettings>,
    /// Units that are not trained.
    frozen: Vec<String>,
}

impl ModelConfig {
    /// The model with this name, from the settings of a run.
    pub fn resolve(name: &str, frozen: Vec<String>, settings: &ArgMatches) -> Result<Self> {
        Ok(Self { settings: MODELS.get(name)?.resolve(settings)?, frozen })
    }

    /// Builds the model, with its frozen units.
    pub fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError> {
        let mut model = self.settings.build(dataset, world_size)?;
        if !self.frozen.is_empty() {
            model.freeze(&self.frozen)?;
        }
        Ok(model)
    }
}

impl std::ops::Deref for ModelConfig {
    type Target = dyn ModelSettings;

    fn deref(&self) -> &Self::Target {
        self.settings.as_ref()
    }
}

impl Serialize for ModelConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut value = self.settings.to_json();
        value["name"] = json!(self.settings.name());
        value["frozen"] = json!(self.frozen);
        value.serialize(serializer)
    }
}
