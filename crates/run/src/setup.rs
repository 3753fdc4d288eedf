//! The work of a rank before its first step: the ranks agree on their settings, then each builds its model, memory and batches.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_checkpoint::progress::{LossScaling, Progress};
use paceline_checkpoint::{Folder, SAVE_LIMIT};
use paceline_collectives::{Axis, CollectiveError, Group, Mesh};
use paceline_data::{BatchShape, Dataset};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::text::warn;
use paceline_kernels::{Compute, peak};
use paceline_launch::stop::StopRequest;
use paceline_memory::{Allocator, Device, DeviceStream, PhaseUsage};
use paceline_model::Model;
use paceline_observe::figures::event::{Event, Listeners, Placed};
use paceline_observe::insight::memory::{Needs, Shape};
use paceline_observe::record::memory;
use paceline_observe::views;
use paceline_observe::views::profiler::Profiler;
use paceline_rendezvous::RunMember;
use paceline_settings::config::TrainConfig;
use paceline_settings::loss_scale::LossScale;
use paceline_settings::named::TransportName;
use paceline_settings::open_data::OpenData;
use paceline_settings::origin::Resume;
use paceline_strategies::{
    Exactness, Observer, Replica, ReplicaOptions, StepState, Strategy, SyncBlocks, Trainer,
};
use paceline_trace::{SpanTrack, Track};

use crate::agreement::{self, Settings};
use crate::batches::{self, BatchStream};
use crate::card_watch::CardWatch;
use crate::equality;
use crate::handover::HandedOver;
use crate::resume::{self, Begin};
use crate::sample::TextSampler;
use crate::saving::{self, BEST, Saving};
use crate::step::Inputs;
use crate::to_device::ToDevice;
use crate::together::together;
use crate::{markers, parts};

/// The most spans, and marks, of a step. A strategy records a few per parameter.
const TRACK_CAPACITY: usize = 1 << 14;

/// The resources of a rank on its host. A test passes a disk or memory that fails.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// Where files go.
    pub disk: Disk,
    /// Where memory comes from.
    pub allocator: Allocator,
    /// Its number on the host.
    pub local_rank: usize,
    /// Whether the run is to end early.
    pub stop: StopRequest,
    /// Whether `paceline train` has started this rank, and reports the checkpoint of a run that ends early.
    pub is_launched: bool,
    /// The rank as a member of a run whose ranks come and go.
    pub member: Option<Arc<RunMember>>,
}

/// Makes a rank ready to train. With `handed`, it goes on where the ranks of an earlier generation were. Also returns the batches and
/// the position of the run. Collective.
pub(crate) fn begin<'a>(
    config: &'a TrainConfig,
    data: OpenData,
    world: Group,
    placements: &[Placed],
    make_folder: impl FnOnce() -> Result<Option<PathBuf>>,
    host: Host,
    handed: Option<HandedOver<'_>>,
) -> Result<(RankRun<'a>, BatchStream, Progress)> {
    let memory = config.device.memory(host.allocator.clone(), host.local_rank)?;
    let host = Host { allocator: memory, ..host };
    connect_cards(config, &world, &host.allocator)?;
    let are_new = handed.as_ref().is_none_or(|of| !of.has_listeners);
    let agreed = agree(config, world, placements, make_folder, are_new, &host)?;
    build(config, data, agreed, host, handed)
}

/// The state of a rank once all of them have agreed.
struct Agreed<'a> {
    mesh: Mesh,
    listeners: Listeners<'a>,
    /// Whether the listeners are new. Otherwise there are none, since this rank has those of an earlier generation.
    are_new: bool,
    saving: Option<Saving>,
    /// The same for the best weights.
    saving_best: Option<Saving>,
}

/// Compares the ranks' settings before anything is written. Returns where they are.
pub(crate) fn compare(
    config: &TrainConfig,
    data: &OpenData,
    world: &Group,
    local_rank: usize,
) -> Result<Vec<Placed>> {
    agreement::check(world, local_rank, config.device, &Settings::of_run(config, data))
}

