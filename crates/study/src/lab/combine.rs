//! `combine`: several options at once, as a grid: ranked, and whether one still helps when another is changed.

use std::path::Path;

use paceline_failure::Result;
use paceline_table::table::Columns;

use super::args::LabArgs;
use super::effect::Effect;
use super::outcome::{Beside, Row};
use super::scene::Scene;
use super::{Experiment, Made, measure, runs};
use crate::plan::{self, Vary};
use crate::spec::Spec;
use crate::usage;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "combine",
    about: "several knobs at once: the best, and whether each still helps beside the others",
    question: "Which setting is fastest, and does a knob still help once another is turned?",
    set_here: &[],
    figures: &["train_loss"],
    scene_label: None,
    scenes,
    beside,
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
    let cases: Vec<(String, Spec)> = if args.one_at_a_time {
        plan::check(&base, &grid)?;
        let first = |spec: Spec, of: &Vary| of.set(&spec, &of.alternatives[0]);
        let base = grid.iter().try_fold(base, first)?;
        let mut cases = vec![("base".to_owned(), base.clone())];
        for of in &grid {
            for value in &of.alternatives[1..] {
                let spec = of.set(&base, value)?;
                cases.push((format!("{}={value}", of.key), spec));
            }
        }
        cases
    } else {
        let (cases, _) = plan::cases(&base, &grid)?;
        cases.into_iter().map(|case| (case.name, case.spec)).collect()
    };
    let scene =
        cases.into_iter().fold(Scene::new(""), |scene, (name, spec)| scene.with(name, spec));
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

fn beside(made: &Made) -> Result<Vec<Beside>> {
    let mut tables = vec![ranking(made)];
    if !made.args.one_at_a_time {
        tables.extend(interactions(made)?);
    }
    Ok(tables)
}

/// All variants, the fastest first.
fn ranking(made: &Made) -> Beside {
    let mut rows: Vec<&Row> = made.outcome.rows.iter().collect();
    let ratio =
        |row: &Row| if row.is_base { 1.0 } else { row.effect.map_or(0.0, |effect| effect.ratio) };
    rows.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)));
    let places: Vec<(usize, &Row)> = rows.into_iter().enumerate().collect();
    let best = places.first().map(|(_, row)| format!("Fastest: {}", row.variant));
    let table = Columns::new()
        .add("place", "place", ("", 0), "", |(place, _): &(usize, &Row)| place + 1)
        .add("variant", "variant", ("", 0), "", |(_, row)| row.variant.clone())
        .add("effect", "throughput, to the base", ("", 0), "", |(_, row)| {
            row.effect.map_or("base".to_owned(), |effect| effect.words())
        })
        .table(&places);
    Beside {
        id: "ranking",
        title: "Ranked",
        definition: "By the throughput over that of the base, round by round.".to_owned(),
        table,
        lines: best.into_iter().collect(),
        chart: None,
    }
}

/// An option that changes from its first value to another, with a second option as in the base and changed.
struct Interaction {
    knob: String,
    beside: String,
    alone: Option<Effect>,
    together: Option<Effect>,
    /// The second effect over the first.
    change: Option<Effect>,
}

fn interactions(made: &Made) -> Result<Option<Beside>> {
    let grid = grid(made.args)?;
    if grid.len() < 2 {
        return Ok(None);
    }
    // The last option changes fastest.
    let case = |choice: &[usize]| {
        choice.iter().zip(&grid).fold(0, |at, (value, of)| at * of.alternatives.len() + value)
    };
    let logs = |from: &[usize], to: &[usize]| -> Vec<f64> {
        let figures = |choice: &[usize]| measure::figures(made.ledger, case(choice));
        figures(from).iter().zip(figures(to)).map(|(from, to)| (to / from).ln()).collect()
    };
    let mut rows = Vec::new();
    for a in 0..grid.len() {
        for b in (0..grid.len()).filter(|b| *b != a) {
            for value in 1..grid[a].alternatives.len() {
                for other in 1..grid[b].alternatives.len() {
                    let mut base = vec![0; grid.len()];
                    let mut turned = base.clone();
                    turned[a] = value;
                    let alone = logs(&base, &turned);
                    (base[b], turned[b]) = (other, other);
                    let together = logs(&base, &turned);
                    let change: Vec<f64> =
                        together.iter().zip(&alone).map(|(two, one)| two - one).collect();
                    let named = |at: usize, value: usize| {
                        format!("{}={}", grid[at].key, grid[at].alternatives[value])
                    };
                    rows.push(Interaction {
                        knob: named(a, value),
                        beside: named(b, other),
                        alone: Effect::of_logarithms(&alone),
                        together: Effect::of_logarithms(&together),
                        change: Effect::of_logarithms(&change),
                    });
                }
            }
        }
    }
    let words =
        |effect: &Option<Effect>| effect.map_or("too few rounds".to_owned(), |of| of.words());
    let table = Columns::new()
        .add("knob", "knob", ("", 0), "", |row: &Interaction| row.knob.clone())
        .add("alone", "in the base", ("", 0), "", move |row| words(&row.alone))
        .add("beside", "once", ("", 0), "", |row| row.beside.clone())
        .add("together", "it brings", ("", 0), "", move |row| words(&row.together))
        .add(
            "change",
            "the change",
            ("", 0),
            "The second effect over the first; below 1 the two knobs save the same time.",
            move |row| words(&row.change),
        )
        .table(&rows);
    let says = |row: &Interaction| {
        let (together, change) = (row.together?, row.change?);
        let still = match (together.is_none(), together.ratio > 1.0) {
            (true, _) => "makes no difference",
            (false, true) => "still helps",
            (false, false) => "costs",
        };
        (!change.is_none()).then(|| {
            format!(
                "{} {still} once {}: {}, and {} in the base",
                row.knob,
                row.beside,
                together.words(),
                words(&row.alone)
            )
        })
    };
    let lines: Vec<String> = rows.iter().filter_map(says).collect();
    let none = "No knob changes what another brings by more than the noise.".to_owned();
    Ok(Some(Beside {
        id: "interactions",
        title: "Does a knob still help once another is turned?",
        definition: "All further knobs are as in the base.".to_owned(),
        table,
        lines: if lines.is_empty() { vec![none] } else { lines },
        chart: None,
    }))
}
