//! `precision-fusion`: the element type of products, and operations fused or one by one.

use std::path::Path;

use paceline_collectives::Group;
use paceline_commbench::memory::bandwidth_gb_s;
use paceline_data::BatchShape;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::Rehearsal;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::insight::memory::batch_of;
use paceline_table::chart::{Axis, Picture, Series};
use paceline_table::table::Columns;
use serde_json::Value;

use super::args::LabArgs;
use super::{Experiment, Flags, Made, models, runs};
use crate::outcome::Row;
use crate::report::Found;
use crate::scene::{Scene, Variant};
use crate::spec::{self, Spec};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "precision-fusion",
    about: "products in f32, bf16 and emulated fp16, operations fused and one by one",
    question: "What do narrow types and fused operations bring, alone and together, and what do they do to the loss?",
    set_here: &[
        ("precision", "the experiment varies it"),
        ("amp", "the experiment varies it"),
        ("fuse", "the experiment varies it"),
        ("emulate-fp16", "the experiment passes it with fp16"),
        ("loss-scale", "the experiment passes it with fp16"),
    ],
    figures: &["train_loss", "activations_mb", "mfu_pct"],
    scenes,
    found,
};

/// The variants whose time means nothing: name, and how the loss is scaled. The second scale is far too large.
const FP16: [(&str, &str); 2] =
    [("fp16 emulated", "dynamic"), ("fp16 emulated, scale 2^28 at first", "dynamic:268435456")];
/// The models: name, and flags.
const MODELS: [(&str, Flags); 2] = [
    ("CNN", &[("model", "cnn")]),
    (
        "MLP",
        &[("model", "mlp"), ("input-dim", "512"), ("hidden-dim", "1024"), ("output-dim", "128")],
    ),
];

fn scenes(args: &LabArgs, _: &Path) -> Result<Vec<Scene>> {
    let common = runs(args, &[("nproc", "1"), ("steps", "25"), ("warmup-steps", "3")]);
    let has_own = common.has("model") || common.has("recipe");
    let models = models(&common, has_own, &MODELS);
    let scene = |(name, base): (String, Spec)| {
        let of = |precision: &str, fuse: bool| base.with("precision", precision).with("fuse", fuse);
        let scene = Scene::new(name)
            .with("f32, one by one", of("f32", false))
            .with("f32, fused", of("f32", true))
            .with("bf16, one by one", of("bf16", false))
            .with("bf16, fused", of("bf16", true));
        let fp16 = of("fp16", true).with("emulate-fp16", "true");
        FP16.iter().fold(scene, |scene, (name, scale)| {
            scene.with(*name, fp16.with("loss-scale", scale)).untimed()
        })
    };
    Ok(models.into_iter().map(scene).collect())
}

fn found(made: &Made) -> Result<Vec<Found>> {
    Ok([Some(roofline(made)?), losses(made)?].into_iter().flatten().collect())
}

/// A row, a step of its runs without arithmetic, and the peak of f32 in GFLOP/s.
type Step<'a> = (&'a Row, Rehearsal, Option<f64>);

/// The bytes and operations of a step, and the least time for both.
fn roofline(made: &Made) -> Result<Found> {
    let group = Group::threads(1).remove(0);
    let bandwidth = bandwidth_gb_s(&group)?;
    let variants = made.scenes.iter().flat_map(|scene| &scene.variants);
    let runs = variants.zip(&made.outcome.rows).zip(&made.outcome.runs);
    let row = |((variant, row), runs): ((&Variant, _), &Vec<RunSummary>)| {
        let peak = runs.first().and_then(|run| run.number("peak_gflop_per_s"));
        Ok((row, rehearse(&variant.spec)?, peak))
    };
    let timed = runs.filter(|((variant, _), _)| variant.is_timed);
    let rows = timed.map(row).collect::<Result<Vec<Step>>>()?;
    let gflop = |of: &Rehearsal| (of.forward_flops + of.backward_flops) as f64 / 1e9;
    let mb = |of: &Rehearsal| of.moved_bytes as f64 / 1e6;
    let (of_words, ms) = (("", 0), ("ms", 2));
    let table = Columns::new()
        .add("scene", "scene", of_words, "", |(row, ..): &Step| row.scene.clone())
        .add("variant", "variant", of_words, "", |(row, ..)| row.variant.clone())
        .add("moved_mb", "moved", ("MB", 1), "", move |(_, of, _)| mb(of))
        .add("gflop", "products", ("GFLOP", 2), "", move |(_, of, _)| gflop(of))
        .add("flop_per_byte", "FLOP / byte", ("", 1), "", move |(_, of, _)| {
            1e3 * gflop(of) / mb(of)
        })
        .add("memory_ms", "memory alone", ms, "", move |(_, of, _)| {
            bandwidth.map(|gb_s| mb(of) / gb_s)
        })
        .add("peak_ms", "products alone", ms, "", move |(_, of, peak)| {
            peak.map(|peak| 1e3 * gflop(of) / peak)
        })
        .add("step_ms", "measured step", ms, "", |(row, ..)| row.median("step_ms_median"))
        .table(&rows);
    let line = bandwidth.map(|gb_s| {
        format!("One thread copies {gb_s:.1} GB/s, read and written. What stays in a cache between two operations moves faster.")
    });
    let definition = "Counted in a rehearsal of the step without arithmetic: each operand of each operation of both passes, twice if \
                      it is changed in place. A fused operation does not write what lies between its parts. Memory alone: the bytes \
                      at the bandwidth of a copy that no cache holds; products alone: at the measured peak of f32. Source: \
                      Williams, Waterman and Patterson, Roofline, 2009.";
    Ok(Found {
        lines: line.into_iter().collect(),
        ..Found::new("roofline", "Bytes moved, and the roofline", definition, table)
    })
}

