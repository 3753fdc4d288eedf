//! Turns a run specification into a resolved configuration, checked as a whole before any rank starts.

use paceline_checkpoint::{Folder, MIN_BUDGET_BYTES};
use paceline_choices::data::{DATA_SETS, DataConfig, RunNeeds};
use paceline_choices::models::{MODELS, ModelConfig};
use paceline_choices::optimizers::{OPTIMIZERS, OptimizerSettings};
use paceline_choices::registry::{Registry, read};
use paceline_choices::strategies::{Models, STRATEGIES};
use paceline_collectives::{Axis, MeshShape};
use paceline_data::BatchShape;
use paceline_data::{Dataset, Field};
use paceline_failure::outputs::{check_file, check_folder};
use paceline_failure::{Result, usage};
use paceline_kernels::Instructions;
use paceline_launch::device::Device;
use paceline_launch::environment::Placement;
use paceline_model::Model;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::{Comparison, RunFlags, Several};
use paceline_settings::loss_scale::LossScale;
use paceline_settings::micro_batches::MicroBatches;
use paceline_settings::named::{Course, PrecisionName};
use paceline_settings::open_data::OpenData;
use paceline_settings::origin::Resume;
use paceline_settings::pipeline::PipelineConfig;
use paceline_settings::profile::{self, ProfileConfig};
use paceline_settings::spec::RunSpec;
use paceline_settings::strategy::{self, StrategyConfig};

use crate::resolve_ranks::{
    check_ranks, resolve_batch, resolve_comm, resolve_mesh, resolve_pinning, resolve_pipeline,
    resolve_world_size,
};
use crate::{
    device_checks, folder, instructions, markers, parts, precision, recorded, resume, same_bits,
    sample, shards, shortage, watch,
};

/// Checks all settings together and fills in the defaults. Opens the data and the checkpoint, so that their problems are
/// reported now. Writes nothing except downloads. At the end, tests whether the outputs could be written. From then on this
/// process computes with the stated instructions.
pub fn resolve(spec: &RunSpec, placement: Option<&Placement>) -> Result<(TrainConfig, OpenData)> {
    instructions::hold(spec)?;
    let (config, data) = resolve_inputs(spec, placement)?;
    // The launcher has tested this before it started this rank.
    if !placement.is_some_and(Placement::is_of_train) {
        check_outputs(&config)?;
    }
    Ok((config, data))
}

/// Like [`resolve`], without a test of the outputs, for a run that writes elsewhere.
pub fn resolve_inputs(
    spec: &RunSpec,
    placement: Option<&Placement>,
) -> Result<(TrainConfig, OpenData)> {
    let (mut config, data, model) = resolve_unchecked(spec, placement)?;
    if placement.is_some_and(Placement::is_of_train) {
        // The launcher has checked the rest. The memory check could fail now, because other ranks may have allocated theirs.
        return Ok((config, data));
    }
    let world_size = config.world_size;
    let local_ranks = placement.map_or(world_size, |placement| placement.place.local_world_size);
    // The memory of stages is not known before the ranks have chosen them.
    if !config.pipeline.as_ref().is_some_and(PipelineConfig::is_open) {
        shortage::check(&config, local_ranks, &model, &data)?;
    }
    config.warnings.extend(resume::check(&config, &model, data.train.len())?);
    Ok((config, data))
}

