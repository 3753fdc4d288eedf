//! From a specification to running ranks: in this process, or in processes that it launches and watches.

pub mod args;
pub mod elastic;
pub mod help;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use paceline_checkpoint as checkpoint;
use paceline_collectives::MAX_RANKS;
use paceline_failure::{EXIT_USAGE, Failure, Result, usage};
use paceline_host::disk::Disk;
use paceline_host::text::warn;
use paceline_host::{resources, streams};
use paceline_launch::environment::{self, Placement};
use paceline_launch::launcher::{self, Elastic, Hosts, Launch};
use paceline_launch::stop::{StopRequest, left};
use paceline_launch::{StartFlags, pinning};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_rendezvous::HostRoute;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags;
use paceline_settings::origin::Resume;
use paceline_settings::ranks::InitMethod;
use paceline_settings::spec::{RunSpec, message};

use crate::resolve::resolve;
use crate::setup::Host;
use crate::trainer;
use crate::{folder, resume};

/// Trains as `spec` states: as a rank, as several threads, or as the launcher of several processes. `notes` are warnings
/// from reading it.
pub fn train(
    spec: &RunSpec,
    notes: Vec<String>,
    start: &StartFlags,
    placement: Option<Placement>,
) -> Result<u8> {
    let is_of_train = placement.as_ref().is_some_and(Placement::is_of_train);
    if let Some(code) = elastic::train_member(spec, placement.as_ref())? {
        return Ok(code);
    }
    // The launcher has read these flags before it started this rank.
    let hosts = if is_of_train { None } else { check_start(start, spec, placement.as_ref())? };
    if let Some(code) = elastic::join(start, spec)? {
        return Ok(code);
    }
    let placement = match &hosts {
        Some(hosts) => Some(hosts.place(num_local_ranks(hosts, spec)?)),
        None => placement,
    };
    let (mut config, data) = resolve(spec, placement.as_ref())?;
    let restarts = start.needs_processes() && placement.as_ref().is_none_or(|p| p.is_launcher);
    let elastic = elastic::resolve(start, &config)?;
    if let (Some(hosts), Some(placement)) = (&hosts, &placement) {
        check_route(&config, hosts, &placement.place)?;
    }
    config.warnings.splice(..0, notes);
    let was_said = |placement: &Placement| placement.is_of_train() || placement.place.rank > 0;
    if !placement.as_ref().is_some_and(was_said) {
        launcher::warn_of_ignored_master_flags(start);
        for warning in &config.warnings {
            warn(warning);
        }
        if !config.output.quiet {
            let mut notes = [config.model.notes(), config.data.notes()].concat();
            notes.extend(pinned(&config, placement.as_ref()));
            if !matches!(config.resume, Some(Resume::From(_))) {
                notes.extend(config.model.notes_at_start());
            }
            notes.iter().for_each(|note| streams::stderr().line(note));
        }
    }
    let ranks = config.ranks();
    if restarts || ranks.are_launched(placement.as_ref()) {
        // Each rank opens the data itself.
        drop(data);
        return launch(&config, start, hosts.as_ref(), elastic);
    }
    let given = placement.as_ref().and_then(|placement| placement.run_folder.clone());
    let (disk, stop) = (Disk::default(), StopRequest::default());
    let is_launched = placement.as_ref().is_some_and(Placement::is_of_train);
    let outcome = ranks.run(placement.as_ref(), Some(stop.clone()), |group, local_rank| {
        let make_folder = || match &given {
            Some(folder) => Ok(Some(folder.clone())),
            None => folder::create(&disk, &folder::runs(config.output.run_dir.as_deref()), &config)
                .map(Some),
        };
        let (disk, stop) = (disk.clone(), stop.clone());
        let host = Host { disk, stop, is_launched, local_rank, ..Host::default() };
        trainer::run_rank(&config, data.clone(), group, local_rank, make_folder, host)
    });
    // Ranks that are threads of this process have ended. Otherwise their launcher does this.
    if let (Err(_), None, Some(save)) = (&outcome, &placement, &config.checkpoints.save) {
        checkpoint::Folder::tidy(save);
    }
    outcome.map(|()| 0)
}

/// A run that has ended well.
#[derive(Clone, Debug)]
pub struct FinishedRun {
    /// The run folder.
    pub folder: PathBuf,
    /// All figures of the run, by name (docs/metrics.md).
    pub summary: RunSummary,
}

