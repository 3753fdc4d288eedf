//! `buckets`: the step by the size of its buckets, measured and replayed, beside strategies without buckets.

use std::path::Path;

use paceline_failure::{Failure, Result};
use paceline_host::text::warn;
use paceline_table::chart::{Axis, Picture, Series, Stroke};
use paceline_table::stats::two_term_fit;

use super::args::LabArgs;
use super::{Experiment, Made, runs};
use crate::noise::Spread;
use crate::outcome::Row;
use crate::predict::flags::MEASURED;
use crate::predict::link_of;
use crate::predict::model::replayed;
use crate::predict::network::{Network, Route};
use crate::report::{Found, tabled};
use crate::scene::{Scene, Variant};
use crate::spec;
use crate::study::{layout_of, with_strategy};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "buckets",
    about: "the size of the buckets in which gradients travel, measured and replayed, and strategies without buckets",
    question: "Which size of buckets hides most, and does a replay of one run know it?",
    set_here: &[
        ("bucket-cap-mb", "the experiment varies it; pass --sizes"),
        ("first-bucket-mb", "all buckets have the size that the experiment varies; pass --sizes"),
        ("strategy", "it is ddp, beside strategies without buckets"),
        ("link", "pass --links"),
        ("mesh", "the experiment is about data parallelism"),
    ],
    figures: &["num_buckets", "comm_overhead_pct", EXPOSED, "comm_hidden_ms"],
    scenes,
    found,
};

const MIB: f64 = 1_048_576.0;
/// Sizes, as parts of all gradients.
const PARTS: [f64; 6] = [1.0 / 64.0, 1.0 / 16.0, 1.0 / 8.0, 0.25, 0.5, 1.0];
/// The strategies without buckets.
const WITHOUT: [(&str, &str); 3] =
    [("naive", "simple_ddp"), ("flat", "flat_ddp"), ("overlapped", "simple_ddp_async")];
const ALONE: &str = "no communication";
/// The smallest part of the variance that a formula explains if it fits.
const LEAST_EXPLAINED: f64 = 0.5;
/// The communication that a step could not hide.
const EXPOSED: &str = "comm_exposed_ms";
/// The figure that is measured and replayed.
const STEP: &str = "step_ms_median";

fn scenes(args: &LabArgs, _: &Path) -> Result<Vec<Scene>> {
    let base = runs(args, &[("nproc", "2"), ("steps", "20"), ("warmup-steps", "3")]);
    let base = base.with("strategy", "ddp");
    let config = spec::resolve(&base)?;
    if config.world_size < 2 {
        return crate::usage("--nproc 1: one rank has no gradients to send; pass 2 or more");
    }
    let bytes = 4.0 * layout_of(&config, config.world_size)?.num_trained_params() as f64;
    // Rounded up, so that the last one holds all.
    let part = |part: &f64| (bytes * part / MIB * 1000.0).ceil() / 1000.0;
    let default = PARTS.iter().map(part).collect();
    let sizes = distinct(if args.sizes.is_empty() { default } else { args.sizes.clone() }, bytes);
    let mut scenes = Vec::new();
    for (name, base) in args.on_links(&base)? {
        let mut scene = Scene::new(name).with("ddp as it is", base.clone());
        for mib in &sizes {
            let spec = base.with("bucket-cap-mb", mib).with("first-bucket-mb", mib);
            scene = scene.with(format!("{mib} MiB"), spec);
        }
        for (name, strategy) in WITHOUT {
            scene = scene.with(format!("{name}: {strategy}"), with_strategy(&base, strategy)?);
        }
        let alone = base.with("strategy", "no_sync").without(&["link"]);
        scenes.push(scene.with(ALONE, alone));
    }
    Ok(scenes)
}

/// The sizes in MiB, ascending, with only the smallest of those that hold all `bytes` of gradients.
fn distinct(mut sizes: Vec<f64>, bytes: f64) -> Vec<f64> {
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    let num_smaller = sizes.iter().filter(|mib| **mib * MIB < bytes).count();
    for mib in sizes.iter().skip(num_smaller + 1) {
        warn(&format!("{mib} MiB: left out, since {} MiB hold all gradients", sizes[num_smaller]));
    }
    sizes.truncate(num_smaller + 1);
    sizes
}

/// A size of buckets on a link, in MiB; the row of its runs, and its step by replay.
type Point<'a> = (f64, &'a Row, f64);

