//! How a run keeps its replicas equal: a strategy, with the settings that all strategies have.
//!
//! The settings of single strategies are in [`paceline_choices::strategies`].

use std::sync::Arc;

use clap::ArgMatches;
use paceline_choices::models::{MODELS, ModelConfig};
use paceline_choices::registry::{Choice, FlagValues};
use paceline_choices::strategies::{
    ALONE, OfStrategy, STRATEGIES, StrategySettings, Synchronizes, TOGETHER, default_caps,
};
use paceline_collectives::{Axis, MeshShape};
use paceline_failure::{Result, usage};
use paceline_model::{Layout, UnitId};
use paceline_strategies::{
    AccumulationOrder, Bucket, BucketCaps, Exactness, ReplicaOptions, Strategy, plan_buckets,
};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::flags::{RunFlags, StrategyFlags};
use super::named::AccumulationName;
use super::pipeline::PipelineConfig;
use super::spec::RunSpec;

/// A strategy with its settings, all defaults filled in.
#[derive(Clone)]
pub struct StrategyConfig {
    choice: &'static Choice<OfStrategy>,
    settings: Arc<dyn StrategySettings>,
    flags: FlagValues,
    /// Batches per optimizer step.
    pub accumulate: usize,
    /// Micro-batches of each batch on the rank that has the most.
    per_batch: usize,
    /// Steps per block, if blocks of synchronized and unsynchronized steps alternate.
    pub sync_blocks: Option<usize>,
    default_caps: BucketCaps,
    /// Options of the training step.
    pub options: ReplicaOptions,
    exactness: Exactness,
}

/// Checks the flags and fills in the defaults. Warns of each stated flag without effect. If batches are cut into micro-batches,
/// `--accumulate` is their number.
pub fn resolve(
    flags: &RunFlags,
    spec: &RunSpec,
    settings: &ArgMatches,
    model: &ModelConfig,
    world_size: usize,
    warnings: &mut Vec<String>,
) -> Result<StrategyConfig> {
    let (precision, as_graph) = (flags.precision.precision.into(), flags.ranks.cuda_graph);
    let flags = &flags.strategy;
    let by_micro_batch = flags.micro_batch_size.is_some();
    let default = if world_size == 1 { ALONE } else { TOGETHER };
    let choice = STRATEGIES.get(flags.name.as_deref().unwrap_or(default))?;
    let (name, synchronizes) = (choice.name, choice.of.synchronizes);
    if synchronizes == Synchronizes::Alone && world_size > 1 {
        return usage(format!(
            "--strategy {name} trains on one rank, but there are {world_size}; pass --nproc 1, or \
             another strategy (simple_ddp, ddp)"
        ));
    }
    check_batch_norm(flags, model)?;
    let accumulate = flags.accumulate.unwrap_or(choice.of.accumulate);
    if accumulate == 1 && flags.accumulation_order == AccumulationName::Tree {
        warnings.push("--accumulation-order tree has no effect with one batch per step".into());
    }
    if flags.sync_blocks.is_some() && synchronizes != Synchronizes::EveryStep {
        return usage(format!(
            "--sync-blocks compares steps with and without synchronization, and {name} has none in every \
             step; pass another --strategy"
        ));
    }
    if flags.sync_blocks.is_some() && choice.of.is_sharded {
        return usage(format!(
            "--sync-blocks compares steps with and without synchronization, and a rank of {name} has only a part of \
             the model to go on with alone; pass another --strategy"
        ));
    }
    if choice.of.is_sharded
        && accumulate > 1
        && flags.accumulation_order == AccumulationName::Tree
        && settings
            .get_raw("accumulate_in")
            .is_some_and(|mut words| words.any(|word| word == "shards"))
    {
        return usage(
            "--accumulation-order tree adds up whole gradients; leave it out, or pass --accumulate-in whole",
        );
    }
    if flags.sync_batch_norm && synchronizes == Synchronizes::SomeSteps {
        return usage(format!(
            "--sync-batch-norm communicates in every step, which {name} is there to avoid; leave it out, \
             or pass another --strategy"
        ));
    }
    check_no_sync(flags, choice, accumulate, warnings)?;
    check_copies(flags, choice, world_size, as_graph)?;
    let has_no_effect = |flag: &str| warnings.push(format!("--{flag} has no effect on {name}"));
    let foreign = STRATEGIES.foreign_to(choice);
    let communicates = !matches!(synchronizes, Synchronizes::Alone | Synchronizes::Never);
    let of_batch_norm = [
        ("sync-batch-norm", flags.sync_batch_norm && !communicates),
        ("broadcast-buffers", flags.broadcast_buffers && !communicates),
    ];
    let foreign = foreign.iter().map(String::as_str).filter(|flag| spec.has(flag));
    foreign
        .chain(of_batch_norm.iter().filter(|(_, is_idle)| *is_idle).map(|(flag, _)| *flag))
        .for_each(has_no_effect);
    if flags.no_static_graph && !flags.find_unused_parameters {
        warnings.push(
            "--no-static-graph has no effect without --find-unused-parameters: no parameter may be unused \
             anyway"
                .into(),
        );
    }
    let own_flags = FlagValues::of(choice, settings);
    let settings = (choice.of.resolve)(settings, &model.defaults())?;
    let config = StrategyConfig {
        choice,
        settings,
        flags: own_flags,
        exactness: Exactness::Exact,
        accumulate: if by_micro_batch { 1 } else { accumulate },
        per_batch: if by_micro_batch { accumulate } else { 1 },
        sync_blocks: flags.sync_blocks,
        default_caps: default_caps(&model.defaults()),
        options: ReplicaOptions {
            find_unused_parameters: flags.find_unused_parameters,
            static_graph: !flags.no_static_graph,
            sync_batch_norm: flags.sync_batch_norm,
            broadcast_buffers: flags.broadcast_buffers,
            accumulation: if by_micro_batch {
                AccumulationOrder::OneTree
            } else {
                flags.accumulation_order.into()
            },
            no_sync: flags.no_sync || accumulate == 1,
            precision,
            as_graph,
            // Whether gradients are clipped is not a setting of the strategy.
            ..ReplicaOptions::DEFAULT
        },
    };
    config.on(&MeshShape::replicas(world_size))
}

