//! The anatomy of a step: the parts of the time that a step takes.

use std::collections::BTreeSet;

use super::shared::{COUNT, RANK, label, ms};
use super::whole_step;
use crate::hta::{Analysis, Anatomy, Part as StepPart, RankAnalysis, StepAnatomy};
use crate::report::chart::{Color, Row, Segment};
use crate::report::{Body, Panel, Section};
use crate::table::{Columns, Table};
use crate::timeline::{TimeRange, Timeline};

const NO_STEPS: &str = "No trace has steps.";
/// The most steps per rank that have a row of their own.
const STEPS: usize = 100;
/// The most ranks whose steps are drawn.
const LINES: usize = 4;

pub(super) fn section(analysis: &Analysis, timelines: &[Timeline]) -> Section {
    let with_steps: Vec<_> =
        analysis.ranks.iter().filter_map(|rank| Some((rank, rank.anatomy.as_ref()?))).collect();
    let definition = "The time of the main thread in a step, as a mean over the steps that were looked \
         at. Parts are the spans that the program named, and PyTorch's backward passes, on whatever thread \
         autograd runs. Where spans are nested, the innermost counts. Time outside of all spans is the rest, so \
         the parts add up to the step.";
    let lead = "The parts of a step on the thread that runs it.";
    let stacks = with_steps.iter().map(|(rank, anatomy)| {
        let parts = anatomy.mean_ns.iter();
        let parts = parts.map(|&(part, ns)| (part.name(), ns / 1e6, shown(part).0));
        Row::stack(label(rank), parts)
    });
    let body = Body::stacked("ms", stacks).or(NO_STEPS);
    let anatomy = Panel::new("anatomy", "Anatomy of the step", "ms", definition, body);
    let definition = "Every step of every rank in parts, which add up to its length.";
    let steps = Panel::table("steps", "Steps", definition, table(&with_steps), NO_STEPS);
    let whole = whole_step::panel(analysis, timelines);
    let panels = vec![anatomy, time_line(&with_steps), whole, steps];
    Section::new("step", "What a step consists of", lead, panels)
}

/// The step of median length of each rank, on a row for its main thread and one for its communication.
fn time_line(all: &[(&RankAnalysis, &Anatomy)]) -> Panel {
    let lines = all.iter().filter_map(|(rank, anatomy)| Some((rank, anatomy.line.as_ref()?)));
    let lanes = lines.take(LINES).flat_map(|(rank, line)| {
        let begin_ns = line.step.time.start_ns;
        let segment = |name: &str, time: TimeRange, color: Color| Segment {
            start: ms(time.start_ns - begin_ns).max(0.0),
            end: ms(time.end_ns() - begin_ns).max(0.0),
            name: name.to_owned(),
            kind: name.to_owned(),
            color,
        };
        let parts =
            line.parts.iter().map(|(part, time)| segment(part.name(), *time, shown(*part).0));
        let sent = line.communication.iter().map(|(kind, time)| {
            segment(&kind.name().replace('_', "-"), *time, Color::Communication)
        });
        let lane = |what: &str, segments: Vec<Segment>| {
            let label = format!("{}, {what}", label(rank));
            Row { label, segments, ..Row::default() }
        };
        [
            lane(&format!("step {}", line.step.number), parts.collect()),
            lane("communication", sent.collect()),
        ]
    });
    let definition = "The step of median length of each rank, since it began on that rank: what its main thread did, and the \
        communication that it launched. Time outside of all spans is empty.";
    let body = Body::lanes(lanes).or(NO_STEPS);
    Panel::new("step-line", "Time line of a step", "ms", definition, body)
}

#[rustfmt::skip]
fn table(all: &[(&RankAnalysis, &Anatomy)]) -> Table {
    // For a single step, unlike the means of other tables.
    const MS: (&str, usize) = ("ms", 3);
    let parts = all.iter().flat_map(|(_, anatomy)| &anatomy.mean_ns);
    let parts: BTreeSet<StepPart> = parts.map(|(part, _)| *part).collect();
    let mut columns = Columns::<(usize, &StepAnatomy)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0)
        .add("step", "step", COUNT, "The step's number in the trace.", |of| of.1.step.number)
        .add("step_ms", "on the host", MS, "From its start until the next step begins. The device may be behind.", |of| ms(of.1.step.time.dur_ns));
    for part in parts {
        let key = part.name().replace([' ', '-'], "_") + "_ms";
        columns = columns.add(key, part.name(), MS, shown(part).1, move |(_, step)| {
            step.parts.iter().find(|of| of.0 == part).map(|of| ms(of.1))
        });
    }
    let columns = columns.add("comm_alone_ms", "communication alone", MS,
        "Communication that the step launched, while no compute kernel ran. It runs beside the other \
         parts, and may reach beyond the step.",
        |of| ms(of.1.exposed_ns));
    columns.table(all.iter().flat_map(|(rank, anatomy)| {
        anatomy.steps.iter().take(STEPS).map(|step| (rank.rank, step))
    }))
}

/// The color and the meaning of a part.
fn shown(part: StepPart) -> (Color, &'static str) {
    match part {
        StepPart::DataWait => (Color::DataWait, "The main thread waited for a batch."),
        StepPart::ToDevice => (
            Color::Series(5),
            "The device waited for the copy of its batch, or the host for that of the next one.",
        ),
        StepPart::Forward => (Color::Forward, "The forward pass and the loss."),
        StepPart::Backward => {
            (Color::Backward, "The backward pass, without the other spans within it.")
        }
        StepPart::GradSync => (Color::Sync, "Gradients were made equal on all ranks."),
        StepPart::Exposed => (
            Color::Communication,
            "The thread was blocked on communication, where the program says so, or at the end of \
            PyTorch's backward pass.",
        ),
        StepPart::ReduceScatter => {
            (Color::Series(3), "Gradients were reduced to the ranks that own them.")
        }
        StepPart::OptimizerStep => (Color::Optimizer, "The update of the parameters."),
        StepPart::ParamBroadcast => (Color::Series(7), "Owners sent out updated parameters."),
        StepPart::Gather => (Color::Series(6), "Parts of parameters were collected."),
        StepPart::Rest => (Color::Idle, "No span accounts for it."),
    }
}
