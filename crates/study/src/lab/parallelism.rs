//! `parallelism`: one rank, data parallelism, a pipeline, and both, with the same samples in a step.

use paceline_collectives::Link;
use std::path::Path;

use paceline_failure::Result;
use paceline_table::table::Columns;

use super::args::LabArgs;
use super::outcome::{Beside, Row};
use super::scene::Scene;
use super::{Experiment, Flags, Made, models, runs};
use crate::predict::model::{Calibration, Step};
use crate::predict::network::{Network, Route};
use crate::spec::{self, Spec};
use crate::study::layout_of;
use crate::usage;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "parallelism",
    about: "one rank, data parallelism, a pipeline, and both, with the same samples in a step",
    question: "Which way to divide the work wins, at which speed of the links and size of the model?",
    set_here: &[
        ("nproc", "it is what the experiment turns"),
        ("mesh", "it is what the experiment turns"),
        ("stages", "stages are cut by measured cost"),
        ("accumulate", "the experiment gives pipelines their micro-batches"),
        ("batch-size", "pass --global-batch-size, the samples of a step"),
        ("strategy", "it is ddp where ranks are replicas"),
        ("link", "pass --links"),
    ],
    figures: &[
        "comm_exposed_ms",
        "comm_mb_per_step",
        "bubble_pct",
        "bubble_fill_ms",
        "bubble_drain_ms",
        "bubble_transfer_ms",
        "bubble_imbalance_ms",
        "bubble_late_peer_ms",
    ],
    scene_label: None,
    scenes,
    beside,
};

/// Samples of a step.
const SAMPLES: usize = 64;
/// Micro-batches of a pipeline.
const MICRO_BATCHES: usize = 4;
/// The models: name, and flags.
const MODELS: [(&str, Flags); 2] = [
    ("CNN, 0.7 M parameters", &[("model", "cnn")]),
    (
        "MLP, 11 M parameters",
        &[("model", "mlp"), ("input-dim", "1024"), ("hidden-dim", "2048"), ("output-dim", "256")],
    ),
];

const ONE: &str = "one rank";
const DATA: &str = "data parallel";
const PIPELINE: &str = "pipeline";
const ALONE: &str = "2 ranks that do not communicate";

fn scenes(args: &LabArgs, _: &Path) -> Result<Vec<Scene>> {
    let common = runs(args, &[("steps", "15"), ("warmup-steps", "3")]);
    let samples = common.number("global-batch-size").unwrap_or(SAMPLES);
    if !samples.is_multiple_of(2 * MICRO_BATCHES) {
        return usage(format!(
            "--global-batch-size {samples}: pass a multiple of {}, which {MICRO_BATCHES} micro-batches on 2 ranks divide",
            2 * MICRO_BATCHES
        ));
    }
    let mut scenes = Vec::new();
    for (model, base) in models(&common, common.has("model"), &MODELS) {
        for link in args.links_or(&["default", "1gbit:50us"])? {
            let name =
                link.as_ref().map_or("without a link".to_owned(), |link| format!("link {link}"));
            let name = if model.is_empty() { name } else { format!("{model}, {name}") };
            let on = |spec: Spec| match &link {
                None => spec,
                Some(link) => spec.with("link", link),
            };
            let of = |ranks: usize, batches: usize| {
                base.with("nproc", ranks)
                    .with("accumulate", batches)
                    .with("global-batch-size", samples / batches)
            };
            let piped = |mesh: &str, ranks: usize| {
                of(ranks, MICRO_BATCHES).with("mesh", mesh).with("stages", "measured")
            };
            let name_of_both = "both, 2 stages of 2 ranks";
            scenes.push(
                Scene::new(name)
                    .with(ONE, of(1, 1).with("strategy", "single"))
                    .with(DATA, on(of(2, 1).with("strategy", "ddp")))
                    .with(PIPELINE, on(piped("pp=2", 2)))
                    .with(name_of_both, on(piped("pp=2,dp=2", 4).with("strategy", "ddp")))
                    .with(ALONE, of(2, 1).with("strategy", "no_sync")),
            );
        }
    }
    Ok(scenes)
}

/// A way to divide the work: the step that was predicted from other runs, and the measured one.
struct Predicted {
    scene: String,
    way: &'static str,
    predicted_ms: f64,
    measured_ms: f64,
}

