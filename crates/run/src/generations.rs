//! A rank of a run whose ranks come and go.
//!
//! The ranks of a *generation* train together until one is lost or another one wants to join. Then those that are left meet again: they
//! agree on the last step that all can reach, form new groups for as many ranks as there are, hand over the state, and go on.
//! Micro-batches are cut by the data alone, so the result has the bits of a run that nobody has disturbed.
//!
//! This file does not know how members find each other, or how state travels.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use paceline_checkpoint as checkpoint;
use paceline_collectives::{Axis, Fence, Group, Meeting, Member as RankOfGroup, MeshShape};
use paceline_failure::{Failure, Result};
use paceline_host::text::warn;
use paceline_launch::connect::end_when_panicking;
use paceline_launch::environment::Placement;
use paceline_launch::stop::{self, StopRequest};
use paceline_observe::figures::event::{Event, Listeners, Placed, Regrouped};
use paceline_observe::views::jsonl::last_step;
use paceline_rendezvous::{GenerationPlace, RendezvousError, RunMember};
use paceline_settings::config::TrainConfig;
use paceline_settings::named::TransportName;
use paceline_settings::open_data::OpenData;
use paceline_settings::origin::Resume;
use paceline_settings::spec::RunSpec;

use crate::handover::Kept;
use crate::resolve::{resolve, resolve_inputs};
use crate::setup::{self, Host, RankRun};
use crate::training::{TrainedUntil, Training};

/// Generations that may fail one after the other without a step.
const MAX_FAILED: usize = 20;
/// How long a rank that fails waits for news that another one has gone, whose end it may have met first.
const NEWS_LIMIT: Duration = Duration::from_secs(1);

/// The state that a rank carries from one generation to the next.
#[derive(Default)]
struct BetweenGenerations {
    run: Option<Training>,
    kept: Option<Kept>,
    listeners: Option<Listeners<'static>>,
    /// The members of the last generation.
    members: Vec<u64>,
    /// The memory of their operations that have failed.
    fence: Option<Fence>,
    /// Whether this rank knows that no step was made: it was there from the beginning, and has not begun.
    is_beginning: bool,
}

/// The configuration of the fewest ranks that the model can have, for a process that joins.
pub(crate) fn resolve_alone(spec: &RunSpec) -> Result<(TrainConfig, OpenData)> {
    let flags = spec.get("mesh").and_then(<[String]>::first);
    let parts =
        flags.and_then(|mesh| mesh.parse::<MeshShape>().ok()).map_or(1, |of| of.num_parts());
    let spec = of_size(spec, parts)?.without(&["nproc"]).with("nproc", parts);
    resolve_inputs(&spec, None)
}

/// Trains as a member of a run.
pub(crate) fn train(
    spec: &RunSpec,
    placement: &Placement,
    member: RunMember,
    server: (String, u16),
) -> Result<()> {
    // Only the first host has the run folder.
    let folder = placement.run_folder.clone().filter(|folder| !folder.as_os_str().is_empty());
    let stop = StopRequest::default();
    stop::listen(None, Some(stop.clone()))?;
    end_when_panicking(None);
    let host = Host {
        stop,
        is_launched: true,
        local_rank: placement.place.local_rank,
        member: Some(Arc::new(member)),
        ..Host::default()
    };
    let mut rank = ElasticRank {
        spec,
        placement,
        server,
        folder,
        host,
        begin: Instant::now(),
        carried: BetweenGenerations::default(),
    };
    let (mut missed, mut failed) = (Vec::new(), 0);
    loop {
        let place = match rank.member().regroup(&missed) {
            // A spare that nobody has needed.
            Err(RendezvousError::Finished { .. }) => return Ok(()),
            place => place?,
        };
        let steps = rank.steps();
        missed = match rank.generation(&place) {
            Ok(TrainedUntil::Over) => {
                rank.member().leave();
                return Ok(());
            }
            Ok(TrainedUntil::Regroup) => Vec::new(),
            Err(LostGeneration { failure, is_of_others }) => {
                failed = if rank.steps() > steps { 0 } else { failed + 1 };
                match &failure {
                    // Spares need not wait.
                    Failure::Stopped { .. } => rank.member().leave(),
                    Failure::NotFinite { step, .. } => {
                        rank.member().give_up(&format!("step {step} is not finite"));
                    }
                    _ => {}
                }
                let are_lost = || is_of_others || rank.member().breaks_within(NEWS_LIMIT);
                missed_members(failure, || failed < MAX_FAILED && are_lost())?
            }
        };
    }
}

/// Why a generation is over.
struct LostGeneration {
    failure: Failure,
    /// Whether it shows that others are lost.
    is_of_others: bool,
}

/// The members that a failure is about, if this rank can go on.
fn missed_members(failure: Failure, goes_on: impl Fn() -> bool) -> Result<Vec<u64>> {
    match failure {
        Failure::Missing { ranks, .. } if goes_on() => {
            Ok(ranks.into_iter().map(|rank| rank as u64).collect())
        }
        Failure::Consequence(_) | Failure::Run(_) if goes_on() => Ok(Vec::new()),
        failure => Err(failure),
    }
}

