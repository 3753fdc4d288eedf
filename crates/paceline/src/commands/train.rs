//! `paceline train`: one run, or several that are compared (`--ddp-choice all`).

use paceline_failure::Result;
use paceline_launch::environment::Placement;
use paceline_run::train::args::TrainCommand;
use paceline_run::train::{self, check_start};
use paceline_study::studies::strategies;

/// Runs `paceline train`.
pub fn train(command: &TrainCommand, placement: Option<Placement>) -> Result<u8> {
    let (spec, notes) = command.spec()?;
    let Some((comparison, several)) = spec.comparison() else {
        return train::train(&spec, notes, &command.start, placement);
    };
    check_start(&command.start, &spec, placement.as_ref())?;
    strategies::compare(&spec, comparison, several, placement)
}
