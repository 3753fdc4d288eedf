//! `--optimizer adamw`: Adam with decoupled weight decay, with PyTorch's betas and epsilon.

use clap::{Arg, ArgMatches};
use paceline_failure::Result;
use paceline_kernels::optimizer::AdamW;
use paceline_model::OptimizerConfig;

use super::{CommonFlags, OptimizerChoice, OptimizerSettings, check, others};
use crate::registry::{Choice, flags_of, read};

/// The choice.
pub(super) struct ChooseAdamW;

impl Choice for ChooseAdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn about(&self) -> &'static str {
        "Adam with decoupled weight decay"
    }

    fn flags(&self) -> Vec<Arg> {
        flags_of::<CommonFlags>()
    }
}

impl OptimizerChoice for ChooseAdamW {
    fn resolve(&self, settings: &ArgMatches) -> Result<OptimizerSettings> {
        let flags: CommonFlags = read(settings)?;
        let (lr, weight_decay) = (flags.lr.unwrap_or(0.001), flags.weight_decay.unwrap_or(0.01));
        check(&[("--lr", lr), ("--weight-decay", weight_decay)])?;
        let (beta1, beta2, eps) = (0.9, 0.999, 1e-8);
        Ok(OptimizerSettings {
            name: self.name(),
            lr,
            others: others(&[("weight_decay", weight_decay)]),
            config: OptimizerConfig::AdamW(AdamW { lr, beta1, beta2, eps, weight_decay }),
        })
    }
}
