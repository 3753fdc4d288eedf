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
use paceline_observe::insight::memory::batch_of;
use paceline_table::chart::{Axis, Picture, Series};
use paceline_table::table::Columns;
use serde_json::Value;

use super::args::LabArgs;
use super::outcome::{Beside, Row};
use super::scene::Scene;
use super::{Experiment, Flags, Made, models, runs};
use crate::spec::{self, Spec};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "precision-fusion",
    about: "products in f32, bf16 and emulated fp16, operations fused and one by one",
    question: "What do narrow types and fused operations bring, alone and together, and what do they do to the loss?",
    set_here: &[
        ("precision", "it is what the experiment turns"),
        ("amp", "it is what the experiment turns"),
        ("fuse", "it is what the experiment turns"),
        ("emulate-fp16", "the experiment passes it with fp16"),
        ("loss-scale", "the experiment passes it with fp16"),
    ],
    figures: &["train_loss", "activations_mb", "mfu_pct"],
    scene_label: None,
    scenes,
    beside,
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
            scene.with_untimed(*name, fp16.with("loss-scale", scale))
        })
    };
    Ok(models.into_iter().map(scene).collect())
}

fn beside(made: &Made) -> Result<Vec<Beside>> {
    Ok([Some(roofline(made)?), losses(made)?].into_iter().flatten().collect())
}

/// The bytes and operations of a step, and the least time for both.
struct Roof {
    scene: String,
    variant: String,
    moved_mb: f64,
    gflop: f64,
    /// Milliseconds to move the bytes from and to memory.
    memory_ms: f64,
    /// Milliseconds to compute at the measured peak.
    peak_ms: Option<f64>,
    step_ms: Option<f64>,
}

fn roofline(made: &Made) -> Result<Beside> {
    let group = Group::threads(1).remove(0);
    let bandwidth = bandwidth_gb_s(&group)?;
    let mut rows = Vec::new();
    let variants = made.scenes.iter().flat_map(|scene| &scene.variants);
    for (at, (variant, row)) in variants.zip(&made.outcome.rows).enumerate() {
        if !variant.is_timed {
            continue;
        }
        let of_step = rehearse(&variant.spec)?;
        let figure = |name: &str| row.figures.get(name).map(|of| of.median);
        let gflop = (of_step.forward_flops + of_step.backward_flops) as f64 / 1e9;
        let moved_mb = of_step.moved_bytes as f64 / 1e6;
        let (runs, _) = made.ledger.of_case(at);
        let peak = runs.first().and_then(|run| run.number("peak_gflop_per_s"));
        rows.push(Roof {
            scene: row.scene.clone(),
            variant: variant.name.clone(),
            moved_mb,
            gflop,
            memory_ms: bandwidth.map_or(f64::NAN, |gb_s| moved_mb / gb_s),
            peak_ms: peak.map(|peak| 1e3 * gflop / peak),
            step_ms: figure("step_ms_median"),
        });
    }
    let table = Columns::new()
        .add("scene", "scene", ("", 0), "", |row: &Roof| row.scene.clone())
        .add("variant", "variant", ("", 0), "", |row| row.variant.clone())
        .add(
            "moved_mb",
            "moved",
            ("MB", 1),
            "Bytes that the operations of both passes read and write.",
            |row| row.moved_mb,
        )
        .add("gflop", "products", ("GFLOP", 2), "", |row| row.gflop)
        .add("flop_per_byte", "FLOP / byte", ("", 1), "", |row| 1e3 * row.gflop / row.moved_mb)
        .add(
            "memory_ms",
            "memory alone",
            ("ms", 2),
            "The bytes at the bandwidth of a copy that no cache holds.",
            |row| row.memory_ms,
        )
        .add(
            "peak_ms",
            "products alone",
            ("ms", 2),
            "The products at the measured peak of f32.",
            |row| row.peak_ms,
        )
        .add("step_ms", "measured step", ("ms", 2), "", |row| row.step_ms)
        .table(&rows);
    let line = bandwidth.map(|gb_s| {
        format!("One thread copies {gb_s:.1} GB/s, read and written. What stays in a cache between two operations moves faster.")
    });
    Ok(Beside {
        id: "roofline",
        title: "Bytes moved, and the roofline",
        definition: "Counted in a rehearsal of the step without arithmetic: each operand of each operation, twice if it is \
                     changed in place. A fused operation does not write what lies between its parts. Source: Williams, Waterman and \
                     Patterson, Roofline, 2009."
            .to_owned(),
        table,
        lines: line.into_iter().collect(),
        chart: None,
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

/// How far the losses of a variant are from those of the base.
struct Distance<'a> {
    row: &'a Row,
    last: f64,
    mean: f64,
    most: f64,
    skipped: Option<f64>,
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

fn losses(made: &Made) -> Result<Option<Beside>> {
    let (mut rows, mut series) = (Vec::new(), Vec::new());
    let mut base: Vec<(f64, f64)> = Vec::new();
    let has_one = made.outcome.scenes().count() == 1;
    let mut look = 0;
    for (case, row) in made.outcome.rows.iter().enumerate() {
        let own = curve(made, case)?;
        if row.is_base {
            base = own.clone();
            look = 0;
        }
        let apart: Vec<f64> =
            own.iter().zip(&base).map(|((_, own), (_, base))| (own - base).abs()).collect();
        let Some((_, last)) = own.last() else { continue };
        rows.push(Distance {
            row,
            last: *last,
            mean: apart.iter().sum::<f64>() / apart.len().max(1) as f64,
            most: apart.iter().copied().fold(0.0, f64::max),
            skipped: made
                .ledger
                .of_case(case)
                .0
                .first()
                .and_then(|run| run.number("skipped_steps")),
        });
        if has_one || row.scene == made.outcome.rows[0].scene {
            series.push(Series::line(row.variant.clone(), own).look(look));
        }
        look += 1;
    }
    if rows.is_empty() {
        return Ok(None);
    }
    let table = Columns::new()
        .add("scene", "scene", ("", 0), "", |of: &Distance| of.row.scene.clone())
        .add("variant", "variant", ("", 0), "", |of| of.row.variant.clone())
        .add("last", "last loss", ("", 4), "", |of| of.last)
        .add(
            "mean",
            "from the base",
            ("", 5),
            "Mean over the steps of the distance of the losses.",
            |of| of.mean,
        )
        .add("most", "at most", ("", 5), "", |of| of.most)
        .add(
            "skipped",
            "skipped steps",
            ("", 0),
            "Steps that were skipped because gradients overflowed.",
            |of| of.skipped,
        )
        .table(&rows);
    let chart = Picture::lines(
        "precision-fusion: the loss of each step".to_owned(),
        format!("{}; {}", made.outcome.machine, made.outcome.date),
        [Axis::linear("step", ""), Axis::linear("loss", "")],
        series,
    );
    Ok(Some(Beside {
        id: "losses",
        title: "The losses, and how far they are apart",
        definition: "Of the first run of each variant, step by step.".to_owned(),
        table,
        lines: Vec::new(),
        chart: Some(("precision-fusion-loss".to_owned(), chart)),
    }))
}
