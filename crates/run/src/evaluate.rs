//! `paceline evaluate`: loss and accuracy of a checkpoint over a test set.
//!
//! It makes no run folder.

pub mod args;

use std::path::Path;
use std::sync::Arc;

use paceline_checkpoint::Checkpoint;
use paceline_checkpoint::progress::TestResult;
use paceline_choices::data::{DataConfig, RunNeeds};
use paceline_choices::models::ModelConfig;
use paceline_choices::registry::read;
use paceline_collectives::Group;
use paceline_data::Dataset;
use paceline_failure::outputs::{check_file, write_stated_json};
use paceline_failure::{Failure, Result, usage};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::streams;
use paceline_host::text::{listed, plural, say, warn};
use paceline_kernels::{Compute, Instructions};
use paceline_launch::comm;
use paceline_launch::device::Device;
use paceline_launch::environment::{self, Placement};
use paceline_launch::pinning::Pinning;
use paceline_memory::Allocator;
use paceline_observe::views::console::evaluation_lines;
use paceline_settings::flags::RunFlags;
use paceline_settings::named::PrecisionName;
use paceline_settings::ranks::{InitMethod, Ranks};
use paceline_settings::spec::RunSpec;
use paceline_strategies::{Replica, ReplicaOptions, SimpleDdp, StepContext, StepState};
use paceline_trace::SpanTrack;
use serde::Serialize;
use serde_json::json;

use self::args::{EvaluateArgs, is_taken};
use crate::agreement::{self, Settings};
use crate::predictions::Predictions;
use crate::resolve::{check_choices, with_one_name};
use crate::{evaluation, precision, recorded, resolve_ranks as config, resume};

/// All resolved settings of an evaluation.
struct EvaluationConfig {
    model: ModelConfig,
    /// As the flag says, otherwise as the checkpoint was trained.
    precision: PrecisionName,
    data: DataConfig,
    seed: u64,
    global_batch_size: usize,
    world_size: usize,
    comm: comm::CommConfig,
    init_method: InitMethod,
}

/// The contents of the file that `--json` names.
#[derive(Serialize)]
struct Found<'a> {
    checkpoint: &'a Path,
    /// Optimizer steps that the run had made when the checkpoint was written.
    steps: u64,
    samples: f64,
    /// The tokens that the means are over, with a language model.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<f64>,
    loss: f64,
    /// Only with a language model.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<f64>,
    /// The names of the classes, if the checkpoint has names for them.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    classes: &'a [String],
    /// Left out if the model does not classify.
    #[serde(skip_serializing_if = "Option::is_none")]
    accuracy: Option<f64>,
    /// The samples of each class that are put into each class, with `--predictions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    confusions: Option<Vec<Vec<u64>>>,
}

/// Checks the flags, the data and the checkpoint, then evaluates as a rank or as several threads, or launches the ranks.
pub fn evaluate(args: &EvaluateArgs, placement: Option<Placement>) -> Result<u8> {
    let (stated, notes) = args.spec()?;
    let placement = placement.as_ref();
    let flag = format!("--checkpoint {}", args.checkpoint.printable());
    let refuse = |reason: String| Failure::Usage(format!("{flag}: {reason}"));
    let checkpoint = Checkpoint::open(&args.checkpoint).map_err(refuse)?;
    let spec = recorded::under_evaluation(&with_one_name(&stated)?, &checkpoint, is_taken, refuse)?;
    let classes = resume::class_names(&checkpoint);
    let (train, mut config, test) = resolve(&spec, placement, &classes)?;
    if let Some(file) = &args.json {
        check_file("--json", file)?;
    }
    let model = config.model.build(test.as_ref(), config.world_size);
    let model = model.map_err(|e| Failure::Usage(e.to_string()))?;
    let has = test.class_names();
    if ![&classes, &has].iter().any(|names| names.is_empty()) && classes != has {
        return Err(refuse(format!(
            "it was trained with the classes {}, and the data have {}; pass a --data-dir with the same classes",
            listed(&classes),
            listed(&has)
        )));
    }
    if let Some(file) = &args.predictions {
        if test.num_classes().is_none() {
            return usage("--predictions: the model predicts no class for a sample; leave it out");
        }
        check_file("--predictions", file)?;
    }
    checkpoint.check_model(&model.layout).map_err(refuse)?;
    if !spec.has("precision") {
        config.precision = precision::of_checkpoint(&checkpoint).map_err(refuse)?;
    }
    precision::check_processor(config.precision, train.precision.emulate_fp16)?;
    precision::check(config.precision, &config.model, &model, test.as_ref())?;
    let mut notes = notes;
    let pinning = config::resolve_pinning(&train, placement, config.world_size, &mut notes);
    let was_said = |placement: &Placement| placement.is_started || placement.place.rank > 0;
    if !placement.is_some_and(was_said) {
        notes.iter().for_each(|note| warn(note));
        precision::note(config.precision, train.precision.emulate_fp16)
            .iter()
            .for_each(|note| warn(note));
        warn_of_other_data(&checkpoint, &config);
        if !train.output.quiet {
            let pinned = pinning.iter().map(Pinning::words).collect();
            let found = [config.model.notes(), config.data.notes(), pinned].concat();
            found.iter().for_each(|note| streams::stderr().line(note));
        }
    }

    let ranks = Ranks {
        world_size: config.world_size,
        threads: train.host.threads,
        pin_cores: pinning.is_some(),
        transport: train.ranks.transport,
        comm: &config.comm,
        init_method: &config.init_method,
    };
    if ranks.are_launched(placement) {
        // Each rank opens the data and the checkpoint itself.
        drop((test, checkpoint));
        return ranks.launch(vec![(environment::STARTED, "1".into())], None);
    }
    let others = json!({
        "precision": config.precision,
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "predictions": args.predictions.is_some(),
    });
    let settings = Settings::of_evaluation(&config.model, &config.data, test.digest(), &others);
    ranks.run(placement, None, |group, local_rank| {
        agreement::check(&group, local_rank, Device::Cpu, &settings)?;
        let is_first = group.rank() == 0;
        if is_first {
            let model = config.model.name();
            let (world, transport) = (plural(config.world_size, "rank"), group.transport().name());
            let precision = config.precision.in_title(false);
            let held = Instructions::held().map_or(String::new(), |of| format!(", held to {of}"));
            say(&format!("paceline evaluate: {model} over {transport}, {world}{precision}{held}"));
            let steps = plural(checkpoint.progress().steps as usize, "step");
            say(&format!("Checkpoint: {}, after {steps}", args.checkpoint.printable()));
        }
        resume::check_same(&group, &checkpoint.digest(), &flag)?;
        let predictions = || Predictions::new(test.len());
        let mut predictions = args.predictions.is_some().then(predictions).transpose()?;
        let (data, into) = (test.clone(), predictions.as_mut());
        let result = evaluate_rank(&config, train.host.threads, &checkpoint, data, group, into)?;
        if !is_first {
            return Ok(());
        }
        evaluation_lines(&result, &classes).iter().for_each(|line| say(line));
        let names = if classes.is_empty() { &has } else { &classes };
        let report = predictions.as_ref().zip(args.predictions.as_deref());
        let confusions = report.map(|(of, file)| of.report(file, names)).transpose()?;
        let Some(file) = &args.json else { return Ok(()) };
        let found = Found {
            checkpoint: &args.checkpoint,
            steps: checkpoint.progress().steps,
            samples: result.samples as f64,
            tokens: result.tokens(),
            loss: result.sums.mean_loss(),
            perplexity: result.perplexity(),
            classes: &classes,
            accuracy: result.accuracy(),
            confusions,
        };
        write_stated_json(&Disk::default(), file, &found)
    })?;
    Ok(0)
}