/// Fails if the strategy cannot reduce the gradients of each batch of a step, as asked.
fn check_no_sync(
    flags: &StrategyFlags,
    choice: &Choice<OfStrategy>,
    accumulate: usize,
    warnings: &mut Vec<String>,
) -> Result<()> {
    if flags.no_sync {
        return Ok(());
    }
    let name = choice.name;
    if choice.of.synchronizes != Synchronizes::EveryStep || choice.of.is_sharded {
        return usage(format!(
            "--no-sync=false reduces whole gradients after each batch, which {name} never does; leave it out, or pass \
             another --strategy (simple_ddp, ddp)"
        ));
    }
    if flags.sync_blocks.is_some() {
        return usage(
            "--no-sync=false reduces after each batch, and --sync-blocks leaves out whole steps; pass one of them",
        );
    }
    if accumulate == 1 {
        warnings.push("--no-sync=false has no effect with one batch per step".into());
    }
    Ok(())
}

/// Fails if no rank can keep a copy of another one's shard, as asked.
fn check_copies(
    flags: &StrategyFlags,
    choice: &Choice<OfStrategy>,
    world_size: usize,
    as_graph: bool,
) -> Result<()> {
    if flags.replicate_shards == 1 {
        return Ok(());
    }
    if !choice.of.is_sharded {
        return usage(format!(
            "--replicate-shards 2 keeps each shard twice, and {} divides nothing; leave it out, or pass another \
             --strategy (zero3, sharded3)",
            choice.name
        ));
    }
    if flags.mesh.as_ref().map_or(1, MeshShape::num_parts) >= world_size {
        return usage(
            "--replicate-shards 2: no other rank has the same part of the model, to keep a copy of a shard; leave it out, \
             or pass more ranks with --nproc or --mesh",
        );
    }
    if as_graph {
        return usage(
            "--cuda-graph launches one update as a graph, and --replicate-shards 2 makes two; leave one of them out",
        );
    }
    Ok(())
}

/// Fails for flags about batch normalization if the model has none.
fn check_batch_norm(flags: &StrategyFlags, model: &ModelConfig) -> Result<()> {
    let flag = match (flags.sync_batch_norm, flags.broadcast_buffers) {
        (true, _) => "--sync-batch-norm",
        (_, true) => "--broadcast-buffers",
        (false, false) => return Ok(()),
    };
    let able = MODELS.readers("batch-norm");
    if model.has_batch_norm() {
        Ok(())
    } else if able.contains(&model.name()) {
        usage(format!("{flag} needs --batch-norm; add it, or leave this out"))
    } else {
        let models = able.join(" or ");
        usage(format!("{flag} needs --batch-norm, which is for --model {models}; leave this out"))
    }
}

