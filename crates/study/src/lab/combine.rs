//! `combine`: several options at once, as a grid: ranked, and whether one still helps when another is changed.

use std::path::Path;

use paceline_failure::Result;
use paceline_observe::figures::figure::Better;

use super::args::LabArgs;
use super::{Experiment, Made, runs};
use crate::grid;
use crate::outcome::{FIGURE, Row};
use crate::plan::{self, Vary};
use crate::report::{Found, tabled};
use crate::scene::Scene;
use crate::spec::Spec;
use crate::usage;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "combine",
    about: "several knobs at once: the best, and whether each still helps beside the others",
    question: "Which setting is fastest, and does a knob still help once another is turned?",
    set_here: &[],
    figures: &["train_loss"],
    scenes,
    found,
};

/// Runs beyond which the user has to say yes.
const MANY_RUNS: usize = 1000;

fn scenes(args: &LabArgs, _: &Path) -> Result<Vec<Scene>> {
    let grid = grid(args)?;
    // Before all variants are checked, which takes a moment for each.
    let num_variants = if args.one_at_a_time {
        1 + grid.iter().map(|of| of.alternatives.len() - 1).sum::<usize>()
    } else {
        plan::count(&grid)?
    };
    let num_runs = num_variants.saturating_mul(args.rounds);
    if num_runs > MANY_RUNS && !args.yes {
        return usage(format!(
            "--grid: {num_variants} variants in up to {} rounds are {num_runs} runs; pass --yes if you mean it, or fewer \
             values, --one-at-a-time or fewer --rounds",
            args.rounds
        ));
    }
    let base = runs(args, &[("steps", "20"), ("warmup-steps", "3")]);
    if !args.one_at_a_time {
        return Ok(vec![plan::combinations(&base, &grid)?.0]);
    }
    plan::check(&base, &grid)?;
    let first = |spec: Spec, of: &Vary| of.set(&spec, &of.alternatives[0]);
    let base = grid.iter().try_fold(base, first)?;
    let mut scene = Scene::new("").with("base", base.clone());
    for of in &grid {
        for value in &of.alternatives[1..] {
            scene = scene.with(format!("{}={value}", of.key), of.set(&base, value)?);
        }
    }
    Ok(vec![scene])
}

/// The knobs and their values.
fn grid(args: &LabArgs) -> Result<Vec<Vary>> {
    if args.grid.is_empty() {
        return usage(
            "paceline lab combine: the grid is empty; pass --grid KEY=A,B, as --grid precision=f32,bf16",
        );
    }
    let grid =
        args.grid.iter().map(|text| Vary::parse("--grid", text)).collect::<Result<Vec<_>>>()?;
    match grid.iter().find(|of| of.alternatives.len() < 2) {
        Some(of) => usage(format!("--grid {}: a knob has two values or more", of.text())),
        None => Ok(grid),
    }
}

fn found(made: &Made) -> Result<Vec<Found>> {
    let grid = grid(made.args)?;
    let mut found = vec![ranking(made)];
    if !made.args.one_at_a_time && grid.len() > 1 {
        found.push(grid::interactions(&grid, made.outcome));
    }
    Ok(found)
}

/// All variants, the fastest first.
fn ranking(made: &Made) -> Found {
    let mut ranked = made.outcome.clone();
    ranked.rank(FIGURE, Better::Higher);
    let base = &made.outcome.rows[0].variant;
    let heads = [
        ("place", "place", ("", 0)),
        ("variant", "variant", ("", 0)),
        ("effect", "throughput, to the base", ("", 0)),
    ];
    let row = |row: &Row| {
        let own = made.outcome.rows.iter().find(|own| own.variant == row.variant);
        let effect = own.map_or(String::new(), Row::verdict);
        [row.place.into(), row.variant.clone().into(), effect.into()]
    };
    let table = tabled(heads, ranked.rows.iter().map(row));
    let lines = vec![format!("Fastest: {}", ranked.rows[0].variant)];
    let definition = format!("Places by the rule of noise; the throughput beside that of {base}.");
    Found { lines, ..Found::new("ranking", "Ranked", definition, table) }
}
