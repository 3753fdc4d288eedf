//! `--optimizer adamw`: Adam with decoupled weight decay. PyTorch's betas and epsilon are the defaults.

use clap::{ArgMatches, Args};
use paceline_failure::numbers::above_zero;
use paceline_failure::{Result, numbers};
use paceline_kernels::optimizer::AdamW;
use paceline_model::OptimizerConfig;
use serde_json::json;

use super::{CommonFlags, OptimizerSettings, Resolve, others};
use crate::registry::{Choice, flags_of, read};

/// The choice.
pub(super) const ADAMW: Choice<Resolve> = Choice {
    name: "adamw",
    aliases: &[],
    about: "Adam with decoupled weight decay",
    flags: || [flags_of::<CommonFlags>(), flags_of::<Flags>()].concat(),
    of: resolve,
};

#[derive(Debug, Args)]
#[command(next_help_heading = "Training")]
struct Flags {
    /// AdamW: the part of the mean of gradients that a step keeps
    #[arg(long, value_name = "X", default_value_t = 0.9, value_parser = beta)]
    beta1: f64,
    /// AdamW: the part of the mean of squared gradients that a step keeps
    #[arg(long, value_name = "X", default_value_t = 0.999, value_parser = beta)]
    beta2: f64,
    /// AdamW: added to the root of the mean of squared gradients, by which a step is divided
    #[arg(long, value_name = "X", default_value_t = 1e-8, value_parser = above_zero)]
    eps: f64,
}

/// The part of a mean that a step keeps: with 1, no gradient would count.
fn beta(text: &str) -> std::result::Result<f64, String> {
    numbers::within(0.0, 1.0_f64.next_down())(text)
        .map_err(|_| "pass a number from 0 to below 1".to_owned())
}

fn resolve(settings: &ArgMatches) -> Result<OptimizerSettings> {
    let (common, flags) = (read::<CommonFlags>(settings)?, read::<Flags>(settings)?);
    let (lr, weight_decay) = (common.lr.unwrap_or(0.001), common.weight_decay.unwrap_or(0.01));
    let Flags { beta1, beta2, eps } = flags;
    Ok(OptimizerSettings {
        name: ADAMW.name,
        lr,
        others: others(&[
            ("weight_decay", json!(weight_decay)),
            ("decay_matrices_only", json!(common.decay_matrices_only)),
            ("beta1", json!(beta1)),
            ("beta2", json!(beta2)),
            ("eps", json!(eps)),
        ]),
        decays_matrices_only: common.decay_matrices_only,
        config: OptimizerConfig::AdamW(AdamW { lr, beta1, beta2, eps, weight_decay }),
    })
}
