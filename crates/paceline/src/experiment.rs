//! `paceline train`: from the command line to running ranks.

use std::path::PathBuf;

use crate::Result;
use crate::cli::train::TrainCommand;
use crate::environment::{self, Placement};
use crate::run::flags::ALL;
use crate::run::resolve::resolve;
use crate::run::stop::StopRequest;
use crate::run::{folder, trainer};
use crate::sweep::presets::strategies;

/// Runs `paceline train`: resolves the flags, then runs as a rank, as several threads, or as the launcher
/// of several processes.
pub fn train(command: &TrainCommand, placement: Option<Placement>) -> Result<u8> {
    let (spec, notes) = command.spec()?;
    if spec.get("ddp-choice").is_some_and(|choice| choice == [ALL]) {
        return strategies::compare(&spec, placement);
    }
    let (mut config, data) = resolve(&spec, placement.as_ref())?;
    config.warnings.splice(..0, notes);
    let was_said = |placement: &Placement| placement.is_of_train() || placement.place.rank > 0;
    if !placement.as_ref().is_some_and(was_said) {
        for warning in &config.warnings {
            eprintln!("warning: {warning}");
        }
    }
    let ranks = config.ranks();
    if ranks.are_launched(placement.as_ref()) {
        // Each rank opens the data itself.
        drop(data);
        let folder = folder::create(&config)?;
        let variables = vec![(environment::RUN_FOLDER, folder.clone().into_os_string())];
        return ranks.launch(variables, Some(folder));
    }
    let given = placement.as_ref().and_then(|placement| placement.run_folder.clone());
    let stop = StopRequest::default();
    ranks.run(placement.as_ref(), Some(stop.clone()), |group, local_rank| {
        let folder = match (group.rank(), &given) {
            (0, Some(folder)) => Some(PathBuf::from(folder)),
            (0, None) => Some(folder::create(&config)?),
            _ => None,
        };
        let data = data.clone();
        trainer::run_rank(&config, data, group, local_rank, folder.as_deref(), &stop)
    })?;
    Ok(0)
}
