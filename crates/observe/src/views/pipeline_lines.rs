//! The idle time of a pipeline as lines of text.

use paceline_host::text::plural;
use paceline_strategies::schedule::{RankAccount, drawing};
use paceline_table::table::Columns;

use crate::insight::pipeline::{IdlePart, PipelineFacts};

/// How wide a drawing is at most, and where no width is known.
const DRAWING: usize = 80;

/// How long each rank was idle, and why: a row for each rank and one for their mean.
pub(crate) fn ledger(facts: &PipelineFacts, width: Option<usize>) -> Vec<String> {
    type Row = (String, RankAccount);
    let (mean, ms) = (facts.mean(), ("ms", 2));
    let mut columns = Columns::new()
        .add("", "rank", ("", 0), "", |(rank, _): &Row| rank.clone())
        .add("", "step", ms, "", |(_, of)| of.step)
        .add("", "busy", ms, "", |(_, of)| of.busy);
    for part in IdlePart::all(&facts.ranks) {
        columns = columns.add("", part.name(), ms, "", move |(_, of)| part.of(of));
    }
    let head = format!(
        "Bubble: {:.1} % of the step; why ranks are idle, means over {}:",
        100.0 * (1.0 - mean.busy / mean.step),
        plural(facts.num_steps, "step")
    );
    let ranks = facts.ranks.iter().enumerate().map(|(rank, of)| (rank.to_string(), of.clone()));
    let rows = ranks.chain([("mean".to_owned(), mean)]);
    vec![head, columns.table(rows).fitted(width)]
}

/// The step as planned and as run.
pub(crate) fn drawings(facts: &PipelineFacts, width: Option<usize>) -> Vec<String> {
    let width = width.unwrap_or(DRAWING).min(DRAWING);
    let draw = |timeline| drawing(&facts.plan, timeline, width).trim_end().to_owned();
    vec![
        format!("The step as planned, {:.1} ms if messages take no time:", facts.planned.makespan),
        draw(&facts.planned),
        format!("The step as run, {:.1} ms, of median length:", facts.run.makespan),
        draw(&facts.run),
    ]
}
