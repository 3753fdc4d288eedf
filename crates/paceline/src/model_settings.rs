//! What to train and with which optimizer: from flags to settings, and from these to the model.

use paceline_data::Dataset;
use paceline_kernels::optimizer::{AdamW, Sgd};
use paceline_model::{CnnConfig, MlpConfig, Model, ModelError, OptimizerConfig};
use serde::Serialize;

use crate::cli::{ModelName, OptimizerName, TrainArgs};
use crate::data;
use crate::{Failure, Result};

/// What to train.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum ModelSettings {
    /// The CNN.
    Cnn {
        /// Output channels of each convolution.
        channels: Vec<usize>,
        /// Width of the hidden layer.
        hidden: usize,
        /// Whether batch normalization follows each convolution.
        batch_norm: bool,
        /// Whether there is a head that the loss does not use.
        unused_head: bool,
        /// Units that are not trained.
        frozen: Vec<String>,
    },
    /// The MLP.
    Mlp {
        /// Inputs.
        input_dim: usize,
        /// Width of the hidden layers.
        hidden_dim: usize,
        /// Outputs.
        output_dim: usize,
        /// Hidden layers.
        num_layers: usize,
        /// Whether all but the first share their parameters.
        tie_layers: bool,
        /// Units that are not trained.
        frozen: Vec<String>,
    },
}

impl ModelSettings {
    /// The name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            ModelSettings::Cnn { .. } => "cnn",
            ModelSettings::Mlp { .. } => "mlp",
        }
    }

    /// Whether it classifies, so that there is an accuracy.
    pub fn has_classes(&self) -> bool {
        match self {
            ModelSettings::Cnn { .. } => true,
            ModelSettings::Mlp { .. } => false,
        }
    }

    /// Builds the model for data of this kind.
    pub fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError> {
        let (mut model, frozen) = match self {
            ModelSettings::Cnn { channels, hidden, batch_norm, unused_head, frozen } => {
                let shape = dataset.input_shape();
                let image = shape.try_into().map_err(|_| {
                    ModelError::Config(format!("a CNN needs images, not samples of {shape:?}"))
                })?;
                let num_classes = data::num_classes(dataset)
                    .ok_or_else(|| ModelError::Config("a CNN needs classes as targets".into()))?;
                let config = CnnConfig {
                    image,
                    channels: channels.clone(),
                    hidden: *hidden,
                    num_classes,
                    batch_norm: *batch_norm,
                    unused_head: *unused_head,
                };
                (config.build(world_size)?, frozen)
            }
            ModelSettings::Mlp {
                input_dim,
                hidden_dim,
                output_dim,
                num_layers,
                tie_layers,
                frozen,
            } => {
                let config = MlpConfig {
                    input_dim: *input_dim,
                    hidden_dim: *hidden_dim,
                    output_dim: *output_dim,
                    num_layers: *num_layers,
                    tie_layers: *tie_layers,
                };
                (config.build(world_size)?, frozen)
            }
        };
        if !frozen.is_empty() {
            model.freeze(frozen)?;
        }
        Ok(model)
    }
}

/// The optimizer's settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum OptimizerSettings {
    /// Stochastic gradient descent.
    Sgd {
        /// Learning rate.
        lr: f64,
        /// Momentum.
        momentum: f64,
        /// Weight decay.
        weight_decay: f64,
    },
    /// AdamW with PyTorch's betas and epsilon.
    Adamw {
        /// Learning rate.
        lr: f64,
        /// Weight decay.
        weight_decay: f64,
    },
}

impl OptimizerSettings {
    /// The learning rate.
    pub fn lr(&self) -> f64 {
        match self {
            OptimizerSettings::Sgd { lr, .. } | OptimizerSettings::Adamw { lr, .. } => *lr,
        }
    }

    /// For the model crate.
    pub fn config(&self) -> OptimizerConfig {
        match *self {
            OptimizerSettings::Sgd { lr, momentum, weight_decay } => {
                OptimizerConfig::Sgd(Sgd { lr, momentum, weight_decay })
            }
            OptimizerSettings::Adamw { lr, weight_decay } => OptimizerConfig::AdamW(AdamW {
                lr,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay,
            }),
        }
    }
}