/// Checks the flags together, and opens the test set. `classes` are the checkpoint's.
fn resolve(
    spec: &RunSpec,
    placement: Option<&Placement>,
    classes: &[String],
) -> Result<(RunFlags, EvaluationConfig, Arc<dyn Dataset>)> {
    let settings = spec.parse()?;
    let mut args: RunFlags = read(&settings)?;
    if let Some(placement) = placement {
        args.ranks.transport =
            placement.transport_of_run(args.ranks.transport, spec.has("transport"));
    }
    check_choices(&args, spec)?;
    let model = ModelConfig::resolve(&args.model, args.freeze.clone(), &settings)?;
    let world_size = config::resolve_world_size(&args, placement)?;
    config::check_ranks(&args, placement)?;
    let comm = config::resolve_comm(&args, placement, world_size)?;
    let global_batch_size = config::resolve_batch(&args, world_size, model.defaults().batch_size)?;
    let tokenizer = model.tokenizer();
    let needs = RunNeeds {
        model: model.name(),
        samples: model.samples(),
        global_batch_size,
        steps_per_epoch: None,
        on_device: false,
        tokenizer: tokenizer.as_deref(),
        class_names: if classes.is_empty() { model.class_names() } else { classes },
    };
    let data = DataConfig::resolve(&args.data.data, &settings, &needs)?;
    if !data.has_test() {
        return Err(Failure::Usage(format!(
            "--data {} has no test part for --model {} to evaluate on",
            data.name(),
            model.name()
        )));
    }
    if !placement.is_some_and(|placement| placement.is_started) {
        data.prepare(args.output.quiet)?;
    }
    let test = data.open_test(args.training.seed)?;
    let init_method = args.ranks.init_method.clone();
    let (seed, precision) = (args.training.seed, args.precision.precision);
    let config = EvaluationConfig {
        model,
        precision,
        data,
        seed,
        global_batch_size,
        world_size,
        comm,
        init_method,
    };
    Ok((args, config, test))
}

/// Warns if the checkpoint was trained on other data, which is allowed, but may be a mistake.
fn warn_of_other_data(checkpoint: &Checkpoint, config: &EvaluationConfig) {
    for (flag, ours) in resume::identity_of_data(&config.data, config.seed) {
        let theirs = checkpoint.setting(&flag);
        if let Some(theirs) = theirs.filter(|theirs| *theirs != ours) {
            warn(&format!(
                "{flag}: the checkpoint was trained with {theirs} and is evaluated with {ours}"
            ));
        }
    }
}

/// Evaluates as one rank of `group`.
fn evaluate_rank(
    config: &EvaluationConfig,
    threads: usize,
    checkpoint: &Checkpoint,
    test: Arc<dyn Dataset>,
    group: Group,
    predictions: Option<&mut Predictions>,
) -> Result<TestResult> {
    let compute = Compute::new(threads, Allocator::new())?;
    let model = config.model.build(test.as_ref(), group.world_size())?;
    // Without gradients, any strategy without state will do.
    let mut strategy = SimpleDdp;
    let options = ReplicaOptions { precision: config.precision.into(), ..Default::default() };
    let replica = Replica::new(&mut strategy, model, compute, group, config.seed, options)?;
    checkpoint.restore_model(&replica.storage, replica.storage.values().ranges())?;
    // Nobody reads the times.
    let (mut state, mut track) = (StepState::new(&replica)?, SpanTrack::with_capacity(0));
    let cx = &mut StepContext { replica: &replica, state: &mut state, track: &mut track };
    evaluation::evaluate(&mut strategy, cx, test, (config.global_batch_size, None), predictions)
}
