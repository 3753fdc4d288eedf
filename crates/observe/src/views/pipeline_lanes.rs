//! The step of a pipeline as planned and as run, a row for each stage, for its picture.

use paceline_host::text::plural;
use paceline_strategies::schedule::{Gap, IdleCause, Kind, Timeline};
use paceline_table::chart::{Color, Row, Segment};

use crate::figures::facts::Facts;
use crate::insight::pipeline::PipelineFacts;

/// The model, the schedule and the ranks.
pub(crate) fn subtitle(facts: &Facts, of: &PipelineFacts) -> String {
    let schedule = facts.config.pipeline.as_ref().map_or("", |of| of.schedule);
    let shape = of.plan.shape();
    format!(
        "{}, {schedule} on {}, {}, {}",
        facts.config.model.name(),
        plural(shape.placement.ranks(), "rank"),
        plural(shape.placement.stages(), "stage"),
        plural(shape.micro_batches, "micro-batch")
    )
}

/// The step as planned, with the median duration of each action and messages that take no time, and the step of median length as
/// run. Idle time has the color and the name of its largest cause.
pub(crate) fn rows(of: &PipelineFacts) -> Vec<Row> {
    let (mut planned, mut run) = (lanes(of, &of.planned, &[]), lanes(of, &of.run, &of.gaps));
    "As planned".clone_into(&mut planned[0].heading);
    "As run".clone_into(&mut run[0].heading);
    planned.into_iter().chain(run).collect()
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
