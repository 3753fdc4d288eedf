//! The idle time of a pipeline as lines of text.

use paceline_analysis::report::panels::{idle_head, idle_table};
use paceline_strategies::schedule::drawing;

use crate::insight::pipeline::PipelineFacts;

/// How wide a drawing is at most, and where no width is known.
const DRAWING: usize = 80;

/// How long each rank was idle, and why: a row for each rank and one for their mean.
pub(crate) fn ledger(facts: &PipelineFacts, width: Option<usize>) -> Vec<String> {
    let table = idle_table(&facts.ranks).with_mean();
    vec![idle_head(&facts.ranks, facts.num_steps), table.fitted(width)]
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
