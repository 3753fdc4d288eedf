//! `pipeline.html`: the step of a pipeline as planned and as run, and why its ranks were idle.

use paceline_analysis::advice::Told;
use paceline_analysis::report::chart::{Color, Row, Segment};
use paceline_analysis::report::{self, Body, Figure, Note, Panel, Report, Section, Weight};
use paceline_failure::Result;
use paceline_host::text::plural;
use paceline_strategies::schedule::{Gap, IdleCause, Kind, Timeline};
use paceline_table::table::{Cell, Head};

use crate::figures::facts::Facts;
use crate::insight::pipeline::PipelineFacts;
use crate::views::pipeline_lines::table;

/// The name of the page in the run folder.
pub(crate) const FILE_NAME: &str = "pipeline.html";

/// The page of a run whose ranks were a pipeline.
pub(crate) fn html(facts: &Facts) -> Result<Option<String>> {
    let Some(pipeline) = &facts.pipeline else { return Ok(None) };
    let mut files = report::files(&page(facts, pipeline))?.into_iter();
    Ok(files.find(|(ending, _)| *ending == "html").map(|(_, text)| text))
}

fn page(facts: &Facts, of: &PipelineFacts) -> Report {
    let name = facts.config.pipeline.as_ref().map_or("", |of| of.schedule);
    let shape = of.plan.shape();
    let mean = of.mean();
    let bubble = Head::new(
        "bubble_pct",
        "bubble",
        ("%", 1),
        "The part of the step in which ranks are idle.",
    );
    let note = |told: &Told| Note { weight: Weight::Advice, text: told.text.clone() };
    Report {
        title: format!("{name} on {}", plural(shape.placement.ranks(), "rank")),
        subtitle: format!(
            "{}, {} stages, {}",
            facts.config.model.name(),
            shape.placement.stages(),
            plural(shape.micro_batches, "micro-batch")
        ),
        figures: vec![Figure {
            column: bubble,
            value: Cell::Number(100.0 * (1.0 - mean.busy / mean.step)),
        }],
        notes: facts.told.iter().map(note).collect(),
        sections: vec![Section::new(
            "pipeline",
            "Pipeline",
            "What each stage did in a step, and why it waited.",
            vec![
                Panel::new(
                    "planned",
                    "As planned",
                    "ms",
                    "The schedule's list, rehearsed with the median duration of each action and messages that take no time.",
                    Body::lanes(lanes(of, &of.planned, &[])),
                ),
                Panel::new(
                    "run",
                    "As run",
                    "ms",
                    "The step of median length. Idle time has the color and the name of what most of it comes from.",
                    Body::lanes(lanes(of, &of.run, &of.gaps)),
                ),
                Panel::new(
                    "ledger",
                    "Idle time by cause",
                    "ms",
                    "Means over the steps. The step is rehearsed with equal stages, with the usual ones, with its messages, with \
                     their queues and with its own durations; each adds idle time, which is that cause's. Causes that cancel each \
                     other on a rank share a column.",
                    Body::Table(table(of)),
                ),
            ],
        )],
        csv_table: "ledger".to_owned(),
    }
}

/// A row for each stage.
fn lanes(of: &PipelineFacts, timeline: &Timeline, gaps: &[Vec<Gap>]) -> Vec<Row> {
    let placement = of.plan.shape().placement;
    let lane = |stage: usize| {
        let rank = placement.rank(stage);
        let ran = timeline.ranks[rank].iter().filter(|ran| ran.action.stage == stage);
        let mut segments: Vec<Segment> = ran
            .map(|ran| {
                let (kind, color) = match ran.action.kind {
                    Kind::Forward => ("forward", Color::Forward),
                    Kind::BackwardWeight => ("backward, weights", Color::Optimizer),
                    Kind::BackwardInput => ("backward, inputs", Color::Backward),
                    _ => ("backward", Color::Backward),
                };
                let name = ran.action.to_string();
                Segment { start: ran.start, end: ran.end, name, kind: kind.to_owned(), color }
            })
            .collect();
        // A rank with several stages waits in the row of its first one.
        let waits = gaps.get(rank).filter(|_| placement.chunk(stage) == 0).into_iter().flatten();
        let is_seen = |gap: &&Gap| gap.end - gap.start > timeline.makespan / 1000.0;
        segments.extend(waits.filter(is_seen).map(|gap| {
            let kind = gap.cause.map_or("unexplained", IdleCause::name).to_owned();
            let color = match gap.cause {
                Some(IdleCause::Fill | IdleCause::Drain) => Color::Idle,
                Some(IdleCause::Transfer | IdleCause::HeadOfLine) => Color::Communication,
                Some(IdleCause::Imbalance) => Color::Wait,
                Some(IdleCause::LatePeer) => Color::NonCompute,
                Some(IdleCause::Barrier) => Color::Sync,
                None => Color::Other,
            };
            Segment { start: gap.start, end: gap.end, name: kind.clone(), kind, color }
        }));
        Row { label: format!("stage {stage}"), segments, ..Row::default() }
    };
    (0..placement.stages()).map(lane).collect()
}
