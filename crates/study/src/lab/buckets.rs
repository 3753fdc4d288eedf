//! `buckets`: the step over the size of its buckets, measured and replayed, with the size to set.

use std::path::Path;

use paceline_failure::{Failure, Result};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_strategies::BucketCaps;
use paceline_table::chart::{Axis, Picture, Series, Stroke};
use paceline_table::table::Columns;

use super::args::LabArgs;
use super::effect::Effect;
use super::outcome::Beside;
use super::scene::Scene;
use super::{Experiment, Made, runs};
use crate::predict::flags::MEASURED;
use crate::predict::model::{Calibration, Step};
use crate::predict::network::{Network, Route};
use crate::rank::Spread;
use crate::spec;
use crate::studies::bucket_cost::MIB;
use crate::study::layout_of;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "buckets",
    about: "the size of the buckets in which gradients travel, measured and replayed",
    question: "Which size of buckets hides most, and does a replay of one run know it?",
    set_here: &[
        ("bucket-cap-mb", "it is what the experiment turns"),
        ("first-bucket-mb", "all buckets have the size that the experiment turns"),
        ("strategy", "it is ddp"),
        ("link", "pass --links"),
        ("mesh", "the experiment is about data parallelism"),
    ],
    figures: &["comm_exposed_ms", "comm_hidden_ms", "comm_ops_per_step"],
    scene_label: None,
    scenes,
    beside,
};

/// Sizes, as parts of all gradients.
const PARTS: [f64; 6] = [1.0 / 64.0, 1.0 / 16.0, 1.0 / 8.0, 0.25, 0.5, 1.0];
const ALONE: &str = "no communication";

/// The sizes in MiB, for gradients of `bytes` bytes.
fn sizes(bytes: f64) -> Vec<f64> {
    // Rounded up, so that the last one holds all.
    let of = |part: &f64| (bytes * part / MIB * 1000.0).ceil() / 1000.0;
    PARTS.iter().map(of).collect()
}

fn scenes(args: &LabArgs, _: &Path) -> Result<Vec<Scene>> {
    let base = runs(args, &[("nproc", "2"), ("steps", "20"), ("warmup-steps", "3")]);
    let base = base.with("strategy", "ddp");
    let config = spec::resolve(&base)?;
    if config.world_size < 2 {
        return crate::usage("--nproc 1: one rank has no gradients to send; pass 2 or more");
    }
    let bytes = 4.0 * layout_of(&config, config.world_size)?.num_trained_params() as f64;
    let mut scenes = Vec::new();
    for link in args.links_or(&["default", "1gbit:50us"])? {
        let (name, base) = match &link {
            None => ("without a link".to_owned(), base.clone()),
            Some(link) => (format!("link {link}"), base.with("link", link)),
        };
        let mut scene = Scene::new(name).with("ddp as it is", base.clone());
        for mib in sizes(bytes) {
            let spec = base.with("bucket-cap-mb", mib).with("first-bucket-mb", mib);
            scene = scene.with(format!("{mib} MiB"), spec);
        }
        let alone = base.with("strategy", "no_sync").without(&["link"]);
        scenes.push(scene.with(ALONE, alone));
    }
    Ok(scenes)
}

/// A size of buckets on a link.
struct Point {
    scene: String,
    mib: f64,
    measured: Option<Spread>,
    /// Compared with the size that `ddp` has by default.
    effect: Option<Effect>,
    replayed_ms: f64,
}