impl FinishedRun {
    /// The mean loss over the last epoch.
    pub fn loss(&self) -> Option<f64> {
        self.summary.number("train_loss")
    }

    /// The accuracy on the test part, or else of the last epoch. `None` if the model does not classify.
    pub fn accuracy(&self) -> Option<f64> {
        self.summary.number("eval_accuracy").or_else(|| self.summary.number("train_accuracy"))
    }

    /// The digest of the final weights.
    pub fn weights(&self) -> &str {
        self.summary.text("weights_sha256")
    }
}

/// Trains with these flags of `paceline train`, with ranks that are threads of this process.
pub fn train_here<W: Into<OsString> + Clone>(
    flags: impl IntoIterator<Item = W>,
) -> Result<FinishedRun> {
    let words = [OsString::from("train")].into_iter().chain(flags.into_iter().map(Into::into));
    let typed = flags::command().try_get_matches_from(words);
    let typed = RunSpec::typed(&typed.map_err(|e| Failure::Usage(message(&e)))?)?;
    let (config, data) = resolve(&typed.with_default("transport", "thread"), None)?;
    let ranks = config.ranks();
    if ranks.are_launched(None) {
        return usage(format!(
            "--transport {}: ranks are threads when training is called as a function; leave it out, or run \
             paceline train",
            config.transport.name()
        ));
    }
    for warning in &config.warnings {
        warn(warning);
    }
    let disk = Disk::default();
    let folder = folder::create(&disk, &folder::runs(config.output.run_dir.as_deref()), &config)?;
    ranks.run(None, None, |group, local_rank| {
        let host = Host { disk: disk.clone(), local_rank, ..Host::default() };
        let make_folder = || Ok(Some(folder.clone()));
        trainer::run_rank(&config, data.clone(), group, local_rank, make_folder, host)
    })?;
    Ok(FinishedRun { summary: RunSummary::read(&folder.join("summary.json"))?, folder })
}

/// Checks the flags about restarts and hosts that do not depend on the run.
pub fn check_start(
    start: &StartFlags,
    spec: &RunSpec,
    placement: Option<&Placement>,
) -> Result<Option<Hosts>> {
    elastic::check_launcher(start, placement)?;
    let given = [
        ("--max-restarts", start.max_restarts > 0),
        ("--elastic", start.elastic.is_some()),
        ("--join", start.join.is_some()),
        ("--nnodes", start.nnodes.is_some_and(|count| count != 1)),
    ];
    let given = given.iter().find(|(_, is_given)| *is_given).map(|(flag, _)| *flag);
    if let (Some(flag), Some(placement)) = (given, placement) {
        return usage(format!(
            "{flag} is about ranks that this command starts, but another launcher has started this one of {}; \
             pass it to that launcher, or {}",
            placement.place.world_size,
            placement.unset()
        ));
    }
    if let (Some(flag), Some((comparison, several))) = (given, spec.comparison()) {
        return usage(format!(
            "{flag} does not apply to --{} {}, which makes several runs; leave it out, or name one strategy",
            comparison.key(),
            several.word()
        ));
    }
    if start.max_restarts > 0 && start.elastic.is_none() && !spec.has("save") {
        return usage(
            "--max-restarts goes on from the last checkpoint, and without --save there are none; pass --save DIR \
             too",
        );
    }
    let hosts = Hosts::resolve(start)?;
    elastic::check(start, spec)?;
    Ok(hosts)
}

/// The processors of this host's ranks, in words.
fn pinned(config: &TrainConfig, placement: Option<&Placement>) -> Option<String> {
    let local_ranks = placement.map_or(config.world_size, |of| of.place.local_world_size);
    let pinning = config.pin_cores.then(|| pinning::pinning(local_ranks, config.threads))?;
    Some(pinning.ok()?.words())
}

/// The number of ranks of each host.
fn num_local_ranks(hosts: &Hosts, spec: &RunSpec) -> Result<usize> {
    let nproc = spec.number("nproc").unwrap_or_else(|| resources::num_cores().min(2));
    if hosts.count * nproc > MAX_RANKS {
        return usage(format!(
            "--nnodes {}, each with {nproc} ranks: a run can have up to {MAX_RANKS} ranks on all hosts \
             together; lower --nproc or --nnodes",
            hosts.count
        ));
    }
    Ok(nproc)
}