/// Like [`resolve_inputs`], without checks of memory and of the checkpoint. Also returns the model.
pub fn resolve_unchecked(
    spec: &RunSpec,
    placement: Option<&Placement>,
) -> Result<(TrainConfig, OpenData, Model)> {
    let spec = with_one_name(spec)?;
    let resume = Resume::stated(&spec)?;
    let (spec, lr_steps) = recorded::under(&spec, resume.as_ref(), placement)?;
    let mut flags: RunFlags = read(&spec.parse()?)?;
    let world_size = resolve_world_size(&flags, placement)?;
    let parts = flags.strategy.mesh.as_ref().map_or(1, MeshShape::num_parts);
    let micro_batches = MicroBatches::resolve(&flags, &spec, world_size.div_ceil(parts))?;
    let settings = MicroBatches::settings(micro_batches.as_ref(), &spec)?;
    flags.strategy = read(&settings)?;
    if let Some(placement) = placement {
        flags.ranks.transport =
            placement.transport_of_run(flags.ranks.transport, spec.has("transport"));
    }
    check_choices(&flags, &spec)?;
    let model = ModelConfig::resolve(&flags.model, flags.freeze.clone(), &settings)?;
    check_ranks(&flags, placement)?;
    let comm = resolve_comm(&flags, placement, world_size)?;
    if !matches!(flags.ranks.device, Device::Cuda(_)) {
        precision::check_processor(flags.precision.precision, flags.precision.emulate_fp16)?;
    }
    flags.ranks.simd.map_or(Ok(()), |wanted| instructions::check("--simd", wanted))?;
    let mut warnings = Vec::new();
    warnings.extend(micro_batches.as_ref().and_then(MicroBatches::warning));
    warnings.extend(precision::note(flags.precision.precision, flags.precision.emulate_fp16));
    let pinning = resolve_pinning(&flags, placement, world_size, &mut warnings);
    let strategy = strategy::resolve(&flags, &spec, &settings, &model, world_size, &mut warnings)?;
    let mesh = resolve_mesh(flags.strategy.mesh.as_ref(), &strategy, world_size)?;
    let model = model.in_parts(parts::resolve(&flags, &spec, &strategy, &mesh)?);
    let strategy = strategy.on(&mesh.of_part(0).0)?;
    // The ranks of all stages, and those that divide layers, work on the same samples.
    let num_shares = world_size / mesh.num_parts();
    let optimizer = OptimizerSettings::resolve(&flags.training.optimizer, &settings)?;
    check_clipping(flags.training.clip_grad_norm, &strategy)?;
    check_drift(&flags, &strategy, &mut warnings)?;
    let loss_scale = LossScale::resolve(&flags, &strategy, &mut warnings)?;
    flags.schedule.check_flags(optimizer.lr())?;
    let global_batch_size = resolve_batch(&flags, num_shares, model.defaults().batch_size)?;
    watch::check(&flags)?;
    flags.output.name.as_deref().map_or(Ok(()), folder::check_name)?;
    let (budget_mb, least_mb) = (flags.checkpoints.save_budget_mb, MIN_BUDGET_BYTES >> 20);
    if let Some(mb) = budget_mb.filter(|mb| *mb < least_mb) {
        return usage(format!("--save-budget-mb {mb}: pass at least {least_mb}"));
    }
    let tokenizer = model.tokenizer();
    let needs = RunNeeds {
        model: model.name(),
        samples: model.samples(),
        global_batch_size,
        steps_per_epoch: flags.training.steps_per_epoch,
        on_device: flags.ranks.device.makes_data() && !flags.copies.generate_on_host,
        tokenizer: tokenizer.as_deref(),
        class_names: model.class_names(),
    };
    let data = DataConfig::resolve(&flags.data.data, &settings, &needs)?;
    check_evaluation(&flags, &model, &data)?;
    sample::check(&flags, &model, &data, &mesh)?;
    if !placement.is_some_and(Placement::is_of_train) {
        data.prepare(flags.output.quiet)?;
    }
    let dataset = data.open_train(flags.training.seed)?;
    let samples = (dataset.len(), global_batch_size);
    let (steps_per_epoch, epochs) =
        resolve_length(&flags, &strategy, &model, samples, world_size, &mut warnings)?;
    let (training_data, class_names) = (dataset.digest(), dataset.class_names());
    let built = parts::build(&model, &data, dataset.as_ref(), &mesh)?;
    check_padding(dataset.as_ref(), &built, &data, &model)?;
    precision::check(flags.precision.precision, &model, &built, dataset.as_ref())?;
    if !strategy.options.no_sync && built.layout.units().iter().any(|unit| unit.is_root) {
        return usage(
            "--no-sync=false: the gradients of parameters that several layers share are final only after the last batch; \
             leave it out, or let no layers share parameters",
        );
    }
    warnings.extend(strategy.settings().check(&built, world_size)?);
    let samples = BatchShape::of(dataset.as_ref());
    let pipeline = resolve_pipeline(&flags, &strategy, &mesh, (&built, &samples, steps_per_epoch))?;
    if pipeline.is_some() && strategy.micro_batches_of(strategy.accumulate) == 1 {
        warnings.push(format!(
            "--mesh pp={}: a step has one micro-batch, so the stages work one after the other; pass --accumulate N for steps of \
             N micro-batches",
            mesh.size(Axis::Pp)
        ));
    }
    let strategy = match &pipeline {
        Some(pipeline) => strategy.in_stages(pipeline, &mesh),
        None => strategy,
    };
    let mut config = TrainConfig {
        spec,
        model,
        strategy,
        transport: flags.ranks.transport,
        comm,
        device: flags.ranks.device,
        copies: flags.copies,
        // Generated samples are not prefetched: their thread would slow down the measured step.
        load_ahead: flags.host.load_ahead.unwrap_or(if data.is_generated() { 0 } else { 2 }),
        decode_us: flags.host.decode_us,
        precision: flags.precision.precision,
        emulate_fp16: flags.precision.emulate_fp16
            && flags.precision.precision == PrecisionName::Fp16,
        tf32: flags.precision.tf32,
        cuda_graph: flags.ranks.cuda_graph,
        world_size,
        mesh,
        pipeline,
        threads: flags.host.threads,
        simd: flags.ranks.simd.or_else(Instructions::held).map(Instructions::name),
        pin_cores: pinning.is_some(),
        init_method: flags.ranks.init_method,
        epochs,
        steps: flags.training.steps,
        steps_per_epoch,
        warmup_steps: flags.training.warmup_steps,
        batch_size: micro_batches
            .as_ref()
            .map_or(global_batch_size.div_ceil(num_shares), |of| of.size),
        global_batch_size,
        micro_batches,
        rank_samples: flags.data.rank_samples.clone(),
        optimizer,
        schedule: flags.schedule,
        clip_grad_norm: flags.training.clip_grad_norm,
        loss_scale,
        replicate_shards: flags.strategy.replicate_shards,
        seed: flags.training.seed,
        data,
        training_data,
        class_names,
        profile: None,
        mark_ranges: flags.profile.mark_ranges,
        resume,
        evaluation: flags.evaluation,
        checkpoints: flags.checkpoints,
        output: flags.output,
        warnings,
    };
    if config.schedule.course != Course::Constant && config.schedule.lr_steps.is_none() {
        // A run that ends early keeps its learning rate schedule.
        config.schedule.lr_steps = lr_steps.filter(|planned| *planned > config.total_steps());
        if let Some(planned) = config.schedule.lr_steps {
            config.warnings.push(format!(
                "the learning rate stays on its course of {planned} steps, as in the run that saved the checkpoint"
            ));
        }
    }
    config.schedule.check(config.lr_steps())?;
    let (total, choice) = (config.total_steps(), config.strategy.name());
    config.profile = profile::resolve(&flags.profile, choice, total, &mut config.warnings)?;
    check_loading(&config)?;
    same_bits::check(&config, &built)?;
    config.warnings.extend(parts::note(&config, &built, &samples)?);
    let local_ranks = placement.map_or(world_size, |of| of.place.local_world_size);
    device_checks::check(&mut config, local_ranks, (&built, &samples))?;
    let evaluates = config.evaluation.evaluate || config.evaluation.eval_every.is_some();
    let test = evaluates.then(|| config.data.open_test(config.seed)).transpose()?;
    Ok((config, OpenData { train: dataset, test }, built))
}