fn found(made: &Made) -> Result<Vec<Found>> {
    let (mut points, mut lines) = (Vec::<Point>::new(), Vec::new());
    let mut series: Vec<Series> = Vec::new();
    for ((scene, rows), first) in made.with_rows() {
        let alone = first + rows.len() - 1;
        if let Some(message) = &made.outcome.rows[alone].failure {
            return Err(Failure::Run(message.clone()));
        }
        let spec = &scene.variants[0].spec;
        let (config, way) = (spec::resolve(spec)?, Route::Direct);
        let link = spec.get("link").and_then(|words| words.first());
        let link = link_of(link.map_or(MEASURED, String::as_str), config.world_size, &config, way)?;
        let network = Network { ranks: config.world_size, link, hosts: None, way };
        let point = |(variant, row): (&Variant, _)| {
            let mib = variant.spec.get("bucket-cap-mb")?.first()?.parse().ok()?;
            let ms = replayed(&variant.spec, Some(network), &made.outcome.runs[alone]);
            Some(ms.map(|ms| (mib, row, ms)))
        };
        let curve = scene.variants.iter().zip(rows).filter_map(point);
        let curve = curve.collect::<Result<Vec<Point>>>()?;
        lines.extend(verdict(scene, &curve));
        let of = |(_, row, _): &Point| Some((row.median("num_buckets")?, row.median(EXPOSED)?));
        let exposed: Vec<(f64, f64)> = curve.iter().filter_map(of).collect();
        let bytes = 4 * layout_of(&config, config.world_size)?.num_trained_params();
        let cost =
            if spec.has("link") { Ok(of_link(&network, bytes as u64)) } else { fitted(&exposed) };
        let by_formula = cost.map_or_else(|why| why, |cost| by_formula(cost, bytes as f64));
        lines.push(format!("{}: n o + s / (n w) {by_formula}", scene.name));
        let spread = |(mib, row, _): &Point| Some((mib * MIB, *row.figures.get(STEP)?));
        let measured: Vec<(f64, Spread)> = curve.iter().filter_map(spread).collect();
        let line = measured.iter().map(|(at, of)| (*at, of.median * 1e3));
        let ranges = measured.iter().map(|(at, of)| (*at, of.min * 1e3, of.max * 1e3));
        let (name, look) = (&scene.name, series.len() / 2);
        series.push(Series::line(format!("{name}, measured"), line).intervals(ranges).look(look));
        let replayed = curve.iter().map(|(mib, _, ms)| (mib * MIB, ms * 1e3));
        let dotted = Series::line(format!("{name}, replayed"), replayed);
        series.push(dotted.stroke(Stroke::Dotted).look(look));
        points.extend(curve);
    }
    let heads = [
        ("scene", "scene", ("", 0)),
        ("mib", "buckets", ("MiB", 4)),
        ("measured_ms", "measured step", ("ms", 2)),
        ("replayed_ms", "replayed", ("ms", 2)),
        ("ratio", "replayed / measured", ("", 2)),
    ];
    let cells = |(mib, row, ms): &Point| {
        let measured = row.median(STEP);
        let ratio = measured.map(|measured| ms / measured);
        [row.scene.clone().into(), (*mib).into(), measured.into(), (*ms).into(), ratio.into()]
    };
    let table = tabled(heads, points.iter().map(cells));
    let chart = Picture::lines(
        "buckets: the step over the size of its buckets".to_owned(),
        made.outcome.origin.place(),
        [Axis::logarithmic("bytes of a bucket", "B"), Axis::linear("median step", "us")],
        series,
    );
    let definition = "Replayed: the step of ranks that do not communicate, whose gradients become final at measured times, and \
                      buckets that travel one after the other as the formula of the link says (without a link: as all-reduces of a \
                      few sizes took, measured before).";
    Ok(vec![Found {
        lines,
        chart: Some(("buckets-curve".to_owned(), chart)),
        ..Found::new("curve", "Measured and replayed", definition, table)
    }])
}

/// The exposed communication with `n` buckets, in milliseconds: `n o + s / (n w)`, with `s` bytes of gradients. Each bucket costs
/// its operation, and the last one comes too late to be hidden.
struct Formula {
    /// `o`: the cost of an operation.
    op_ms: f64,
    /// `s / w`: the gradients in one all-reduce, without its cost.
    all_ms: f64,
    /// Where both come from.
    source: String,
}

/// The formula of an emulated link.
fn of_link(network: &Network, bytes: u64) -> Formula {
    let op_ms = network.all_reduce_ms(0);
    let all_ms = network.all_reduce_ms(bytes) - op_ms;
    Formula { op_ms, all_ms, source: "of the link".to_owned() }
}