fn beside(made: &Made) -> Result<Vec<Beside>> {
    let mut rows = Vec::new();
    let mut lines = Vec::new();
    let mut first = 0;
    for (scene, found) in made.scenes.iter().zip(made.outcome.scenes()) {
        let cases = first..first + scene.variants.len();
        first = cases.end;
        let place = |name: &str| scene.variants.iter().position(|of| of.name == name);
        let measured = |name: &str| -> Option<f64> {
            Some(found[place(name)?].figures.get("step_ms_median")?.median)
        };
        if let (Some(of), Some(alone)) = (place(DATA), place(ALONE)) {
            let spec = &scene.variants[of].spec;
            let (rounds, failure) = made.ledger.of_case(cases.start + alone);
            // Without a link the transport is faster than any formula: only the computation remains.
            let link = spec.get("link").and_then(|words| words.first());
            if let (None, Some(measured_ms)) = (failure, measured(DATA)) {
                let predicted_ms = predict(spec, link.map(String::as_str), &rounds)?;
                rows.push(Predicted {
                    scene: scene.name.clone(),
                    way: DATA,
                    predicted_ms,
                    measured_ms,
                });
            }
        }
        let rehearsed = place(PIPELINE).and_then(|at| found[at].figures.get("step_rehearsed_ms"));
        if let (Some(predicted), Some(measured_ms)) = (rehearsed, measured(PIPELINE)) {
            let predicted_ms = predicted.median;
            rows.push(Predicted {
                scene: scene.name.clone(),
                way: PIPELINE,
                predicted_ms,
                measured_ms,
            });
        }
        lines.extend(winner(&scene.name, found, &rows));
    }
    let table = Columns::new()
        .add("scene", "scene", ("", 0), "", |row: &Predicted| row.scene.clone())
        .add("way", "way", ("", 0), "", |row| row.way)
        .add("predicted_ms", "predicted step", ("ms", 2), "", |row| row.predicted_ms)
        .add("measured_ms", "measured step", ("ms", 2), "", |row| row.measured_ms)
        .add("ratio", "predicted / measured", ("", 2), "", |row| row.predicted_ms / row.measured_ms)
        .table(&rows);
    Ok(vec![Beside {
        id: "predicted",
        title: "Predicted and measured",
        definition: "Data parallel: the step of two ranks that do not communicate, and what the link's formula leaves exposed \
                     behind the backward pass. Pipeline: the rehearsal of its list with the measured costs of the blocks, made by \
                     the run itself before it began."
            .to_owned(),
        table,
        lines,
        chart: None,
    }])
}

/// The step of `ddp`, in milliseconds, from runs without communication. Without a link communication takes no time.
fn predict(
    spec: &Spec,
    link: Option<&str>,
    alone: &[paceline_observe::figures::run_summary::RunSummary],
) -> Result<f64> {
    let config = spec::resolve(spec)?;
    let calibration = Calibration::of(&config, 2, alone)?;
    let layout = layout_of(&config, 2)?;
    let step = Step::new(&calibration, &layout, config.strategy.caps_for_ddp())?;
    let link: Option<Link> =
        link.map(|name| crate::predict::flags::link("--links", name)).transpose()?;
    Ok(step.step_ms(|bytes| match link {
        None => 0.0,
        Some(link) => {
            Network { ranks: 2, link, hosts: None, way: Route::Direct }.all_reduce_ms(bytes)
        }
    }))
}

/// The winner of a scene, and whether that was predicted.
fn winner(scene: &str, found: &[Row], predicted: &[Predicted]) -> Option<String> {
    let ways = found.iter().filter(|row| row.variant != ALONE);
    let fastest = ways.filter_map(|row| Some((row, row.figures.get("samples_per_s")?.median)));
    let (best, _) = fastest.max_by(|a, b| a.1.total_cmp(&b.1))?;
    let base = found[0].figures.get("step_ms_median")?.median;
    let of_scene = predicted.iter().filter(|row| row.scene == scene);
    let least = of_scene.min_by(|a, b| a.predicted_ms.total_cmp(&b.predicted_ms))?;
    let expected = if least.predicted_ms < base { least.way } else { ONE };
    let verdict = if best.variant == expected {
        "as predicted".to_owned()
    } else {
        format!("predicted was {expected}")
    };
    Some(format!("{scene}: {} is fastest, {verdict}", best.variant))
}
