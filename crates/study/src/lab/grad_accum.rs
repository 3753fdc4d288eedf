//! `grad-accum`: the same samples of a step in 1, 2, 4 or 8 batches, reduced once per step or after each batch.

use std::collections::BTreeMap;
use std::path::Path;

use paceline_failure::Result;
use paceline_host::text::plural;
use paceline_table::table::Columns;

use super::args::LabArgs;
use super::outcome::{Beside, Row};
use super::scene::Scene;
use super::{Experiment, Made, runs};
use crate::usage;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "grad-accum",
    about: "gradients of several batches added up, with and without no_sync",
    question: "What does accumulation save in communication and memory, and what does it cost to forget no_sync?",
    set_here: &[
        ("accumulate", "it is what the experiment turns"),
        ("no-sync", "it is what the experiment turns"),
        (
            "batch-size",
            "the experiment divides --global-batch-size by the batches of a step; pass that",
        ),
        ("accumulation-order", "the experiment shows both"),
        ("link", "pass --links"),
        ("mesh", "the experiment is about data parallelism"),
    ],
    figures: &[
        "comm_exposed_ms",
        "comm_mb_per_step",
        "comm_ops_per_step",
        "activations_mb",
        "gradients_mb",
    ],
    scene_label: None,
    scenes,
    beside,
};

/// Batches of a step.
const BATCHES: [usize; 4] = [1, 2, 4, 8];
/// Samples of a step on all ranks.
const SAMPLES: usize = 128;
/// The scene about bits.
const BITS: &str = "the same samples, ranks and batches exchanged";

fn scenes(args: &LabArgs, _: &Path) -> Result<Vec<Scene>> {
    let base =
        runs(args, &[("nproc", "2"), ("steps", "12"), ("warmup-steps", "2"), ("strategy", "ddp")]);
    let samples = base.number("global-batch-size").unwrap_or(SAMPLES);
    let least = BATCHES[3] * base.number("nproc").unwrap_or(2);
    if !samples.is_multiple_of(least) {
        return usage(format!(
            "--global-batch-size {samples}: pass a multiple of {least}, which 8 batches divide on all ranks"
        ));
    }
    let mut scenes = Vec::new();
    for link in args.links_or(&["default", "1gbit:50us"])? {
        let (name, base) = match &link {
            None => ("without a link".to_owned(), base.clone()),
            Some(link) => (format!("link {link}"), base.with("link", link)),
        };
        let of = |batches: usize| {
            base.with("accumulate", batches).with("global-batch-size", samples / batches)
        };
        let mut scene = Scene::new(name);
        for batches in BATCHES {
            let name = if batches == 1 {
                "1 batch".to_owned()
            } else {
                format!("{batches} batches, no_sync")
            };
            scene = scene.with(name, of(batches));
        }
        for batches in &BATCHES[1..] {
            let spec = of(*batches).with("no-sync", "false");
            scene = scene.with(format!("{batches} batches, each reduced"), spec);
        }
        scenes.push(scene);
    }
    // More ranks than cores: threads start fastest.
    let tree = base.with("accumulation-order", "tree").with("transport", "thread");
    let of = |ranks: usize, batches: usize| {
        tree.with("nproc", ranks)
            .with("strategy", if ranks == 1 { "single" } else { "simple_ddp" })
            .with("accumulate", batches)
            .with("global-batch-size", samples / batches)
    };
    let mut scene = Scene::new(BITS);
    for (ranks, batches) in [(4, 1), (2, 2), (1, 4)] {
        let name = format!("{}, {}, tree", plural(ranks, "rank"), plural(batches, "batch"));
        scene = scene.with(name, of(ranks, batches));
    }
    scenes.push(scene);
    Ok(scenes)
}

fn beside(made: &Made) -> Result<Vec<Beside>> {
    // Each link: bytes sent and time against reducing each batch.
    let mut rows: Vec<(String, String, f64, f64, String)> = Vec::new();
    let of = |row: &Row, name: &str| row.figures.get(name).map_or(f64::NAN, |of| of.median);
    for scene in made.outcome.scenes().filter(|scene| scene[0].scene != BITS) {
        let by_name: BTreeMap<&str, &Row> =
            scene.iter().map(|row| (row.variant.as_str(), row)).collect();
        for batches in &BATCHES[1..] {
            let once = by_name.get(format!("{batches} batches, no_sync").as_str());
            let each = by_name.get(format!("{batches} batches, each reduced").as_str());
            let (Some(once), Some(each)) = (once, each) else { continue };
            let case =
                |row: &Row| made.outcome.rows.iter().position(|other| other == row).unwrap_or(0);
            let figures = |row: &Row| super::measure::figures(made.ledger, case(row));
            let effect = super::effect::Effect::of(&figures(each), &figures(once));
            rows.push((
                once.scene.clone(),
                format!("{batches} batches"),
                of(once, "comm_mb_per_step"),
                of(each, "comm_mb_per_step"),
                effect.map_or("too few rounds".to_owned(), |effect| effect.words()),
            ));
        }
    }
    let table = Columns::new()
        .add("link", "link", ("", 0), "", |row: &(String, String, f64, f64, String)| row.0.clone())
        .add("batches", "batches", ("", 0), "", |row| row.1.clone())
        .add("mb", "MB of a step, no_sync", ("", 2), "", |row| row.2)
        .add("mb_each", "MB of a step, each reduced", ("", 2), "", |row| row.3)
        .add(
            "effect",
            "no_sync brings",
            ("", 0),
            "Throughput over that with each batch reduced.",
            |row| row.4.clone(),
        )
        .table(&rows);
    let bits = made.outcome.scenes().find(|scene| scene[0].scene == BITS);
    let has_bits = bits.is_some_and(|scene| scene.iter().all(|row| row.has_bits_of_base));
    let line = if has_bits {
        "With --accumulation-order tree, 4 ranks, 2 ranks with 2 batches and 1 rank with 4 end with the same bits."
    } else {
        "The runs of the tree ended with other bits: that should not be."
    };
    Ok(vec![Beside {
        id: "no_sync",
        title: "What no_sync brings",
        definition: "Accumulation without no_sync sends all gradients after each batch: the misuse that saves nothing.".to_owned(),
        table,
        lines: vec![line.to_owned()],
        chart: None,
    }])
}