/// Checks that the ranks of this host have an address at which others reach them.
fn check_route(
    config: &TrainConfig,
    hosts: &Hosts,
    place: &paceline_rendezvous::Placement,
) -> Result<()> {
    if config.comm.host.is_some() || config.init_method != InitMethod::Environment {
        return Ok(());
    }
    let route = HostRoute::to(place.rendezvous()?, place.rank, place.world_size)
        .map_err(|error| Failure::Usage(format!("--master-addr {}: {error}", hosts.address)))?;
    if !route.own.is_loopback() {
        return Ok(());
    }
    usage(format!(
        "--master-addr {} is {} on this host, an address that no other host can reach it by; pass --host \
         ADDRESS too, the address of this host for the others",
        hosts.address, route.rendezvous
    ))
}

/// Launches the ranks of this host; again when one fails, as often as `start` allows.
fn launch(
    config: &TrainConfig,
    start: &StartFlags,
    hosts: Option<&Hosts>,
    elastic: Option<Elastic>,
) -> Result<u8> {
    let local_ranks = config.world_size / hosts.map_or(1, |hosts| hosts.count);
    let has_first = hosts.is_none_or(|hosts| hosts.own == 0);
    if has_first && start.needs_processes() {
        resume::go_back(config)?;
    }
    let mut last = None;
    let ended = launcher::launch_with_restarts(start.max_restarts, |restart| {
        let continued = if restart > 0 { continued(config)? } else { None };
        let config = continued.as_ref().unwrap_or(config);
        // A checkpoint that states flags may be gone when ranks meet again.
        let args: Vec<OsString> = if continued.is_some() || elastic.is_some() {
            std::iter::once("train".into()).chain(config.spec.words()).collect()
        } else {
            std::env::args_os().skip(1).collect()
        };
        // Each attempt has a run folder of its own.
        let folder = if has_first {
            Some(folder::create(
                &Disk::default(),
                &folder::runs(config.output.run_dir.as_deref()),
                config,
            )?)
        } else {
            None
        };
        last.clone_from(&folder);
        let variable = folder.clone().unwrap_or_default().into_os_string();
        let variables = vec![(environment::RUN_FOLDER, variable)];
        let mut launch = Launch::of_own_program(args, local_ranks, variables)?;
        launch.output.dump_folder = folder;
        // The ranks of other hosts wait as long.
        let patience = Duration::from_secs_f64(config.comm.timeout_s);
        let hosts = hosts.map(|hosts| Hosts { patience, ..hosts.clone() });
        let grace = start.grace();
        Ok(Launch { hosts, grace, elastic: elastic.clone(), ..launch })
    });
    if let (true, false, Some(save)) = (has_first, matches!(ended, Ok(0)), &config.checkpoints.save)
    {
        checkpoint::Folder::tidy(save);
    }
    let code = ended?;
    if let Some(folder) = last.filter(|_| code == EXIT_USAGE) {
        folder::remove_unused(&Disk::default(), &folder);
    }
    // The last line, whether the ranks have ended in time or not.
    if has_first && launcher::asked_to_end().is_some_and(|signal| code == 128 + signal as u8) {
        let saved =
            config.checkpoints.save.as_deref().map(|folder| (folder, checkpoint::latest(folder)));
        let is_auto = matches!(config.resume, Some(Resume::IfThere(_)));
        streams::stderr().line(&format!("paceline: {}", left(saved, is_auto)));
    }
    Ok(code)
}

/// The configuration of a restart from the last checkpoint that this run has saved. `None` if it begins as the first
/// attempt did, at the checkpoint of another run.
///
/// # Errors
///
/// If the run has ended too often at the same step.
fn continued(config: &TrainConfig) -> Result<Option<TrainConfig>> {
    let Some(save) = config.checkpoints.save.clone() else { return Ok(None) };
    let begins_elsewhere =
        config.resume.as_ref().is_some_and(|resume| resume.folder() != save.as_path());
    if !checkpoint::is_in(&save) {
        // A run that fails before its first checkpoint fails at the same step again.
        checkpoint::restart(&save, Vec::new()).map_err(Failure::Run)?;
        if begins_elsewhere {
            return Ok(None);
        }
    } else {
        let found = checkpoint::find(&save).map_err(Failure::Run)?;
        if let Some(note) = checkpoint::restart(&save, found).map_err(Failure::Run)?.note {
            warn(&note);
        }
    }
    let mut continued = config.clone();
    continued.spec = config.spec.with("resume", "auto");
    continued.resume = Some(Resume::IfThere(save));
    Ok(Some(continued))
}
