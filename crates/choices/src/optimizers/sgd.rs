//! `--optimizer sgd`: stochastic gradient descent, with optional momentum.

use clap::{ArgMatches, Args};
use paceline_failure::Result;
use paceline_failure::numbers::at_least;
use paceline_kernels::optimizer::Sgd;
use paceline_model::OptimizerConfig;
use serde_json::json;

use super::{CommonFlags, OptimizerSettings, Resolve, others};
use crate::registry::{Choice, flags_of, read};

/// The choice.
pub(super) const SGD: Choice<Resolve> = Choice {
    name: "sgd",
    aliases: &[],
    about: "Stochastic gradient descent",
    flags: || [flags_of::<CommonFlags>(), flags_of::<Flags>()].concat(),
    of: resolve,
};

#[derive(Debug, Args)]
#[command(next_help_heading = "Training")]
struct Flags {
    /// Momentum of SGD
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = at_least(0.0))]
    momentum: f64,
}

fn resolve(settings: &ArgMatches) -> Result<OptimizerSettings> {
    let (common, Flags { momentum }) = (read::<CommonFlags>(settings)?, read(settings)?);
    let (lr, weight_decay) = (common.lr.unwrap_or(0.01), common.weight_decay.unwrap_or(0.0));
    Ok(OptimizerSettings {
        name: SGD.name,
        lr,
        others: others(&[
            ("momentum", json!(momentum)),
            ("weight_decay", json!(weight_decay)),
            ("decay_matrices_only", json!(common.decay_matrices_only)),
        ]),
        decays_matrices_only: common.decay_matrices_only,
        config: OptimizerConfig::Sgd(Sgd { lr, momentum, weight_decay }),
    })
}
