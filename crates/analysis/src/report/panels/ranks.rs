//! The figures of the summary as bars, rank by rank.

use super::shared::{PerStep, label};
use crate::hta::{Analysis, CollectiveKind, columns};
use crate::report::chart::{Color, Row};
use crate::report::{Body, Panel, Section, Width};

/// Bars of one column of the summary. Sums over steps become means per step.
pub(super) fn bars(analysis: &Analysis, name: &str, title: &str, color: Color) -> Option<Panel> {
    let of = columns(analysis.kind).find(|of| of.head.key == name)?;
    let per_step = PerStep::of(analysis);
    let is_time = of.head.unit == "ms";
    let is_sum = is_time || of.head.unit.is_empty();
    let bars = analysis.ranks.iter().map(|rank| {
        let value = of.cell(rank).number();
        let value = value.map(|sum| if is_sum { per_step.mean(rank, sum) } else { sum });
        Row::bar(label(rank), value, color)
    });
    let unit = if is_time { per_step.unit() } else { &of.head.unit };
    let body = Body::bars(unit, bars);
    let mut definition = of.head.definition.to_string();
    if is_sum {
        definition = format!("{} Shown {}.", definition, per_step.words());
    }
    Some(Panel::new(&name.replace('_', "-"), title, unit, &definition, body))
}

/// The panels of a data-parallel run.
pub(super) fn ddp(analysis: &Analysis) -> Section {
    let all = [
        ("all_reduce_time_ms", "All-reduce time", Color::Communication),
        ("comm_comp_overlap_pctg", "Communication hidden", Color::Communication),
        ("comm_overhead_pctg", "Communication of kernel time", Color::Communication),
        ("compute_time_ms", "Compute time", Color::Compute),
        ("compute_time_pctg", "Time with computation", Color::Compute),
        ("all_reduce_calls", "All-reduce calls", Color::Communication),
    ];
    let panels = all.iter().filter_map(|(name, title, color)| bars(analysis, name, title, *color));
    let panels = panels.map(|panel| panel.wide(Width::Third));
    Section::new(
        "ranks",
        "Ranks side by side",
        "Ranks of a data-parallel run do the same work: where their bars differ, one waits for another.",
        panels.collect(),
    )
}

/// The panels of a sharded run, without its memory.
pub(super) fn sharding(analysis: &Analysis) -> Section {
    let per_step = PerStep::of(analysis);
    let stacks = analysis.ranks.iter().map(|rank| {
        let parts = rank.collectives.by_kind.iter();
        let parts = parts.map(|&(kind, _, ns)| (kind.name(), per_step.ms(rank, ns), color(kind)));
        Row::stack(label(rank), parts)
    });
    let body = Body::stacked(per_step.unit(), stacks).or("No rank took part in a collective.");
    let definition = format!(
        "Sum of the durations of collectives, by kind, {}; waiting for other ranks is part of them. \
         Collectives that run at the same time are all counted in full.",
        per_step.words()
    );
    let panel = Panel::new("collectives", "Collectives", per_step.unit(), &definition, body);
    let shares = [
        ("comm_overhead_pctg", "Communication of kernel time", Color::Communication),
        ("comm_comp_overlap_pctg", "Communication hidden", Color::Communication),
    ];
    let bars = shares.iter().filter_map(|(name, title, color)| bars(analysis, name, title, *color));
    let bars = bars.map(|panel| panel.wide(Width::Half));
    Section::new(
        "collectives-section",
        "Messages",
        "Sharding trades memory for messages: these are the messages.",
        std::iter::once(panel).chain(bars).collect(),
    )
}

fn color(kind: CollectiveKind) -> Color {
    match kind {
        CollectiveKind::AllReduce => Color::Series(1),
        CollectiveKind::AllGather => Color::Series(0),
        CollectiveKind::ReduceScatter => Color::Series(3),
        CollectiveKind::Broadcast => Color::Series(2),
        CollectiveKind::AllToAll => Color::Series(4),
        CollectiveKind::Reduce => Color::Series(5),
        CollectiveKind::Gather | CollectiveKind::Scatter => Color::Series(6),
        CollectiveKind::PointToPoint | CollectiveKind::Barrier | CollectiveKind::Unknown => {
            Color::Series(7)
        }
    }
}