fn beside(made: &Made) -> Result<Vec<Beside>> {
    let (mut points, mut lines) = (Vec::<Point>::new(), Vec::new());
    let mut first = 0;
    for (scene, rows) in made.scenes.iter().zip(made.outcome.scenes()) {
        let cases = first..first + rows.len();
        first = cases.end;
        let (alone, failure) = made.ledger.of_case(cases.end - 1);
        if let Some(message) = failure {
            return Err(Failure::Run(message.to_owned()));
        }
        let replayed = replay(scene, &alone)?;
        let curve: Vec<Point> = replayed
            .into_iter()
            .zip(&rows[1..])
            .map(|((mib, replayed_ms), row)| Point {
                scene: scene.name.clone(),
                mib,
                measured: row.figures.get("step_ms_median").copied(),
                effect: row.effect,
                replayed_ms,
            })
            .collect();
        lines.extend(verdict(scene, &curve));
        points.extend(curve);
    }
    let table = Columns::new()
        .add("scene", "scene", ("", 0), "", |row: &Point| row.scene.clone())
        .add("mib", "buckets", ("MiB", 3), "", |row| row.mib)
        .add("measured_ms", "measured step", ("ms", 2), "", |row| row.measured.map(|of| of.median))
        .add("replayed_ms", "replayed", ("ms", 2), "", |row| row.replayed_ms)
        .add("ratio", "replayed / measured", ("", 2), "", |row| {
            row.measured.map(|of| row.replayed_ms / of.median)
        })
        .table(&points);
    let mut series: Vec<Series> = Vec::new();
    for (look, of_scene) in points.chunk_by(|a, b| a.scene == b.scene).enumerate() {
        let measured = of_scene.iter().filter_map(|of| Some((of.mib * MIB, of.measured?)));
        let measured: Vec<(f64, Spread)> = measured.collect();
        let line = measured.iter().map(|(at, of)| (*at, of.median * 1e3));
        let intervals = measured.iter().map(|(at, of)| (*at, of.min * 1e3, of.max * 1e3));
        let name = &of_scene[0].scene;
        series
            .push(Series::line(format!("{name}, measured"), line).intervals(intervals).look(look));
        let replayed = of_scene.iter().map(|of| (of.mib * MIB, of.replayed_ms * 1e3));
        let dotted = Series::line(format!("{name}, replayed"), replayed);
        series.push(dotted.stroke(Stroke::Dotted).look(look));
    }
    let chart = Picture::lines(
        "buckets: the step over the size of its buckets".to_owned(),
        format!("{}, {}", made.outcome.machine, made.outcome.date),
        [Axis::logarithmic("bytes of a bucket", "B"), Axis::linear("median step", "us")],
        series,
    );
    Ok(vec![Beside {
        id: "curve",
        title: "Measured and replayed",
        definition: "Replayed: the step of ranks that do not communicate, whose gradients become final at measured times, and \
                     buckets that travel one after the other as the formula of the link says (without a link: as all-reduces of a \
                     few sizes took, measured before)."
            .to_owned(),
        table,
        lines,
        chart: Some(("buckets-curve".to_owned(), chart)),
    }])
}

/// The step for each size, in MiB and milliseconds, by replay.
fn replay(scene: &Scene, alone: &[RunSummary]) -> Result<Vec<(f64, f64)>> {
    let spec = &scene.variants[0].spec;
    let config = spec::resolve(spec)?;
    let ranks = config.world_size;
    let layout = layout_of(&config, ranks)?;
    let calibration = Calibration::of(&config, ranks, alone)?;
    let name = spec.get("link").and_then(|words| words.first()).map_or(MEASURED, String::as_str);
    let link = crate::predict::link_of(name, ranks, &config, Route::Direct)?;
    let network = Network { ranks, link, hosts: None, way: Route::Direct };
    let bytes = 4.0 * layout.num_trained_params() as f64;
    let step = |mib: f64| {
        let bytes = (mib * MIB) as usize;
        let step = Step::new(&calibration, &layout, BucketCaps { first_bytes: bytes, bytes })?;
        Ok((mib, step.step_ms(|bytes| network.all_reduce_ms(bytes))))
    };
    sizes(bytes).into_iter().map(step).collect()
}

/// The size to set, and the size by the replay.
fn verdict(scene: &Scene, curve: &[Point]) -> Option<String> {
    let measured = curve.iter().filter_map(|of| Some((of, of.measured?.median)));
    let (best, best_ms) = measured.min_by(|a, b| a.1.total_cmp(&b.1))?;
    let by_replay = curve.iter().min_by(|a, b| a.replayed_ms.total_cmp(&b.replayed_ms))?;
    let at_it = by_replay.measured?.median;
    let advice = match best.effect.filter(|effect| !effect.is_none() && effect.ratio > 1.0) {
        Some(effect) => format!("set --bucket-cap-mb {} ({})", best.mib, effect.words()),
        None => "leave --bucket-cap-mb as it is: no size pays by more than the noise".to_owned(),
    };
    Some(format!(
        "{}: {advice}; the replay says {} MiB, whose measured step is {:+.1} % longer than the shortest ({best_ms:.2} ms)",
        scene.name,
        by_replay.mib,
        100.0 * (at_it / best_ms - 1.0)
    ))
}