struct ElasticRank<'a> {
    spec: &'a RunSpec,
    placement: &'a Placement,
    server: (String, u16),
    folder: Option<PathBuf>,
    host: Host,
    begin: Instant,
    carried: BetweenGenerations,
}

impl ElasticRank<'_> {
    fn member(&self) -> &Arc<RunMember> {
        self.host.member.as_ref().expect("set when the rank begins")
    }

    fn steps(&self) -> u64 {
        self.carried.run.as_ref().map_or(0, |run| run.progress.steps)
    }

    /// Trains as a member of a generation.
    fn generation(&mut self, place: &GenerationPlace) -> Result<TrainedUntil, LostGeneration> {
        self.carried.is_beginning |= place.generation == 1;
        if let Some(fence) = self.carried.fence.take() {
            fence.give_back(place);
        }
        let own = |failure| LostGeneration { failure, is_of_others: false };
        let (mut config, data) = self.resolve(place.size).map_err(own)?;
        if let Some(save) = config.checkpoints.save.clone().filter(|_| place.generation > 1)
            && (checkpoint::is_in(&save) || !matches!(config.resume, Some(Resume::From(_))))
        {
            // If state is lost, the run goes on from its last checkpoint, or begins again where it began.
            config.resume = Some(Resume::IfThere(save));
        }
        let all = self.form(place, &config).map_err(|error| LostGeneration {
            failure: Failure::Consequence(error.to_string()),
            is_of_others: true,
        })?;
        // A process that joins cannot tell whether there are other hosts.
        config.transport = TransportName::from_str(all.transport().name(), false)
            .map_err(|error| own(Failure::Run(error)))?;
        // One for each generation, until the process ends: listeners of all generations refer to them.
        let config: &'static TrainConfig = Box::leak(Box::new(config));
        let outcome = self.train(place, config, data, &all);
        self.carried.fence = Some(all.fence());
        outcome.map_err(|failure| LostGeneration { failure, is_of_others: all.is_broken() })
    }

    /// The group of all members and spares, whose numbers name them in errors.
    fn form(
        &self,
        place: &GenerationPlace,
        config: &TrainConfig,
    ) -> paceline_collectives::Result<Group> {
        let member = self.member().clone();
        let mut exchange = |name: &str, text| member.exchange(name, text);
        let meeting = Meeting {
            exchange: &mut exchange,
            server: Some(self.server.clone()),
            over: Some(member.is_broken()),
        };
        let rank = RankOfGroup {
            rank: place.index,
            world_size: place.members.len(),
            names: place.members.iter().map(|number| *number as usize).collect(),
        };
        let transport = self.spec.get("transport").and_then(<[String]>::first);
        let transport = transport.map_or("", String::as_str);
        Group::from_exchange(rank, meeting, transport, |local| config.comm.options(local))
    }

    /// The configuration of a generation of so many ranks.
    fn resolve(&self, size: usize) -> Result<(TrainConfig, OpenData)> {
        let mut placement = self.placement.clone();
        let is_one_host = placement.place.is_one_host();
        placement.place.world_size = size;
        placement.place.rank = 0;
        placement.place.local_world_size =
            if is_one_host { size } else { placement.place.local_world_size.min(size) };
        placement.place.local_rank =
            placement.place.local_rank.min(placement.place.local_world_size - 1);
        resolve(&of_size(self.spec, size)?, Some(&placement))
    }

    fn train(
        &mut self,
        place: &GenerationPlace,
        config: &'static TrainConfig,
        data: OpenData,
        all: &Group,
    ) -> Result<TrainedUntil> {
        let BetweenGenerations { run, kept, listeners, members, is_beginning, .. } =
            &mut self.carried;
        let run =
            run.get_or_insert_with(|| Training::new(Default::default(), config.total_steps()));
        let mut handed = Kept::agree((kept.as_mut(), *is_beginning), run, config, all)?;
        let Some(world) = world_of(place, all)? else {
            handed.give()?;
            (*kept, *is_beginning) = (None, false);
            return Ok(TrainedUntil::Regroup);
        };
        if place.index == 0 && members.first() != Some(&place.members[0]) {
            // Those of another rank 0 have written the files of the run.
            *listeners = None;
            run.regroups.reported = self.folder.as_deref().map_or(0, last_step);
        }
        handed.has_listeners = listeners.is_some();
        let placements = setup::compare(config, &data, &world, self.host.local_rank);
        let Some(placements) = fitting(placements, members, place, all)? else {
            return Ok(TrainedUntil::Regroup);
        };
        let folder = self.folder.clone();
        let (mut of_rank, stream, progress) = setup::begin(
            config,
            data,
            world,
            &placements,
            || Ok(folder),
            self.host.clone(),
            Some(handed),
        )?;
        if run.progress != progress {
            // The state was lost, and this is that of a checkpoint, or of the beginning.
            (run.progress, run.after, run.regroups.stepped) = (progress, None, None);
        }
        run.regroups.are_due = false;
        (*kept, *is_beginning) = (None, false);
        of_rank.listeners = listeners.take().unwrap_or(of_rank.listeners);
        let before = std::mem::replace(members, place.members.clone());
        report(&mut of_rank, run, &before, place)?;
        let outcome = of_rank.train_to_end(stream, run, self.begin);
        let (trainer, of_run) = of_rank.leave();
        *kept = Some(Kept::new(trainer.leave()));
        *listeners = Some(of_run);
        outcome
    }
}

