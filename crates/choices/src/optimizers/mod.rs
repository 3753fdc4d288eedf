//! The optimizers that `--optimizer` can name.

mod adamw;
mod sgd;

use clap::{ArgMatches, Args};
use paceline_failure::Result;
use paceline_failure::numbers::at_least;
use paceline_model::OptimizerConfig;
use serde::Serialize;
use serde_json::Value;

use super::registry::Registry;

/// All optimizers. The first one is the default.
pub static OPTIMIZERS: Registry<Resolve> =
    Registry::new("optimizer", "Training", &[&sgd::SGD, &adamw::ADAMW]);

/// Reads the flags of an optimizer, checks them and fills in the defaults.
pub type Resolve = fn(&ArgMatches) -> Result<OptimizerSettings>;

/// An optimizer with its settings, all defaults filled in.
#[derive(Clone, Debug, Serialize)]
pub struct OptimizerSettings {
    name: &'static str,
    lr: f64,
    /// The other settings, as `config.json` has them.
    #[serde(flatten)]
    others: Value,
    #[serde(skip)]
    decays_matrices_only: bool,
    #[serde(skip)]
    config: OptimizerConfig,
}

impl OptimizerSettings {
    /// The optimizer with this name, from the settings of a run.
    pub fn resolve(name: &str, settings: &ArgMatches) -> Result<Self> {
        (OPTIMIZERS.get(name)?.of)(settings)
    }

    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The settings other than the learning rate, by flag.
    pub fn others(&self) -> Vec<(String, String)> {
        let entry = |(name, value): (&String, &Value)| {
            (format!("--{}", name.replace('_', "-")), value.to_string())
        };
        self.others.as_object().into_iter().flatten().map(entry).collect()
    }

    /// The peak learning rate.
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// The settings in the form that the model crate takes.
    pub fn config(&self) -> OptimizerConfig {
        self.config
    }

    /// Whether parameters of one dimension have no weight decay.
    pub fn decays_matrices_only(&self) -> bool {
        self.decays_matrices_only
    }

    /// Whether it keeps state between steps.
    pub fn has_state(&self) -> bool {
        !self.config.state_names().is_empty()
    }
}

/// Flags that all optimizers here read.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Training")]
struct CommonFlags {
    /// Learning rate [default: 0.01, or 0.001 for AdamW]
    #[arg(long, value_name = "X", aliases = ["learning-rate", "learning_rate"], value_parser = at_least(0.0))]
    lr: Option<f64>,
    /// Weight decay [default: 0, or 0.01 for AdamW]
    #[arg(long, value_name = "X", value_parser = at_least(0.0))]
    weight_decay: Option<f64>,
    /// Weight decay for matrices and convolutions only: biases, norms and other parameters of one dimension have none
    #[arg(long)]
    decay_matrices_only: bool,
}

/// The settings other than the learning rate.
fn others(settings: &[(&str, Value)]) -> Value {
    settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
}