/// Whether so many ranks can share the model and the micro-batches of a run, as far as the flags tell.
pub fn is_possible(spec: &RunSpec, world_size: usize) -> bool {
    let possible = || -> Result<bool> {
        let flags: RunFlags = read(&spec.parse()?)?;
        let mesh = flags.strategy.mesh.as_ref();
        let parts = mesh.map_or(1, MeshShape::num_parts);
        let fits = mesh.is_none_or(|mesh| mesh.check(world_size).is_ok());
        MicroBatches::resolve(&flags, spec, world_size.div_ceil(parts))?;
        Ok(fits && world_size.is_multiple_of(parts))
    };
    possible().unwrap_or(false)
}

fn check_clipping(norm: Option<f64>, strategy: &StrategyConfig) -> Result<()> {
    match norm {
        Some(_) if !strategy.is_alone() && !strategy.keeps_replicas_equal() => usage(format!(
            "--clip-grad-norm: with {} each rank has gradients of its own, whose norms differ; leave it \
             out, or pass another strategy",
            strategy.words()
        )),
        _ => Ok(()),
    }
}

/// Batches of an epoch, and epochs, of a training set with so many samples.
fn resolve_length(
    flags: &RunFlags,
    strategy: &StrategyConfig,
    model: &ModelConfig,
    (num_samples, global_batch_size): (usize, usize),
    world_size: usize,
    warnings: &mut Vec<String>,
) -> Result<(usize, usize)> {
    let natural_steps = match &flags.data.rank_samples {
        Some(samples) => {
            shards::check_rank_samples(flags, samples, world_size, num_samples)?;
            // All ranks continue until the rank with the most samples has no more.
            let most = samples.iter().max().copied().unwrap_or(0);
            most.div_ceil(global_batch_size / world_size)
        }
        None => num_samples.div_ceil(global_batch_size),
    };
    let steps_per_epoch = match flags.training.steps_per_epoch {
        Some(asked) if asked > natural_steps => {
            warnings.push(format!(
                "--steps-per-epoch {asked}: the data make {natural_steps} batches of up to \
                 {global_batch_size} samples; an epoch ends after those"
            ));
            natural_steps
        }
        asked => asked.unwrap_or(natural_steps),
    };
    let steps_of_epoch = steps_per_epoch.div_ceil(strategy.accumulate);
    let epochs = match flags.training.steps {
        Some(steps) => usize::try_from(steps.div_ceil(steps_of_epoch as u64)).unwrap_or(usize::MAX),
        None => flags.training.epochs.unwrap_or(model.defaults().epochs),
    };
    if let Some(block) = strategy.sync_blocks {
        let made = flags.training.steps.and_then(|steps| usize::try_from(steps).ok());
        let made = made.unwrap_or(epochs.saturating_mul(steps_of_epoch));
        let needed = flags.training.warmup_steps.saturating_add(block.saturating_mul(2));
        if made < needed {
            return usage(format!(
                "--sync-blocks {block}: two blocks and {} steps of warm-up are {needed} steps, but the run \
                 has {made}; pass more --epochs or --steps, or smaller blocks",
                flags.training.warmup_steps
            ));
        }
    }
    if strategy.accumulate > steps_per_epoch {
        warnings.push(format!(
            "--accumulate {}: an epoch has {steps_per_epoch} batches, and no step goes beyond one: each \
             epoch is one step of {steps_per_epoch} batches",
            strategy.accumulate
        ));
    }
    Ok((steps_per_epoch, epochs))
}