/// The outcome of comparing the ranks' settings. `None` if only this generation has members with other settings: those end, and
/// the others, of which this rank is one, meet again.
fn fitting(
    compared: Result<Vec<Placed>>,
    before: &[u64],
    place: &GenerationPlace,
    all: &Group,
) -> Result<Option<Vec<Placed>>> {
    let have_joined = place.members.iter().any(|number| !before.contains(number));
    match compared {
        Err(problem) if have_joined && !before.is_empty() && !all.is_broken() => {
            if place.index == 0 {
                warn(&format!("a process that has joined cannot take part: {problem}"));
            }
            Ok(None)
        }
        compared => compared.map(Some),
    }
}

/// Tells the listeners of the last step, if they do not know it, and who is lost and has joined.
fn report(
    of_rank: &mut RankRun<'_>,
    run: &mut Training,
    before: &[u64],
    place: &GenerationPlace,
) -> Result<()> {
    of_rank.report_completed(run)?;
    match regrouped(before, place, run) {
        Some(regrouped) => of_rank.listeners.tell(Event::Regrouped(&regrouped)),
        None => Ok(()),
    }
}

/// The group of the ranks. `None` for a spare.
fn world_of(place: &GenerationPlace, all: &Group) -> Result<Option<Group>> {
    if place.size == place.members.len() {
        return Ok(Some(all.clone()));
    }
    let is_rank = place.index < place.size;
    Ok(all.split(is_rank.then_some(0))?)
}

/// How this generation differs from the one before, if this rank was there. Counts it.
fn regrouped(before: &[u64], place: &GenerationPlace, run: &mut Training) -> Option<Regrouped> {
    let GenerationPlace { members, size, .. } = place;
    if before.is_empty() {
        return None;
    }
    let not_in = |of: &[u64], others: &[u64]| {
        of.iter().copied().filter(|number| !others.contains(number)).collect::<Vec<u64>>()
    };
    let (lost, joined) = (not_in(before, members), not_in(members, before));
    let took = run.regroups.step_end.elapsed();
    let (count, total) = &mut run.regroups.made[usize::from(lost.is_empty())];
    *count += 1;
    *total += took;
    let (steps, epoch) = (run.progress.steps, run.progress.last_epoch());
    let idle = members.len() - size;
    Some(Regrouped { steps, epoch, ranks: *size, idle, lost, joined, took })
}

/// The flags of a generation of so many ranks: the axis of samples and shards follows from their number. Ranks that are alone with
/// their part of the model have nobody to keep a copy.
pub(crate) fn of_size(spec: &RunSpec, size: usize) -> Result<RunSpec> {
    let is_part = |axis: &Axis| [Axis::Pp, Axis::Tp].contains(axis);
    let (mut spec, mut parts) = (spec.clone(), 1);
    if let Some(stated) = spec.get("mesh").and_then(<[String]>::first).cloned() {
        let refuse = |problem: String| Failure::Usage(format!("--mesh {stated}: {problem}"));
        let shape: MeshShape = stated.parse().map_err(|e| refuse(format!("{e}")))?;
        parts = shape.num_parts();
        if shape.axes().iter().filter(|(axis, _)| !is_part(axis)).count() > 1 {
            return Err(refuse(
                "the ranks come and go along one axis beside pp and tp; leave out dp or shard"
                    .into(),
            ));
        }
        let sized = |&(axis, stated): &(Axis, usize)| {
            (axis, if is_part(&axis) { stated } else { size / parts })
        };
        let mut axes: Vec<(Axis, usize)> = shape.axes().iter().map(sized).collect();
        if axes.iter().all(|(axis, _)| is_part(axis)) {
            axes.push((Axis::Dp, size / parts));
        }
        let shape = MeshShape::new(&axes).map_err(|e| refuse(e.to_string()))?;
        spec = spec.with("mesh", shape);
    }
    let is_alone = size <= parts && spec.has("replicate-shards");
    Ok(if is_alone { spec.with("replicate-shards", 1) } else { spec })
}

/// The sizes from `min` to `max` that a generation can have.
pub(crate) fn sizes(spec: &RunSpec, min: usize, max: usize) -> Vec<usize> {
    let fits = |size: &usize| {
        let Ok(spec) = of_size(spec, *size) else { return false };
        crate::resolve::is_possible(&spec, *size)
    };
    (min..=max).filter(fits).collect()
}
