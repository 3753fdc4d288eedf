//! `parallelism`: one rank, data parallelism, a pipeline, and both, with the same samples in a step.

use std::path::Path;

use paceline_failure::Result;
use paceline_table::table::Columns;

use super::args::LabArgs;
use super::{Experiment, Flags, Made, models, runs};
use crate::outcome::{FIGURE, Row};
use crate::predict::flags::link;
use crate::predict::model::replayed;
use crate::predict::network::{Network, Route};
use crate::report::Found;
use crate::scene::Scene;
use crate::spec::Spec;
use crate::usage;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "parallelism",
    about: "one rank, data parallelism, a pipeline, and both, with the same samples in a step",
    question: "Which way to divide the work wins, at which speed of the links and size of the model?",
    set_here: &[
        ("nproc", "the experiment varies it"),
        ("mesh", "the experiment varies it"),
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
    scenes,
    found,
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
/// The figure that is predicted.
const STEP: &str = "step_ms_median";

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
        for (name, on_link) in args.on_links(&base)? {
            let name = if model.is_empty() { name } else { format!("{model}, {name}") };
            let of = |base: &Spec, ranks: usize, batches: usize| {
                base.with("nproc", ranks)
                    .with("accumulate", batches)
                    .with("global-batch-size", samples / batches)
            };
            let piped = |mesh: &str, ranks: usize| {
                of(&on_link, ranks, MICRO_BATCHES).with("mesh", mesh).with("stages", "measured")
            };
            let name_of_both = "both, 2 stages of 2 ranks";
            scenes.push(
                Scene::new(name)
                    .with(ONE, of(&base, 1, 1).with("strategy", "single"))
                    .with(DATA, of(&on_link, 2, 1).with("strategy", "ddp"))
                    .with(PIPELINE, piped("pp=2", 2))
                    .with(name_of_both, piped("pp=2,dp=2", 4).with("strategy", "ddp"))
                    .with(ALONE, of(&base, 2, 1).with("strategy", "no_sync")),
            );
        }
    }
    Ok(scenes)
}

/// A way to divide the work: its scene, the step that was predicted from other runs, and the measured one.
type Predicted<'a> = (&'a str, &'static str, f64, f64);

fn found(made: &Made) -> Result<Vec<Found>> {
    let (mut rows, mut lines) = (Vec::<Predicted>::new(), Vec::new());
    for ((scene, found), first) in made.with_rows() {
        let place = |name: &str| scene.variants.iter().position(|of| of.name == name);
        let measured = |name: &str| found[place(name)?].median(STEP);
        let of_data = place(DATA).zip(place(ALONE)).zip(measured(DATA));
        if let Some(((of, alone), measured_ms)) =
            of_data.filter(|((_, at), _)| found[*at].failure.is_none())
        {
            let spec = &scene.variants[of].spec;
            // Without a link the transport is faster than any formula: only the computation remains.
            let name = spec.get("link").and_then(|words| words.first());
            let link = name.map(|name| link("--links", name)).transpose()?;
            let way = Route::Direct;
            let network = link.map(|link| Network { ranks: 2, link, hosts: None, way });
            let predicted_ms = replayed(spec, network, &made.outcome.runs[first + alone])?;
            rows.push((&scene.name, DATA, predicted_ms, measured_ms));
        }
        let rehearsed = place(PIPELINE).and_then(|at| found[at].median("step_rehearsed_ms"));
        if let Some((predicted_ms, measured_ms)) = rehearsed.zip(measured(PIPELINE)) {
            rows.push((&scene.name, PIPELINE, predicted_ms, measured_ms));
        }
        lines.extend(winner(&scene.name, found, &rows));
    }
    let definition = "Data parallel: the step of two ranks that do not communicate, and what the link's formula leaves exposed \
                      behind the backward pass. Pipeline: the rehearsal of its list with the measured costs of the blocks, made by \
                      the run itself before it began.";
    let table = Columns::new()
        .add("scene", "scene", ("", 0), "", |of: &Predicted| of.0.to_owned())
        .add("way", "way", ("", 0), "", |of| of.1)
        .add("predicted_ms", "predicted step", ("ms", 2), "", |of| of.2)
        .add("measured_ms", "measured step", ("ms", 2), "", |of| of.3)
        .add("ratio", "predicted / measured", ("", 2), "", |of| of.2 / of.3)
        .table(&rows);
    Ok(vec![Found {
        lines,
        ..Found::new("predicted", "Predicted and measured", definition, table)
    }])
}

/// The winner of a scene, and whether that was predicted.
fn winner(scene: &str, found: &[Row], predicted: &[Predicted]) -> Option<String> {
    let ways = found.iter().filter(|row| row.variant != ALONE);
    let fastest = ways.filter_map(|row| Some((row, row.median(FIGURE)?)));
    let (best, _) = fastest.max_by(|a, b| a.1.total_cmp(&b.1))?;
    let of_scene = predicted.iter().filter(|(of, ..)| *of == scene);
    let (_, way, least_ms, _) = of_scene.min_by(|a, b| a.2.total_cmp(&b.2))?;
    let expected = if *least_ms < found[0].median(STEP)? { *way } else { ONE };
    let verdict = if best.variant == expected {
        "as predicted".to_owned()
    } else {
        format!("predicted was {expected}")
    };
    Some(format!("{scene}: {} is fastest, {verdict}", best.variant))
}
