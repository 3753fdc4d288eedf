//! The figures of the summary as bars, rank by rank.

use super::summary::{definition, symbol};
use super::{label, ms};
use crate::hta::{Analysis, CollectiveKind, Unit, columns};
use crate::report::chart::{Bar, Bars, Ink, Part, Stack};
use crate::report::{Body, Panel, Section, Width};

/// Bars of one column of the summary.
pub(super) fn bars(analysis: &Analysis, name: &str, title: &str, ink: Ink) -> Option<Panel> {
    let of = columns(analysis.kind).find(|of| of.name == name)?;
    let bars = analysis.ranks.iter().map(|rank| Bar {
        label: label(rank),
        value: (of.get)(&rank.row),
        ink,
    });
    let whole = (of.unit == Unit::Percent).then_some(100.0);
    let body = Body::Bars(Bars { unit: symbol(of.unit).into(), whole, bars: bars.collect() });
    let panel = Panel::new(&name.replace('_', "-"), title, symbol(of.unit), &definition(of), body);
    Some(panel)
}

/// The panels of a data-parallel run.
pub(super) fn ddp(analysis: &Analysis) -> Section {
    let all = [
        ("all_reduce_time_ms", "All-reduce time", Ink::Communication),
        ("comm_comp_overlap_pctg", "Communication hidden", Ink::Communication),
        ("comm_overhead_pctg", "Communication of kernel time", Ink::Communication),
        ("compute_time_ms", "Compute time", Ink::Compute),
        ("compute_time_pctg", "Time with computation", Ink::Compute),
        ("all_reduce_calls", "All-reduce calls", Ink::Communication),
    ];
    let panels = all.iter().filter_map(|(name, title, ink)| bars(analysis, name, title, *ink));
    let panels = panels.map(|panel| panel.wide(Width::Third));
    Section::new(
        "ranks",
        "Ranks side by side",
        "Ranks of a data-parallel run do the same work: where their bars differ, one waits for another.",
        panels.collect(),
    )
}

/// The panels of a sharded run, but for its memory.
pub(super) fn sharding(analysis: &Analysis) -> Section {
    let stacks = analysis.ranks.iter().map(|rank| {
        let parts = rank.collectives.by_kind.iter();
        let parts = parts.map(|&(kind, _, ns)| Part::new(kind.name(), ms(ns), ink(kind)));
        Stack { label: label(rank), parts: parts.collect() }
    });
    let body = Body::stacked("ms", stacks).or("No rank took part in a collective.");
    let panel = Panel::new(
        "collectives",
        "Collectives",
        "ms",
        "Sum of the durations of collectives, by kind; waiting for other ranks is part of them. Those \
         that run at the same time count each.",
        body,
    );
    let overhead = [
        ("comm_overhead_pctg", "Communication of kernel time", Ink::Communication),
        ("comm_comp_overlap_pctg", "Communication hidden", Ink::Communication),
    ];
    let bars = overhead.iter().filter_map(|(name, title, ink)| bars(analysis, name, title, *ink));
    let bars = bars.map(|panel| panel.wide(Width::Half));
    Section::new(
        "collectives-section",
        "Messages",
        "Sharding trades memory for messages: these are the messages.",
        std::iter::once(panel).chain(bars).collect(),
    )
}

fn ink(kind: CollectiveKind) -> Ink {
    match kind {
        CollectiveKind::AllReduce => Ink::Series(1),
        CollectiveKind::AllGather => Ink::Series(0),
        CollectiveKind::ReduceScatter => Ink::Series(3),
        CollectiveKind::Broadcast => Ink::Series(2),
        CollectiveKind::AllToAll => Ink::Series(4),
        CollectiveKind::Reduce => Ink::Series(5),
        CollectiveKind::Gather | CollectiveKind::Scatter => Ink::Series(6),
        CollectiveKind::PointToPoint | CollectiveKind::Barrier | CollectiveKind::Unknown => {
            Ink::Series(7)
        }
    }
}