/// The model that the flags ask for.
pub fn resolve_model(args: &TrainArgs) -> Result<ModelSettings> {
    let given = |flags: &[(&str, bool)]| {
        flags.iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag.to_string())
    };
    let cnn_flag = given(&[
        ("--channels", args.channels.is_some()),
        ("--hidden", args.hidden.is_some()),
        ("--batch-norm", args.batch_norm),
        ("--unused-head", args.unused_head),
    ]);
    let mlp_flag = given(&[
        ("--input-dim", args.input_dim.is_some()),
        ("--hidden-dim", args.hidden_dim.is_some()),
        ("--output-dim", args.output_dim.is_some()),
        ("--num-layers", args.num_layers.is_some()),
        ("--tie-layers", args.tie_layers),
    ]);
    let (name, foreign) = match args.model {
        ModelName::Cnn => ("cnn", mlp_flag),
        ModelName::Mlp => ("mlp", cnn_flag),
    };
    if let Some(flag) = foreign {
        return usage(format!("{flag} does not apply to --model {name}; leave it out"));
    }
    let needs_batch_norm = given(&[
        ("--sync-batch-norm", args.strategy.sync_batch_norm),
        ("--broadcast-buffers", args.strategy.broadcast_buffers),
    ]);
    if let (Some(flag), false) = (needs_batch_norm, args.batch_norm) {
        let fix = match args.model {
            ModelName::Cnn => "; add it, or leave this out",
            ModelName::Mlp => ", which is for --model cnn; leave this out",
        };
        return usage(format!("{flag} needs --batch-norm{fix}"));
    }
    let or = |value: Option<u64>, default: usize| value.map_or(default, |v| v as usize);
    let sizes: Vec<(&str, usize)> = match args.model {
        ModelName::Cnn => {
            let channels = args.channels.clone().unwrap_or_else(|| vec![32, 64, 128]);
            let channels = channels.into_iter().map(|c| ("--channels", c as usize));
            channels.chain([("--hidden", or(args.hidden, 512))]).collect()
        }
        ModelName::Mlp => vec![
            ("--input-dim", or(args.input_dim, 4096)),
            ("--hidden-dim", or(args.hidden_dim, 4096)),
            ("--output-dim", or(args.output_dim, 2048)),
        ],
    };
    if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return usage(format!("{flag} must be above zero everywhere"));
    }
    let sizes: Vec<usize> = sizes.into_iter().map(|(_, size)| size).collect();
    let frozen = args.freeze.clone();
    Ok(match (args.model, sizes.as_slice()) {
        (ModelName::Mlp, &[input_dim, hidden_dim, output_dim]) => {
            let num_layers = args.num_layers.unwrap_or(3);
            if num_layers > 10_000 {
                return usage(format!("--num-layers {num_layers}: at most 10000"));
            }
            let tie_layers = args.tie_layers;
            if tie_layers && num_layers < 3 {
                return usage(format!(
                    "--tie-layers: of {num_layers} hidden layers there are none to share with; pass \
                     --num-layers 3 or more"
                ));
            }
            ModelSettings::Mlp { input_dim, hidden_dim, output_dim, num_layers, tie_layers, frozen }
        }
        (_, [channels @ .., hidden]) => {
            let (channels, hidden) = (channels.to_vec(), *hidden);
            let (batch_norm, unused_head) = (args.batch_norm, args.unused_head);
            ModelSettings::Cnn { channels, hidden, batch_norm, unused_head, frozen }
        }
        (_, []) => return usage("--channels must name at least one convolution".into()),
    })
}

/// The optimizer that the flags ask for.
pub fn resolve_optimizer(args: &TrainArgs) -> Result<OptimizerSettings> {
    let is_adamw = args.optimizer == OptimizerName::Adamw;
    let lr = args.lr.unwrap_or(if is_adamw { 0.001 } else { 0.01 });
    let weight_decay = args.weight_decay.unwrap_or(if is_adamw { 0.01 } else { 0.0 });
    let momentum = args.momentum;
    for (flag, value) in [("--lr", lr), ("--weight-decay", weight_decay), ("--momentum", momentum)]
    {
        if !(value >= 0.0 && value.is_finite()) {
            return usage(format!("{flag} {value}: pass a number that is not negative"));
        }
    }
    if is_adamw && momentum != 0.0 {
        return usage("--momentum belongs to --optimizer sgd; leave it out for adamw".into());
    }
    Ok(match args.optimizer {
        OptimizerName::Sgd => OptimizerSettings::Sgd { lr, momentum, weight_decay },
        OptimizerName::Adamw => OptimizerSettings::Adamw { lr, weight_decay },
    })
}

fn usage<T>(reason: String) -> Result<T> {
    Err(Failure::Usage(reason))
}