/// Checks how batches are made.
fn check_loading(config: &TrainConfig) -> Result<()> {
    let decode_us = config.decode_us;
    if config.makes_on_device() && (config.spec.has("load-ahead") || decode_us > 0.0) {
        let flag = if decode_us > 0.0 { "--decode-us" } else { "--load-ahead" };
        return usage(format!(
            "{flag}: synthetic data is made on the device, so no sample is loaded; leave {flag} out, or pass \
             --generate-on-host too"
        ));
    }
    Ok(())
}

/// The specification with one name for each setting: `--synthetic` is `--data synthetic`, `--amp` is `--precision`, and a single
/// `--ddp-choice` or `--shard-choice` is `--strategy`.
pub fn with_one_name(spec: &RunSpec) -> Result<RunSpec> {
    let mut spec = spec.clone();
    if spec.get("synthetic").is_some_and(|values| values != ["false"]) {
        spec = spec.without(&["synthetic"]).with(DATA_SETS.key, DATA_SETS.default_name());
    }
    if let Some(amp) = spec.get("amp").and_then(<[String]>::first).cloned() {
        let meant = match &amp[..] {
            "true" => "bf16",
            "false" | "off" => "f32",
            other => other,
        };
        let stated = spec.get("precision").and_then(<[String]>::first);
        if let Some(stated) = stated.filter(|stated| *stated != meant) {
            return usage(format!(
                "--amp {amp} means --precision {meant}, and --precision {stated} is stated too; pass one of them"
            ));
        }
        spec = spec.without(&["amp"]).with("precision", meant);
    }
    for comparison in Comparison::EACH {
        let key = comparison.key();
        let Some(choice) = spec.get(key).and_then(<[String]>::first).cloned() else { continue };
        if Several::named(&choice).is_some() {
            return usage(format!("--{key} {choice} makes several runs, and this is one of them"));
        }
        let name = comparison.strategy(&choice)?.name;
        if let Some(named) = spec.get(STRATEGIES.key).and_then(<[String]>::first)
            && STRATEGIES.get(named)?.name != name
        {
            return usage(format!(
                "--{key} {choice} and --strategy {named} are two names of one flag; pass one of them"
            ));
        }
        spec = spec.without(&[key]).with(STRATEGIES.key, name);
    }
    Ok(spec)
}

/// Fails for flags of another model, data set or optimizer, and of a comparison.
pub fn check_choices(flags: &RunFlags, spec: &RunSpec) -> Result<()> {
    check_foreign(&MODELS, &flags.model, spec)?;
    check_foreign(&DATA_SETS, &flags.data.data, spec)?;
    check_foreign(&OPTIMIZERS, &flags.training.optimizer, spec)?;
    if spec.has("price-per-hour") {
        return usage(
            "--price-per-hour is about a comparison; it needs --ddp-choice all or --shard-choice all (or published)".to_owned(),
        );
    }
    Ok(())
}

