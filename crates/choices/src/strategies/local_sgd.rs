//! `--strategy local_sgd`: ranks train alone and average their parameters every few steps.

use std::sync::Arc;

use clap::{Arg, ArgMatches, Args};
use paceline_failure::Result;
use paceline_failure::numbers::at_least;
use paceline_strategies::{LocalSgd, Strategy};

use super::{Advice, Models, StrategySettings};
use crate::models::Defaults;
use crate::registry::{flags_of, read};

/// The flags. With all defaults filled in, they are the settings.
#[derive(Debug, Args)]
#[command(next_help_heading = "Strategy")]
struct Flags {
    /// local_sgd: steps between two averages
    #[arg(long, value_name = "K", default_value_t = LocalSgd::DEFAULT_EVERY, value_parser = at_least::<usize>(1))]
    sync_every: usize,
    /// local_sgd: average every K-th step's gradients and never the parameters
    #[arg(long)]
    local_sgd_as_published: bool,
}

/// Its flags.
pub(super) fn flags() -> Vec<Arg> {
    flags_of::<Flags>()
}

/// Reads the flags.
pub(super) fn resolve(settings: &ArgMatches, _: &Defaults) -> Result<Arc<dyn StrategySettings>> {
    Ok(Arc::new(read::<Flags>(settings)?))
}

impl StrategySettings for Flags {
    fn build(&self) -> Result<Box<dyn Strategy>> {
        let local = LocalSgd::new(self.sync_every)?;
        Ok(Box::new(if self.local_sgd_as_published { local.as_published() } else { local }))
    }

    fn models(&self) -> Models {
        if self.local_sgd_as_published { Models::Different } else { Models::EqualAfterAverage }
    }

    fn not_in_checkpoint(&self) -> Option<&'static str> {
        self.local_sgd_as_published.then_some("the other ranks' models")
    }

    fn advice(&self) -> Advice {
        Advice::AverageLess { every: self.sync_every }
    }
}
