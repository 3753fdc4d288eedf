//! `grad-accum`: the same samples of a step in 1, 2, 4 or 8 batches, reduced once per step or after each batch.

use std::path::Path;

use paceline_failure::Result;
use paceline_host::text::plural;
use paceline_table::table::Cell;

use super::args::LabArgs;
use super::{Experiment, Made, runs};
use crate::noise;
use crate::outcome::FIGURE;
use crate::report::{Found, tabled};
use crate::scene::Scene;
use crate::usage;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "grad-accum",
    about: "gradients of several batches added up, with and without no_sync",
    question: "What does accumulation save in communication and memory, and what does it cost to forget no_sync?",
    set_here: &[
        ("accumulate", "the experiment varies it"),
        ("no-sync", "the experiment varies it"),
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
    scenes,
    found,
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
    for (name, base) in args.on_links(&base)? {
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

fn found(made: &Made) -> Result<Vec<Found>> {
    let rows = &made.outcome.rows;
    let mut cells = Vec::new();
    for scene in made.outcome.scenes().filter(|scene| scene[0].scene != BITS) {
        let at = |name: String| {
            rows.iter().position(|row| row.scene == scene[0].scene && row.variant == name)
        };
        for batches in &BATCHES[1..] {
            let once = at(format!("{batches} batches, no_sync"));
            let each = at(format!("{batches} batches, each reduced"));
            let (Some(once), Some(each)) = (once, each) else { continue };
            let mb = |row: usize| Cell::from(rows[row].median("comm_mb_per_step"));
            let effect = noise::words(made.outcome.effect(FIGURE, each, once));
            let batches = format!("{batches} batches");
            let scene = scene[0].scene.clone();
            cells.push([scene.into(), batches.into(), mb(once), mb(each), effect.into()]);
        }
    }
    let heads = [
        ("link", "link", ("", 0)),
        ("batches", "batches", ("", 0)),
        ("mb", "MB of a step, no_sync", ("", 2)),
        ("mb_each", "MB of a step, each reduced", ("", 2)),
        ("effect", "no_sync brings", ("", 0)),
    ];
    let bits = made.outcome.scenes().find(|scene| scene[0].scene == BITS);
    let has_bits = bits.is_some_and(|scene| scene.iter().all(|row| row.has_bits_of_base));
    let line = if has_bits {
        "With --accumulation-order tree, 4 ranks, 2 ranks with 2 batches and 1 rank with 4 end with the same bits."
    } else {
        "The runs of the tree ended with other bits: that should not be."
    };
    let definition = "Accumulation without no_sync sends all gradients after each batch: the misuse that saves nothing.";
    let table = tabled(heads, cells);
    Ok(vec![Found {
        lines: vec![line.to_owned()],
        ..Found::new("no_sync", "What no_sync brings", definition, table)
    }])
}
