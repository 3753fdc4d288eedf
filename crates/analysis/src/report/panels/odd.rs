//! Oddities of the traces, and the events that were left out.
//!
//! The timelines go in. Notes, one line of text and a table come out.

use std::collections::BTreeMap;

use paceline_table::stats::noise_words;

use super::shared::{COUNT, RANK};
use crate::report::{Body, Note, Panel, Section, Weight};
use crate::table::{Columns, counted};
use crate::timeline::{Timeline, cpu_wait_pct};

/// The fact in which our own recorder counts the events that it had no room for.
const DROPPED: &str = "dropped_events";

fn dropped(timeline: &Timeline) -> u64 {
    timeline.run_facts.get(DROPPED).and_then(|words| words.parse().ok()).unwrap_or(0)
}

/// Kinds of events that every trace of ours or of PyTorch has and that the analysis does not use: arrows,
/// counters, marks, names of rows, and calls of Python functions.
const USUAL: [&str; 12] = [
    "__metadata",
    "ac2g",
    "async_cpu_to_gpu",
    "async_gpu",
    "cpu_instant_event",
    "fwdbwd",
    "overhead",
    "python_function",
    "Trace",
    "ph C",
    "ph M",
    "ph i",
];

fn is_usual(kind: &str) -> bool {
    USUAL.contains(&kind)
}

/// A line about the events that were left out although nothing is wrong with them.
pub(super) fn not_used(timelines: &[Timeline]) -> Option<String> {
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    for (kind, count) in timelines.iter().flat_map(|timeline| &timeline.skipped) {
        if is_usual(kind) {
            *kinds.entry(kind).or_default() += count;
        }
    }
    let events = counted(kinds.values().sum(), "event", "events");
    let kinds: Vec<&str> = kinds.into_keys().collect();
    let of_kinds = if kinds.len() == 1 { "of kind" } else { "of kinds" };
    (!kinds.is_empty()).then(|| format!("Not used: {events} {of_kinds} {}.", kinds.join(", ")))
}

/// Warnings about events that are missing or odd, which make numbers less reliable.
pub(super) fn notes(timelines: &[Timeline]) -> Vec<Note> {
    let mut notes = Vec::new();
    let lost: u64 = timelines.iter().map(dropped).sum();
    if lost > 0 {
        let events = counted(lost, "event, which is", "events, which are");
        let text = format!(
            "The recorder had no room for {events} missing from the traces, so sums are too small. \
             Profile fewer steps."
        );
        notes.push(Note { weight: Weight::Warning, text });
    }
    let noise = noise_words(cpu_wait_pct(timelines), None);
    let lacked = ": a rank that was late may only have lacked a core.";
    notes.extend(noise.map(|text| Note { weight: Weight::Warning, text: text + lacked }));
    if timelines.iter().any(Timeline::is_cut_off) {
        let text = "A file is cut off, and what came after is missing, so figures are too small.";
        notes.push(Note { weight: Weight::Warning, text: text.to_owned() });
    }
    let odd: u64 = timelines.iter().flat_map(|timeline| timeline.oddities.values()).sum();
    if odd > 0 {
        let events = counted(odd, "event of the traces was", "events of the traces were");
        let text = format!("{events} odd; the table of oddities says how.");
        notes.push(Note { weight: Weight::Warning, text });
    }
    notes
}

/// The table of oddities, if there are any.
#[rustfmt::skip]
pub(super) fn section(timelines: &[Timeline]) -> Option<Section> {
    let columns = Columns::<(Option<usize>, &str, String, u64)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0)
        .add("kind", "kind", COUNT,
            "odd: malformed, and read as far as possible. skipped: not used by the analysis. \
             dropped: the recorder had no room for it.",
            |of| of.1)
        .add("what", "what", COUNT,
            "What was odd, or the category of events that were skipped.", |of| of.2.clone())
        .add("events", "events", COUNT, "How many.", |of| of.3);
    let rows = timelines.iter().flat_map(|timeline| {
        let odd = timeline.oddities.iter().map(|(what, count)| ("odd", what.clone(), *count));
        let skipped = timeline.skipped.iter().filter(|(what, _)| !is_usual(what));
        let skipped = skipped.map(|(what, count)| ("skipped", what.clone(), *count));
        let lost = Some(dropped(timeline)).filter(|count| *count > 0);
        let lost = lost.map(|count| ("dropped", "by the recorder".to_owned(), count));
        let rank = timeline.rank;
        odd.chain(skipped).chain(lost).map(move |(kind, what, count)| (rank, kind, what, count))
    });
    let table = columns.table(rows);
    let definition = "Events of the traces that were not used, or not used as written.";
    let is_empty = table.rows.is_empty();
    let panel = Panel::new("oddities", "Oddities", "", definition, Body::Table(table));
    (!is_empty).then(|| Section::new("oddities-section", "Left out, or odd", "", vec![panel]))
}
