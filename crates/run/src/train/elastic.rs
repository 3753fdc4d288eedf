//! Flags about ranks that come and go, as far as a run decides about them. How ranks are watched and replaced is the launcher's
//! affair.

use std::path::PathBuf;
use std::time::Duration;

use paceline_failure::{Result, usage};
use paceline_host::resources;
use paceline_launch::StartFlags;
use paceline_launch::device::Device;
use paceline_launch::environment::Placement;
use paceline_launch::launcher::{self, Elastic};
use paceline_rendezvous::{Launcher, Rendezvous};
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::{self, Scope};
use paceline_settings::named::TransportName;
use paceline_settings::spec::RunSpec;

use crate::generations;

/// How long a rank waits for the list of members.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// Checks that no other launcher decides about the ranks.
pub(super) fn check_launcher(start: &StartFlags, placement: Option<&Placement>) -> Result<()> {
    let given = [("--elastic", start.elastic.is_some()), ("--join", start.join.is_some())];
    let given = given.iter().find(|(_, is_given)| *is_given);
    let (Some((flag, _)), Some(placement)) = (given, placement) else { return Ok(()) };
    usage(format!(
        "{flag}: another launcher has started this rank of {}, and only paceline's own lets ranks come and go; leave it \
         out, or {}",
        placement.place.world_size,
        placement.unset()
    ))
}

/// Checks the flags that do not depend on the run's configuration.
pub(super) fn check(start: &StartFlags, spec: &RunSpec) -> Result<()> {
    if start.join.is_some() && spec.has("nproc") {
        return usage(
            "--join adds one rank to a run, and --nproc is about ranks that a run starts with; leave --nproc out",
        );
    }
    let nproc = spec.number("nproc").unwrap_or_else(|| resources::num_cores().min(2));
    start.check_elastic(nproc)
}

/// Trains as one more member of the run of `--join`.
pub(super) fn join(start: &StartFlags, spec: &RunSpec) -> Result<Option<u8>> {
    let Some(server) = &start.join else { return Ok(None) };
    // All flags are checked before this process joins.
    generations::resolve_alone(spec)?;
    let Some(member) = launcher::join(start, &settings(spec))? else { return Ok(None) };
    let placement = Placement {
        place: paceline_rendezvous::Placement {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            node: None,
            launcher: Launcher::Paceline,
            variables: Vec::new(),
            rendezvous: Some(Rendezvous::by_tcp(server.0.clone(), server.1, "")),
        },
        run_folder: Some(PathBuf::new()),
        is_started: false,
        is_launcher: false,
    };
    generations::train(spec, &placement, member, server.clone()).map(|()| Some(0))
}

/// Trains as a member of a run, if the launcher that has started this process says so.
pub(super) fn train_member(spec: &RunSpec, placement: Option<&Placement>) -> Result<Option<u8>> {
    let Some(placement) = placement.filter(|placement| placement.is_of_train()) else {
        return Ok(None);
    };
    let joined = launcher::join_from_env(&settings(spec), JOIN_LIMIT)?;
    let Some((member, server)) = joined else { return Ok(None) };
    generations::train(spec, placement, member, server).map(|()| Some(0))
}

/// Checks that ranks can come and go in a run with this configuration.
fn check_config(config: &TrainConfig) -> Result<()> {
    let refuse = |flag: &str, why: &str| usage(format!("--elastic, {flag}: {why}"));
    if config.micro_batches.is_none() {
        return usage(
            "--elastic: other ranks go on with the same micro-batches, so these must not follow from the number of ranks; pass \
             --micro-batch-size too, with --global-batch-size",
        );
    }
    if let Device::Cuda(_) = config.device {
        return refuse(
            "--device cuda",
            "ranks come and go on processors only, so far; leave one of them out",
        );
    }
    if config.transport == TransportName::Hybrid && config.spec.has("transport") {
        return refuse(
            "--transport hybrid",
            "each generation finds out by itself which ranks share a host; leave --transport out",
        );
    }
    if config.profile.is_some() {
        return refuse(
            "--profile",
            "a trace has the same ranks from its beginning to its end; leave one of them out",
        );
    }
    Ok(())
}

/// How the ranks of a configuration come and go, if they do.
///
/// # Errors
///
/// If ranks that can be replaced or started again have to be threads of one process.
pub(super) fn resolve(start: &StartFlags, config: &TrainConfig) -> Result<Option<Elastic>> {
    let is_thread = config.transport == TransportName::Thread;
    if is_thread && start.elastic.is_some() {
        return usage(
            "--elastic goes on without a process that has died, and --transport thread has one process; use \
             --transport shm",
        );
    }
    if is_thread && start.max_restarts > 0 {
        return usage(
            "--max-restarts starts processes again, and --transport thread has none; use --transport shm",
        );
    }
    let mut elastic = Elastic::resolve(start)?;
    if let Some(elastic) = &mut elastic {
        check_config(config)?;
        let (min, max) = (elastic.sizes[0], elastic.sizes[elastic.sizes.len() - 1]);
        elastic.sizes = generations::sizes(&config.spec, min, max);
        if elastic.sizes.is_empty() {
            return usage(format!(
                "--elastic {min}:{max}: none of these numbers of ranks can share the micro-batches and the mesh of this run; pass \
                 another range, or another --global-batch-size or --mesh"
            ));
        }
        elastic.settings = settings(&config.spec);
        elastic.limit = Duration::from_secs_f64(config.comm.timeout_s);
    }
    Ok(elastic)
}

/// The settings that all ranks of a run must have, whenever they come, in words. Folders may have other names on other hosts.
pub fn settings(spec: &RunSpec) -> String {
    let all = flags::all();
    let is_of_host = |key: &&str| {
        let is_of_all = Scope::of_key(key).is_some_and(Scope::is_of_all_ranks);
        *key == "nproc" || !is_of_all
    };
    let others: Vec<&str> = all.iter().map(flags::key).filter(is_of_host).collect();
    let mut spec = spec.without(&others);
    for folder in ["save", "resume"] {
        if spec.has(folder) {
            spec = spec.with(folder, "DIR");
        }
    }
    let words = spec.words();
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    if words.is_empty() { "(all as by default)".into() } else { words.join(" ") }
}