/// Connects cards by NCCL, unless the user has chosen another transport. If that is impossible and not required, rank 0 says
/// why, and collectives go through memory of the host.
fn connect_cards(config: &TrainConfig, world: &Group, memory: &Allocator) -> Result<()> {
    let is_stated = config.spec.has("transport");
    let is_demanded = config.transport == TransportName::Nccl;
    let is_card = memory.device() == Device::Cuda;
    if !is_card || world.world_size() == 1 || (is_stated && !is_demanded) {
        return Ok(());
    }
    match world.use_nccl(memory, config.comm.nccl_order) {
        Err(CollectiveError::Setup { reason, .. }) if !is_demanded => {
            if world.rank() == 0 {
                warn(&format!("collectives go through memory of the host: {reason}"));
            }
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// Rank 0 makes the run folder, takes the folder for checkpoints, and says where the ranks are.
fn agree<'a>(
    config: &'a TrainConfig,
    world: Group,
    placements: &[Placed],
    make_folder: impl FnOnce() -> Result<Option<PathBuf>>,
    are_new: bool,
    host: &Host,
) -> Result<Agreed<'a>> {
    let folder = together(&world, "make the run folder", SAVE_LIMIT, || match world.rank() {
        0 => make_folder(),
        _ => Ok(None),
    })?;
    let take = |path: PathBuf| {
        let own = take_save_folder(config, &path, &world, folder.as_deref(), &host.disk)?;
        Ok::<_, Failure>((path, own))
    };
    let own = config.checkpoints.save.clone().map(take).transpose()?;
    let best = config
        .checkpoints
        .save
        .as_ref()
        .filter(|_| config.checkpoints.save_best)
        .map(|path| path.join(BEST));
    let best = best.map(take).transpose()?;
    let mut listeners = Listeners::default();
    if are_new {
        listeners = views::listeners(&host.disk, config, folder.as_deref())?;
        listeners.tell(Event::Placed { group: &world, placements })?;
    }
    let new = |(path, own): (PathBuf, _)| Saving::new(config, &path, own, &host.disk, &world);
    let saving = own.map(new).transpose()?;
    let saving_best = best.map(new).transpose()?;
    let mesh = Mesh::new(world, &config.mesh)?;
    Ok(Agreed { mesh, listeners, are_new, saving, saving_best })
}

/// On rank 0 of a run that saves: takes the folder of `--save`, to which no other run may write meanwhile.
fn take_save_folder(
    config: &TrainConfig,
    path: &Path,
    world: &Group,
    run_folder: Option<&Path>,
    disk: &Disk,
) -> Result<Option<Folder>> {
    together(world, "take the folder of --save", SAVE_LIMIT, || {
        if world.rank() > 0 {
            return Ok(None);
        }
        let own = Folder::take(path, disk.clone(), &this_run(run_folder))?;
        if !matches!(config.resume, Some(Resume::IfThere(_))) {
            // The user has chosen where to begin, so earlier failures do not count.
            own.forget_not_finite()?;
        }
        Ok(Some(own))
    })
}

/// This run in words, for another one that wants to save to the same folder.
fn this_run(folder: Option<&Path>) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let folder = folder.map_or_else(String::new, |folder| format!(", {}", folder.printable()));
    let since = paceline_host::text::now("%Y-%m-%d %H:%M:%S");
    format!("another run (process {} on {host}{folder}, started {since})", std::process::id())
}

/// A rank that is ready to train.
pub(crate) struct RankRun<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) num_samples: usize,
    pub(crate) trainer: Trainer,
    pub(crate) inputs: Inputs,
    /// The steps that synchronize gradients, if not all do.
    pub(crate) sync_blocks: Option<SyncBlocks>,
    /// The guarantee of the strategy about the weights.
    pub(crate) exactness: Exactness,
    pub(crate) first: FirstFacts,
    pub(crate) listeners: Listeners<'a>,
    /// The test set, if the run evaluates.
    pub(crate) test: Option<Arc<dyn Dataset>>,
    /// Writes this rank's part of checkpoints, if the run saves.
    pub(crate) saving: Option<Saving>,
    /// The same for the best weights.
    pub(crate) saving_best: Option<Saving>,
    /// The loss of the kept weights. Decides which weights are kept, and nothing about the run.
    pub(crate) kept_loss: Option<f64>,
    /// On rank 0: makes texts, if the run does.
    pub(crate) texts: Option<TextSampler>,
    pub(crate) stop: StopRequest,
    pub(crate) is_launched: bool,
    pub(crate) member: Option<Arc<RunMember>>,
}

impl<'a> RankRun<'a> {
    /// Ends what others wait for, apart from the groups of the trainer, and returns that and the listeners.
    pub(crate) fn leave(mut self) -> (Trainer, Listeners<'a>) {
        self.saving.iter_mut().chain(&mut self.saving_best).for_each(Saving::give_up);
        if self.trainer.replica.world.is_broken() {
            // A gather among ranks that are all left may have ended. It is waited for before anyone reads its memory.
            let _ = self.trainer.sync_replicas();
        }
        (self.trainer, self.listeners)
    }
}

