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
        Ok(Box::new(LocalSgd::new(self.sync_every)?))
    }

    fn models(&self) -> Models {
        Models::EqualAfterAverage
    }

    fn advice(&self) -> Advice {
        Advice::AverageLess { every: self.sync_every }
    }
}
