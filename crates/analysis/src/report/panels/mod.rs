//! The panels of a report on traces.
//!
//! An [`Analysis`] and facts about its traces go in. A [`Report`] comes out. Figures and definitions come
//! from the analysis; this module only arranges them.

mod across;
mod calls;
mod device;
mod diff;
mod doctor;
mod kernels;
mod memory;
mod names;
mod odd;
mod pipeline;
mod ranks;
mod shared;
mod step;
mod summary;
mod whole_step;

pub use diff::of_diff;
pub use doctor::{add_against, add_examination};
pub(crate) use memory::alive_at_peak;
pub use pipeline::{idle_head, idle_table};
pub(crate) use shared::{COUNT, MIB};
pub use summary::console;

use super::{Body, Report, Section, Weight};
use crate::calls::Calls;
use crate::hta::{Analysis, Kind};
use crate::ranks::AcrossRanks;
use crate::timeline::Timeline;
use shared::RANKS;

/// The report of a run. `across` is the analysis across ranks, if there are several ranks. `timelines` are
/// the traces themselves: the report says what was odd in them, and whether they come from a CPU. `about` has the title and the
/// notes from reading them.
pub fn of_analysis(
    analysis: &Analysis,
    across: Option<&AcrossRanks>,
    timelines: &[Timeline],
    about: Report,
) -> Report {
    let (figures, csv_table) = (summary::figures(analysis), summary::TABLE.to_owned());
    let mut report = Report { figures, csv_table, ..about };
    for note in &analysis.notes {
        report.note(Weight::Note, note);
    }
    report.notes.extend(across.into_iter().flat_map(across::notes));
    let has_no_ledger = across.is_some_and(|of| of.pipeline.is_none());
    report.notes.extend(pipeline::missing(timelines).filter(|_| has_no_ledger));
    let whole = analysis;
    let first;
    let analysis = if whole.ranks.len() > RANKS {
        let text = format!(
            "Charts and tables show the first {RANKS} of {} ranks. The summary and the means cover all.",
            whole.ranks.len()
        );
        report.note(Weight::Note, text);
        first = Analysis { ranks: whole.ranks[..RANKS].to_vec(), ..whole.clone() };
        &first
    } else {
        whole
    };
    let calls = Calls::of(timelines);
    let time = time(analysis, timelines, &calls);
    report.sections = match analysis.kind {
        Kind::Ddp => vec![ranks::ddp(analysis), time],
        Kind::Sharding => vec![memory::peaks(analysis), ranks::sharding(analysis), time],
    };
    report.sections.push(step::section(analysis, timelines));
    report.sections.extend(across.map(across::section));
    report.sections.extend(across.and_then(|of| of.pipeline.as_ref()).map(pipeline::section));
    let on_cpu = names::are_of_cpu(timelines);
    report.sections.push(device::section(analysis, &calls, on_cpu));
    report.notes.extend(device::note(on_cpu, names::are_emulated(timelines)));
    report.sections.push(memory::over_time(analysis, timelines));
    report.sections.push(summary::section(whole, odd::not_used(timelines).as_deref()));
    report.sections.extend(odd::section(timelines));
    report.notes.extend(odd::notes(timelines));
    leave_out_empty(&mut report);
    if on_cpu {
        names::make_plain(&mut report);
    }
    // The most important notes come first. Notes of equal weight keep their order.
    report.notes.sort_by_key(|note| match note.weight {
        Weight::Advice => 0,
        Weight::Warning => 1,
        Weight::Note => 2,
    });
    report
}

fn time(analysis: &Analysis, timelines: &[Timeline], calls: &Calls) -> Section {
    let panels = vec![
        kernels::temporal(analysis),
        kernels::kinds(analysis),
        kernels::longest(analysis),
        kernels::operations(timelines),
        calls::operators(calls),
        calls::modules(calls),
    ];
    Section::new(
        "time",
        "Where the time goes",
        "What the device of each rank did between its first and its last kernel, and with which kernels.",
        panels,
    )
}

/// Removes the panels for which the traces hold nothing, and sections without panels.
fn leave_out_empty(report: &mut Report) {
    for section in &mut report.sections {
        section.panels.retain(|panel| !matches!(panel.body, Body::Nothing(_)));
    }
    report.sections.retain(|section| !section.panels.is_empty());
}