/// The facts of a run before its first step, for its report at the end.
pub(crate) struct FirstFacts {
    /// The model of all ranks, if they have parts of it.
    pub(crate) whole: Option<Model>,
    pub(crate) samples: BatchShape,
    /// The most floating-point operations per second that this rank can make.
    pub(crate) peak_flops_per_s: f64,
    /// The memory after initialization.
    pub(crate) initialization: PhaseUsage,
    /// On rank 0: the memory that the ranks need by prediction.
    pub(crate) predicted: Needs,
}

/// Builds the model and all that its steps need, from other ranks, a checkpoint, or with new weights. Also returns the batches and
/// the position of the run.
fn build<'a>(
    config: &'a TrainConfig,
    data: OpenData,
    Agreed { mesh, mut listeners, are_new, mut saving, mut saving_best }: Agreed<'a>,
    Host { disk, allocator, stop, is_launched, member, .. }: Host,
    handed: Option<HandedOver<'_>>,
) -> Result<(RankRun<'a>, BatchStream, Progress)> {
    let (compute, loader_track) = compute(config, &allocator, &disk, &mut listeners)?;
    let dataset = &data.train;
    let world_size = mesh.world().world_size();
    let build = || config.model.build(dataset.as_ref(), world_size);
    let model = build()?;
    let is_card = allocator.device() == Device::Cuda;
    let predicted = match mesh.world().rank() {
        // The memory of a card and its driver is not predicted yet.
        0 if !is_card => {
            let mut part = build()?;
            parts::take_first(&mut part, &config.mesh)?;
            Needs::of(&Shape::of(config, &data), &part)?
        }
        _ => Needs::default(),
    };
    if are_new {
        listeners.tell(Event::Built(&model))?;
    }

    let mut strategy = config.strategy.build()?;
    let is_divided = config.pipeline.is_some() || config.mesh.size(Axis::Tp) > 1;
    let whole = is_divided.then(build).transpose()?;
    let replica = replica(config, strategy.as_mut(), model, compute, mesh, member.is_some())?;
    let mut state = StepState::new(&replica)?;
    let load = || config.model.load(&replica.storage);
    together(&replica.world, "read the first weights", SAVE_LIMIT, load)?;
    let mut optimizer = replica.optimizer(config.optimizer.config())?;
    if config.optimizer.decays_matrices_only() {
        optimizer = optimizer.decaying_matrices_only(replica.storage.layout());
    }
    if let Some(watched) = config.output.watch_passes.clone() {
        let share = config.micro_batches.as_ref().map(|of| of.shares[replica.group.rank()].clone());
        *state.observer() = Some(Observer::new(watched, share, replica.num_averaged()));
    }
    if config.output.watch_numerics {
        optimizer = optimizer.watched(replica.storage.layout());
    }
    let (num_samples, samples) = (dataset.len(), BatchShape::of(dataset.as_ref()));
    let inherited = match &handed {
        Some(handed) => handed.take_over(config, &replica, &mut optimizer, member.as_deref())?,
        None => None,
    };
    let Begin { mut progress, previous } = match inherited {
        Some(begin) => begin,
        None => resume::begin(config, &replica, &*strategy, &mut optimizer, num_samples)?,
    };
    progress.scaling = config.loss_scale.map(|setting| scaling(&setting, progress.scaling));
    if let Some(saving) = &mut saving {
        // As rank 0 sees it: paths may differ between hosts.
        if let Some(previous) = replica.world.broadcast_object(Some(&previous), 0)? {
            saving.follow(previous, &replica.world)?;
        }
    }
    let exactness = strategy.exactness(replica.mesh.shape());
    let sync_blocks = config.strategy.sync_blocks.map(SyncBlocks::new).transpose()?;
    let exactness = sync_blocks.map_or(exactness.clone(), |of| of.exactness(&exactness));
    equality::check(&replica, &exactness, progress.steps)?;
    let initialization = allocator.end_phase(memory::INITIALIZATION);

    let markers = markers::all(config.mark_ranges, replica.world.rank())?;
    let track = SpanTrack::with_capacity(TRACK_CAPACITY).marking(markers);
    let kept_loss = match (&config.checkpoints.save, &mut saving_best) {
        (Some(path), Some(saving)) => follow_best(path, saving, &replica.world)?,
        _ => None,
    };
    let texts = match replica.world.rank() {
        0 => TextSampler::new(config, data.test.as_deref().unwrap_or(dataset.as_ref()))?,
        _ => None,
    };
    let join = batches::join(config, dataset.as_ref(), &replica)?;
    let to_device = ToDevice::new(&replica.compute.allocator, config.copies)?;
    let OpenData { train, test } = data;
    let stream = BatchStream::new(config, train, &replica, progress.position, loader_track)?;
    let before = stream.samples_before();
    state.resume_after(before.own);
    if are_new {
        listeners.tell(Event::Begun { progress, samples_before: before.all })?;
    }
    // The ranks measure at about the same time, and no step is near.
    let compute_type = replica.storage.precision().compute;
    // The speed of a card is not measured.
    let peak_flops_per_s = if is_card || handed.is_some() {
        0.0
    } else {
        peak::of_threads(&replica.compute, compute_type)
    };
    let (max_norm, scales_loss) = (config.clip_grad_norm, config.loss_scale.is_some());
    let (commit, copies) = (None, config.replicate_shards);
    let mut trainer =
        Trainer { replica, strategy, optimizer, state, track, max_norm, scales_loss, commit };
    if member.is_some() || copies > 1 {
        trainer = trainer.with_commit(copies)?;
    }
    let of_rank = RankRun {
        config,
        num_samples,
        trainer,
        inputs: Inputs { to_device, join },
        sync_blocks,
        exactness,
        first: FirstFacts { whole, samples, peak_flops_per_s, initialization, predicted },
        listeners,
        test,
        saving,
        saving_best,
        kept_loss,
        texts,
        stop,
        is_launched,
        member,
    };
    Ok((of_rank, stream, progress))
}