/// A step of a run without arithmetic.
fn rehearse(spec: &Spec) -> Result<Rehearsal> {
    let config = spec::resolve(spec)?;
    let dataset = config.data.open_train(config.seed)?;
    let model = config.model.build(dataset.as_ref(), config.world_size)?;
    let samples = BatchShape::of(dataset.as_ref());
    let compute = Compute::new(1, Allocator::meta())?;
    let length = samples.max_length().unwrap_or(1);
    let batch = batch_of(&samples, &compute.allocator, config.batch_size, length)?;
    let precision = config.strategy.options.precision;
    let rehearsal = Rehearsal::of(&model, precision, &compute, &[batch], None, false);
    rehearsal.map_err(|error| Failure::Run(format!("the rehearsal of a step: {error}")))
}

/// The loss of each step of a variant's first run.
fn curve(made: &Made, case: usize) -> Result<Vec<(f64, f64)>> {
    let runs = made.folder.join("runs");
    let wanted = format!("{case:03}-");
    let Ok(entries) = std::fs::read_dir(&runs) else { return Ok(Vec::new()) };
    let mut folders: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.sort();
    let is_wanted = |path: &&std::path::PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&wanted))
    };
    let Some(folder) = folders.iter().find(is_wanted) else { return Ok(Vec::new()) };
    let file = folder.join("metrics.jsonl");
    let text = paceline_files::read_text(&file, 256 << 20)
        .map_err(|e| Failure::io(file.printable(), e))?;
    let point = |line: &str| {
        let value: Value = serde_json::from_str(line).ok()?;
        Some((value.get("step")?.as_f64()?, value.get("loss")?.as_f64()?))
    };
    Ok(text.lines().filter_map(point).collect())
}

/// The losses of each variant, and how far they are from those of the base.
fn losses(made: &Made) -> Result<Option<Found>> {
    let (mut rows, mut series) = (Vec::new(), Vec::new());
    let mut base: Vec<(f64, f64)> = Vec::new();
    for (case, row) in made.outcome.rows.iter().enumerate() {
        let own = curve(made, case)?;
        if row.is_base {
            base.clone_from(&own);
        }
        let apart = own.iter().zip(&base).map(|((_, own), (_, base))| (own - base).abs());
        let apart: Vec<f64> = apart.collect();
        let Some((_, last)) = own.last() else { continue };
        let first_run = made.outcome.runs[case].first();
        let mean = apart.iter().sum::<f64>() / apart.len().max(1) as f64;
        let most = apart.iter().copied().fold(0.0, f64::max);
        let skipped = first_run.and_then(|run| run.number("skipped_steps"));
        rows.push((row, [Some(*last), Some(mean), Some(most), skipped]));
        if row.scene == made.outcome.rows[0].scene {
            let look = series.len();
            series.push(Series::line(row.variant.clone(), own).look(look));
        }
    }
    if rows.is_empty() {
        return Ok(None);
    }
    let table = Columns::new()
        .add("scene", "scene", ("", 0), "", |of: &(&Row, [Option<f64>; 4])| of.0.scene.clone())
        .add("variant", "variant", ("", 0), "", |of| of.0.variant.clone())
        .add("last", "last loss", ("", 4), "", |of| of.1[0])
        .add("mean", "from the base", ("", 5), "", |of| of.1[1])
        .add("most", "at most", ("", 5), "", |of| of.1[2])
        .add("skipped", "skipped steps", ("", 0), "", |of| of.1[3])
        .table(&rows);
    let chart = Picture::lines(
        "precision-fusion: the loss of each step".to_owned(),
        made.outcome.origin.place(),
        [Axis::linear("step", ""), Axis::linear("loss", "")],
        series,
    );
    let title = "The losses, and how far they are apart";
    let definition = "Of the first run of each variant: the mean and the most over its steps. Steps are skipped because gradients \
                      overflow.";
    Ok(Some(Found {
        chart: Some(("precision-fusion-loss".to_owned(), chart)),
        ..Found::new("losses", title, definition, table)
    }))
}
