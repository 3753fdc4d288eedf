//! From the command line to running ranks.

use std::path::PathBuf;

use paceline_collectives::Group;
use paceline_rendezvous::Rendezvous;

use crate::cli::{DdpChoice, TrainArgs, TransportName};
use crate::config::{self, InitMethod, TrainConfig};
use crate::connect::connect;
use crate::environment::{self, Placement};
use crate::launcher::{self, Launch};
use crate::run::folder;
use crate::run::trainer;
use crate::sweep::presets::strategies;
use crate::{Result, threads};

/// `paceline train`: resolves the flags, then runs as a rank, as several threads, or as the launcher
/// of several processes.
pub fn train(args: &TrainArgs, placement: Option<Placement>) -> Result<u8> {
    if args.compare.ddp_choice == Some(DdpChoice::All) {
        return strategies::compare(args, placement);
    }
    let config = config::resolve(args, placement.as_ref())?;
    let was_said = |placement: &Placement| placement.is_of_train() || placement.place.rank > 0;
    if !placement.as_ref().is_some_and(was_said) {
        for warning in &config.warnings {
            eprintln!("warning: {warning}");
        }
    }
    match placement {
        Some(placement) => run_process(&config, &placement)?,
        None if config.world_size == 1 => {
            let folder = folder::create(&config)?;
            trainer::pin(&config, 0)?;
            trainer::run_rank(&config, Group::single(), 0, Some(&folder))?;
        }
        None if config.transport == TransportName::Thread => run_threads(&config)?,
        None => return launch_processes(&config),
    }
    Ok(0)
}

/// This process is one rank of several.
fn run_process(config: &TrainConfig, placement: &Placement) -> Result<()> {
    let place = &placement.place;
    let rendezvous = match &config.init_method {
        InitMethod::File(path) => Rendezvous::by_file(path),
        InitMethod::Environment => place.rendezvous()?.clone(),
    };
    let pinned = config.pin_cores.then_some(config.threads);
    let group = connect(config.transport, &config.comm, &rendezvous, place, pinned)?;
    let folder = match (place.rank, &placement.run_folder) {
        (0, Some(folder)) => Some(PathBuf::from(folder)),
        (0, None) => Some(folder::create(config)?),
        _ => None,
    };
    trainer::run_rank(config, group, place.local_rank, folder.as_deref())
}

/// All ranks are threads of this process.
fn run_threads(config: &TrainConfig) -> Result<()> {
    let folder = folder::create(config)?;
    threads::run(config.world_size, config.comm.options(config.world_size), |group| {
        let rank = group.rank();
        let folder = (rank == 0).then_some(folder.as_path());
        trainer::pin(config, rank)?;
        trainer::run_rank(config, group, rank, folder)
    })
}

/// Starts one process per rank, with the flags of this one.
fn launch_processes(config: &TrainConfig) -> Result<u8> {
    let folder = folder::create(config)?;
    let variables = vec![(environment::RUN_FOLDER, folder.clone().into_os_string())];
    let args = std::env::args_os().skip(1);
    launcher::launch(&Launch {
        dump_folder: Some(folder),
        ..Launch::of_own_program(args, config.world_size, variables)?
    })
}