/// The threads that compute. In a profiled run, kernels are recorded and the loader has a track too.
fn compute(
    config: &TrainConfig,
    allocator: &Allocator,
    disk: &Disk,
    listeners: &mut Listeners,
) -> Result<(Compute, Option<Arc<Track>>)> {
    let mut compute = Compute::new(config.threads, allocator.clone())?;
    if config.tf32 {
        compute = compute.with_tf32();
    }
    let mut loader_track = None;
    if let Some(profile) = &config.profile {
        let dtype = config.strategy.options.precision.compute;
        let (profiler, recorded) = Profiler::new(disk, profile, compute, (allocator, dtype));
        compute = recorded;
        loader_track = Some(profiler.loader());
        listeners.add(profiler);
    }
    if let Some(stream) = allocator.home().and_then(DeviceStream::card) {
        listeners.add(CardWatch::new(stream.card(), config.warmup_steps as u64));
    }
    Ok((compute, loader_track))
}

/// The model on this rank: all of it, or a stage of a pipeline.
fn replica(
    config: &TrainConfig,
    strategy: &mut dyn Strategy,
    model: Model,
    compute: Compute,
    mesh: Mesh,
    is_elastic: bool,
) -> Result<Replica> {
    let (seed, options) = (config.seed, config.strategy.options);
    // A step that others may have to complete updates nothing before all gradients are final.
    let steps_by_bucket = config.steps_by_bucket() && !is_elastic;
    let options = ReplicaOptions { steps_by_bucket, ..options };
    let micro_batches = config.micro_batches_per_step();
    let Some(stages) = config.pipeline.as_ref().and_then(|of| of.stages(micro_batches)) else {
        return Ok(Replica::new(strategy, model, compute, mesh, seed, options)?);
    };
    Ok(Replica::in_stages(strategy, model, compute, mesh, &stages, (seed, options))?)
}

/// The loss scale at the beginning: that of the checkpoint, unless the user has chosen another one.
fn scaling(setting: &LossScale, of_checkpoint: Option<LossScaling>) -> LossScaling {
    let goes_on = |of: &LossScaling| setting.window.is_some() || of.scale == setting.initial;
    of_checkpoint.filter(goes_on).unwrap_or_else(|| LossScaling {
        scale: setting.initial,
        skipped_steps: of_checkpoint.map_or(0, |of| of.skipped_steps),
        ..LossScaling::default()
    })
}

/// Goes on from the best weights that the interrupted run has kept, as rank 0 sees them. Returns their loss.
fn follow_best(save: &Path, saving: &mut Saving, world: &Group) -> Result<Option<f64>> {
    let own = (world.rank() == 0).then(|| saving::best_of(&save.join(BEST))).flatten();
    let Some((loss, previous)) = world.broadcast_object(Some(&own), 0)? else { return Ok(None) };
    saving.follow(previous, world)?;
    Ok(Some(loss))
}