impl StrategyConfig {
    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        self.choice.name
    }

    /// The same on such a mesh, on which the weights may depend.
    pub fn on(self, mesh: &MeshShape) -> Result<Self> {
        let mut exactness = self.settings.build()?.exactness(mesh);
        if !self.options.no_sync {
            // The mean over the ranks is taken before the micro-batches are added up.
            exactness = Exactness::Lossy(format!("{} --no-sync=false", exactness.words()));
        }
        Ok(Self { exactness, ..self })
    }

    /// The same in a pipeline on such a mesh. The weights may depend on its schedule and, if they follow from buckets, on the
    /// stages, which have their own.
    pub fn in_stages(self, pipeline: &PipelineConfig, mesh: &MeshShape) -> Self {
        let PipelineConfig { schedule, begins, adds_in_order, .. } = pipeline;
        let words = self.exactness.words();
        let words = if self.settings.weights_follow_from_buckets() {
            format!("{words} --mesh {mesh} --schedule {schedule} --stages {}", begins.join(","))
        } else if !adds_in_order && self.options.accumulation == AccumulationOrder::Sequential {
            format!("{words} --schedule {schedule}")
        } else {
            return self;
        };
        Self { exactness: Exactness::Lossy(words), ..self }
    }

    /// The micro-batches of so many batches, on the rank that has the most.
    pub fn micro_batches_of(&self, batches: usize) -> usize {
        batches * self.per_batch
    }

    /// Whether paceline knows the strategy, which a program may have added.
    pub fn is_known(&self) -> bool {
        STRATEGIES.added().iter().all(|choice| choice.name != self.name())
    }

    /// The axes of a mesh that the strategy knows.
    pub fn axes(&self) -> &'static [Axis] {
        self.choice.of.axes
    }

    /// The strategy's own settings.
    pub fn settings(&self) -> &dyn StrategySettings {
        self.settings.as_ref()
    }

    /// The flag that the user passed, for messages.
    pub fn words(&self) -> String {
        match self.sync_blocks {
            Some(steps) => format!("--sync-blocks {steps}"),
            None => format!("--strategy {}", self.name()),
        }
    }

    /// Whether the strategy trains on a single rank.
    pub fn is_alone(&self) -> bool {
        self.choice.of.synchronizes == Synchronizes::Alone
    }

    /// Whether the ranks hold the same parameters after every step.
    pub fn keeps_replicas_equal(&self) -> bool {
        self.choice.of.synchronizes == Synchronizes::EveryStep && self.sync_blocks.is_none()
    }

    /// The strategy itself.
    pub fn build(&self) -> Result<Box<dyn Strategy>> {
        self.settings.build()
    }

    /// The kind of the strategy on its mesh: all exact strategies are of one kind.
    pub fn kind(&self) -> &str {
        self.exactness.words()
    }

    /// The sizes of the buckets in which gradients live, if any.
    pub fn caps(&self) -> Option<BucketCaps> {
        self.settings.caps()
    }

    /// The same, or else the default bucket sizes of `ddp`.
    pub fn caps_for_ddp(&self) -> BucketCaps {
        self.caps().unwrap_or(self.default_caps)
    }

    /// The names of the units in each such bucket, the last layers first; empty without buckets.
    pub fn bucket_units(&self, layout: &Layout) -> Vec<Vec<String>> {
        let Some(caps) = self.caps() else { return Vec::new() };
        let units = |bucket: Bucket| {
            let params = bucket.params.iter().rev().map(|id| layout.param(*id).unit);
            let mut units: Vec<UnitId> = params.collect();
            units.dedup();
            units.into_iter().map(|unit| layout.unit(unit).name.clone()).collect()
        };
        let elem_bytes = self.options.precision.grads.size_bytes();
        plan_buckets(layout, elem_bytes, caps).into_iter().map(units).collect()
    }
}

impl std::fmt::Debug for StrategyConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("StrategyConfig").field(&json!(self)).finish()
    }
}

impl Serialize for StrategyConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut value = match self.settings.to_json() {
            Value::Null => Value::Object(self.flags.to_json()),
            settings => settings,
        };
        value["name"] = json!(self.name());
        value["accumulate"] = json!(self.accumulate);
        let is_tree = self.options.accumulation != AccumulationOrder::Sequential;
        value["no_sync"] = json!(self.options.no_sync);
        value["accumulation_order"] = json!(if is_tree { "tree" } else { "sequential" });
        value["find_unused_parameters"] = json!(self.options.find_unused_parameters);
        value["no_static_graph"] = json!(!self.options.static_graph);
        value["sync_batch_norm"] = json!(self.options.sync_batch_norm);
        value["broadcast_buffers"] = json!(self.options.broadcast_buffers);
        value["sync_blocks"] = json!(self.sync_blocks);
        value.serialize(serializer)
    }
}