/// The formula fitted to numbers of buckets with their exposed milliseconds, or why it does not hold.
fn fitted(exposed: &[(f64, f64)]) -> std::result::Result<Formula, String> {
    let mut counts: Vec<f64> = exposed.iter().map(|(buckets, _)| *buckets).collect();
    counts.sort_by(f64::total_cmp);
    counts.dedup();
    let fit = two_term_fit(exposed.iter().map(|(n, ms)| ([*n, 1.0 / n], *ms, 1.0)));
    // Two would always fit, because there are two unknowns.
    let [op_ms, all_ms] = fit.filter(|_| counts.len() > 2).ok_or(
        "is fitted to three numbers of buckets or more; pass other --sizes, or a link in --links",
    )?;
    let mean = exposed.iter().map(|(_, ms)| ms).sum::<f64>() / exposed.len() as f64;
    let left = exposed.iter().map(|(n, ms)| (ms - (op_ms * n + all_ms / n)).powi(2)).sum::<f64>();
    let explained = 1.0 - left / exposed.iter().map(|(_, ms)| (ms - mean).powi(2)).sum::<f64>();
    if op_ms > 0.0 && all_ms > 0.0 && explained >= LEAST_EXPLAINED {
        let source = format!("fitted to what stays exposed (R^2 = {explained:.2})");
        return Ok(Formula { op_ms, all_ms, source });
    }
    Err("does not fit what stays exposed: noise, or more than a pass can hide".to_owned())
}

/// The size that leaves least exposed: `sqrt(s o w)`.
fn by_formula(Formula { op_ms, all_ms, source }: Formula, bytes: f64) -> String {
    format!(
        "{source}: o = {op_ms:.3} ms, w = {:.2} GB/s, least with buckets of {:.2} MiB",
        bytes / all_ms / 1e6,
        bytes * (op_ms / all_ms).sqrt() / MIB
    )
}

fn verdict(scene: &Scene, curve: &[Point]) -> Option<String> {
    let measured = curve.iter().filter_map(|(mib, row, _)| Some((mib, row, row.median(STEP)?)));
    let (mib, best, best_ms) = measured.min_by(|a, b| a.2.total_cmp(&b.2))?;
    let by_replay = curve.iter().min_by(|a, b| a.2.total_cmp(&b.2))?;
    let advice = match best.effect.filter(|effect| !effect.is_none() && effect.ratio > 1.0) {
        Some(effect) => format!("set --bucket-cap-mb {mib} ({})", effect.words()),
        None => "leave --bucket-cap-mb as it is: no size pays by more than the noise".to_owned(),
    };
    Some(format!(
        "{}: {advice}; the replay says {} MiB, whose measured step is {:+.1} % longer than the shortest ({best_ms:.2} ms)",
        scene.name,
        by_replay.0,
        100.0 * (by_replay.1.median(STEP)? / best_ms - 1.0)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula_is_found_again_or_refused() {
        // 64 MiB in 32 ms, 0.5 ms per operation: 8 buckets are best, of 8 MiB.
        let of = |counts: &[f64], op_ms: f64, all_ms: f64| {
            let exposed: Vec<_> = counts.iter().map(|n| (*n, op_ms * n + all_ms / n)).collect();
            fitted(&exposed)
        };
        let found = of(&[1.0, 2.0, 4.0, 16.0, 64.0], 0.5, 32.0).unwrap();
        assert_eq!(
            by_formula(found, 64.0 * MIB),
            "fitted to what stays exposed (R^2 = 1.00): o = 0.500 ms, w = 2.10 GB/s, least with buckets of 8.00 MiB"
        );
        assert!(of(&[1.0, 1.0, 2.0], 0.5, 32.0).is_err_and(|why| why.contains("three numbers")));
        for (op_ms, all_ms) in [(-0.1, 32.0), (0.5, -0.2), (0.0, 0.0)] {
            assert!(of(&[1.0, 2.0, 4.0, 8.0], op_ms, all_ms).is_err());
        }
        let noisy = [(1.0, 9.0), (2.0, 1.0), (4.0, 11.0), (8.0, 2.0), (16.0, 9.0)];
        assert!(fitted(&noisy).is_err_and(|why| why.contains("does not fit")));
    }

    #[test]
    fn sizes_that_hold_all_gradients_are_run_once() {
        assert_eq!(distinct(vec![100.0, 1.0, 10.0, 1.0, 1000.0], 3.0 * MIB), [1.0, 10.0]);
        assert_eq!(distinct(vec![0.5, 0.25], 3.0 * MIB), [0.25, 0.5]);
    }
}