fn check_foreign<K>(registry: &Registry<K>, name: &str, spec: &RunSpec) -> Result<()> {
    let foreign = registry.foreign_to(registry.get(name)?);
    let Some(flag) = foreign.iter().find(|flag| spec.has(flag)) else { return Ok(()) };
    let key = registry.key;
    let readers = registry.readers(flag).join(&format!(" or --{key} "));
    usage(format!(
        "--{flag} does not apply to --{key} {name}; leave it out, or pass --{key} {readers}"
    ))
}

fn check_evaluation(flags: &RunFlags, model: &ModelConfig, data: &DataConfig) -> Result<()> {
    let of_evaluations = [
        ("--early-stop", flags.evaluation.early_stop.is_some()),
        ("--save-best", flags.checkpoints.save_best),
    ];
    if let (Some((flag, _)), None) =
        (of_evaluations.iter().find(|(_, is_given)| *is_given), flags.evaluation.eval_every)
    {
        return usage(format!(
            "{flag} compares evaluations during training; add --eval-every N, or leave it out"
        ));
    }
    let flag = match (flags.evaluation.evaluate, flags.evaluation.eval_every) {
        (true, _) => "--evaluate",
        (_, Some(_)) => "--eval-every",
        (false, None) => return Ok(()),
    };
    if data.has_test() {
        Ok(())
    } else {
        usage(format!(
            "{flag}: --data {} has no test part for --model {}; leave it out",
            data.name(),
            model.name()
        ))
    }
}

/// Fails if the padding of targets would be trained.
fn check_padding(
    dataset: &dyn Dataset,
    built: &Model,
    data: &DataConfig,
    model: &ModelConfig,
) -> Result<()> {
    let is_ragged = dataset.field(Field::TARGETS).is_some_and(|field| field.is_ragged());
    if is_ragged && !built.objective.reads_lengths() {
        usage(format!(
            "--data {}: its targets have different lengths, so batches pad them, and --model {} would train on the padding; \
             give targets of one length, or an objective that leaves out the padding after `lengths` and says so \
             (Objective::reads_lengths)",
            data.name(),
            model.name()
        ))
    } else {
        Ok(())
    }
}

/// If the ranks' models differ, fails for flags that need a single model, or warns.
fn check_drift(
    flags: &RunFlags,
    strategy: &StrategyConfig,
    warnings: &mut Vec<String>,
) -> Result<()> {
    let outputs = [
        ("--save", flags.checkpoints.save.is_some()),
        ("--evaluate", flags.evaluation.evaluate),
        ("--eval-every", flags.evaluation.eval_every.is_some()),
        ("--sample-every", flags.evaluation.sample_every.is_some()),
    ];
    let wanted = outputs.iter().find(|(_, is_given)| *is_given).map(|(flag, _)| *flag);
    let models = match strategy.sync_blocks {
        Some(_) => Models::Worthless,
        None => strategy.settings().models(),
    };
    let name = strategy.name();
    match (models, wanted) {
        (Models::Worthless, Some(flag)) => {
            return usage(format!(
                "{flag}: with {} every rank trains its own model, so there is no single model to save or evaluate; leave it \
                 out",
                strategy.words()
            ));
        }
        (Models::EqualAfterAverage, _) => {
            let early = [
                ("--eval-every", flags.evaluation.eval_every.is_some(), "evaluation"),
                ("--save-every", flags.checkpoints.save_every.is_some(), "checkpoint"),
                ("--sample-every", flags.evaluation.sample_every.is_some(), "text"),
            ];
            for (flag, _, what) in early.iter().filter(|(_, is_given, _)| *is_given) {
                warnings.push(format!(
                    "{flag}: {name} averages its models before each {what}, and trains on from there"
                ));
            }
        }
        _ => {}
    }
    Ok(())
}

/// Checks that everything that the run will write can be written.
fn check_outputs(config: &TrainConfig) -> Result<()> {
    folder::check_runs(config.output.run_dir.as_deref())?;
    if let Some(folder) = &config.checkpoints.save {
        check_folder("--save", folder, "pass a folder that you can write to")?;
        Folder::check(folder)?;
        resume::check_save(config)?;
    }
    if let Some(file) = &config.output.json {
        check_file("--json", file)?;
    }
    if config.mark_ranges {
        markers::of_kernel()?;
    }
    config.profile.as_ref().map_or(Ok(()), ProfileConfig::check)
}
