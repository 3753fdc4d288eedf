//! The anatomy of a step.

use super::{label, us};
use crate::hta::{Analysis, Anatomy, Part as StepPart};
use crate::report::chart::{Ink, Part, Stack, Stacked};
use crate::report::{Body, Panel, Section};
use crate::table::{Cell, Column, Table};

/// Steps of a rank that have a row of their own.
const STEPS: usize = 100;

pub(super) fn section(analysis: &Analysis) -> Section {
    let with_steps: Vec<_> =
        analysis.ranks.iter().filter_map(|rank| Some((rank, rank.anatomy.as_ref()?))).collect();
    let definition = "The time of the main thread in a step, as a mean over the steps that were looked \
         at. Parts are the spans that the program named; of spans within each other the innermost \
         counts, and what no span accounts for is the rest, so the parts add up to the step.";
    let lead = "In parts, on the thread that drives it.";
    let panels = if with_steps.is_empty() {
        let reason = "No trace names its steps (ProfilerStep#N).";
        vec![Panel::new(
            "anatomy",
            "Anatomy of the step",
            "ms",
            definition,
            Body::Nothing(reason.into()),
        )]
    } else {
        let stacks = with_steps.iter().map(|(rank, anatomy)| {
            let parts = anatomy.mean_ns.iter().map(|&(part, ns)| Part {
                name: part.name().to_owned(),
                value: ns / 1e6,
                ink: ink(part),
            });
            Stack { label: label(rank), parts: parts.collect() }
        });
        let body = Body::Stacked(Stacked { unit: "ms".into(), stacks: stacks.collect() });
        let all: Vec<_> = with_steps.iter().map(|(rank, anatomy)| (rank.rank, *anatomy)).collect();
        vec![
            Panel::new("anatomy", "Anatomy of the step", "ms", definition, body),
            Panel::new(
                "steps",
                "Steps",
                "",
                "Every step of every rank in parts, which add up to its length.",
                Body::Table(table(&all)),
            ),
        ]
    };
    Section::new("step", "What a step consists of", lead, panels)
}

fn table(all: &[(usize, &Anatomy)]) -> Table {
    let mut parts: Vec<StepPart> = Vec::new();
    for (part, _) in all.iter().flat_map(|(_, anatomy)| &anatomy.mean_ns) {
        if !parts.contains(part) {
            parts.push(*part);
        }
    }
    parts.sort_unstable();
    let mut columns = vec![
        Column::new("rank", "rank", "", 0, "The rank of the process."),
        Column::new("step", "step", "", 0, "The step's number in the trace."),
        Column::new("step_us", "length", "us", 1, "From the begin to the end of the step."),
    ];
    columns.extend(parts.iter().map(|part| {
        let key = part.name().replace([' ', '-'], "_") + "_us";
        Column::new(&key, part.name(), "us", 1, meaning(*part))
    }));
    columns.push(Column::new(
        "comm_alone_us",
        "communication alone",
        "us",
        1,
        "Communication that the step launched, while nothing was computed. It lies across the parts, \
         and may reach beyond the step.",
    ));
    let rows = all.iter().flat_map(|(rank, anatomy)| {
        anatomy.steps.iter().take(STEPS).map(|step| {
            let time = |of: &StepPart| {
                let found = step.parts.iter().find(|part| part.part == *of);
                Cell::maybe(found.map(|part| us(part.time_ns as f64)))
            };
            let mut row = vec![
                Cell::Whole(*rank as u64),
                Cell::Whole(step.step.number),
                Cell::Number(us(step.step.time.dur_ns as f64)),
            ];
            row.extend(parts.iter().map(time));
            row.push(Cell::Number(us(step.exposed_ns as f64)));
            row
        })
    });
    Table { columns, rows: rows.collect(), mean: None }
}

fn meaning(part: StepPart) -> &'static str {
    match part {
        StepPart::DataWait => "The main thread waited for a batch.",
        StepPart::Forward => "The forward pass and the loss.",
        StepPart::Backward => "The backward pass, without what other spans within it account for.",
        StepPart::GradSync => "Gradients were made equal on all ranks.",
        StepPart::Exposed => "The thread was blocked on communication, where the program says so.",
        StepPart::ReduceScatter => "Gradients were reduced to the ranks that own them.",
        StepPart::OptimizerStep => "The update of the parameters.",
        StepPart::ParamBroadcast => "Owners sent out updated parameters.",
        StepPart::Gather => "Parts of parameters were collected.",
        StepPart::Rest => "No span accounts for it.",
    }
}

fn ink(part: StepPart) -> Ink {
    match part {
        StepPart::DataWait => Ink::DataWait,
        StepPart::Forward => Ink::Forward,
        StepPart::Backward => Ink::Backward,
        StepPart::GradSync => Ink::Sync,
        StepPart::Exposed => Ink::Communication,
        StepPart::ReduceScatter => Ink::Series(3),
        StepPart::OptimizerStep => Ink::Optimizer,
        StepPart::ParamBroadcast => Ink::Series(7),
        StepPart::Gather => Ink::Series(6),
        StepPart::Rest => Ink::Idle,
    }
}
