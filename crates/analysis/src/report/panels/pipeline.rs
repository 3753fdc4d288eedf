//! Why the ranks of a pipeline are idle: the ledger of idle time and the messages.
//!
//! A [`PipelineLedger`] goes in, or the accounts of the ranks. Panels, a note and a table for the console come out.

use paceline_schedule::{IdleCause, IdlePart, RankAccount};

use super::shared::COUNT;
use crate::hta::backend_of;
use crate::ranks::{Messages, PipelineLedger, StepCourse};
use crate::report::{Body, Note, Panel, Section, Weight};
use crate::table::{Columns, Table, counted};
use crate::timeline::Timeline;

/// The idle time of the ranks by cause: causes that cancel each other in one column for people, and each by itself for files.
pub fn idle_table(ranks: &[RankAccount]) -> Table {
    type Row = (String, RankAccount);
    let ms = ("ms", 2);
    let mut columns = Columns::new()
        .add("rank", "rank", COUNT, super::shared::RANK, |(rank, _): &Row| rank.clone())
        .add("step_ms", "step", ms, "The length of a step of the rank.", |(_, of)| of.step)
        .add("busy_ms", "busy", ms, "The part of it in which the rank was not idle.", |(_, of)| {
            of.busy
        });
    for part in IdlePart::all(ranks) {
        columns = columns.add("", part.name(), ms, "", move |(_, of)| part.of(of));
    }
    for cause in IdleCause::ALL {
        let key = format!("{}_ms", cause.name().replace(' ', "_"));
        let definition =
            "Idle time that this cause adds to those before it, below zero if it takes some away.";
        columns = columns.add(key, "", ms, definition, move |(_, of)| of.of(cause));
    }
    columns =
        columns.add("rest_ms", "", ms, "Idle time that no rehearsal explains.", |(_, of)| of.rest);
    let rows = ranks.iter().enumerate().map(|(rank, of)| (rank.to_string(), of.clone()));
    let mut table = columns.table(rows.collect::<Vec<_>>());
    table.mean = columns.table([("mean".to_owned(), RankAccount::mean(ranks))]).rows.pop();
    table
}

/// The line above the idle time of the ranks.
pub fn idle_head(ranks: &[RankAccount], num_steps: usize) -> String {
    let mean = RankAccount::mean(ranks);
    format!(
        "Bubble: {:.1} % of the step; why ranks are idle, means over {}:",
        100.0 * (1.0 - mean.busy / mean.step),
        counted(num_steps as u64, "step", "steps")
    )
}

#[rustfmt::skip]
pub(super) fn section(of: &PipelineLedger) -> Section {
    let ms = ("ms/step", 2);
    let columns = Columns::<&Messages>::new()
        .add("from", "from", COUNT, "The rank that sends.", |of| of.ranks.0)
        .add("to", "to", COUNT, "The rank that receives.", |of| of.ranks.1)
        .add("messages", "messages", ("/step", 1), "Messages of a step.", |of| of.messages)
        .add("mb", "size", ("MB/step", 2), "Their bytes, if the traces have shapes.", |of| of.bytes.map(|of| of / 1e6))
        .add("waited_ms", "waited", ms, "How long the receiver waited until the sender's pass was done.", |of| of.waited_ms)
        .add("moved_ms", "moved", ms, "How long the receiver then waited for the message.", |of| of.moved_ms);
    let definition = "The step is rehearsed with one more of its measured times in each round, and the idle time that each adds is its cause's: \
        fill and drain, unequal stages (imbalance), messages (transfer), their order (head of line), passes that took longer than \
        usual (late peer). Barrier: waits for other ranks in the collectives after the last pass. Nothing explains the rest.";
    let panels = vec![
        Panel::new("bubble", "Idle time by cause", "ms", definition, Body::Table(idle_table(&of.ranks))),
        Panel::table("pipeline-messages", "Messages", "Time in which a receiver waited for its message and did nothing else.", columns.table(&of.routes), "No messages."),
    ];
    Section::new("pipeline", "Pipeline", &idle_head(&of.ranks, of.num_steps), panels)
}

/// A note where ranks send messages that are not those of a pipeline alone.
pub(super) fn missing(timelines: &[Timeline]) -> Option<Note> {
    let receives = |name: &str| backend_of(name).is_some() && name.contains("recv");
    let text = "Ranks send messages, but no table says why they are idle: these traces are not those of one pipeline alone, or its passes \
                run on a card. With replicas, pass the traces of one pipeline with --trace-files.";
    let has_messages = timelines.iter().any(|of| of.names.iter().any(receives));
    has_messages.then(|| Note { weight: Weight::Note, text: text.to_owned() })
}

/// The gain of another schedule.
pub(super) fn note(of: &PipelineLedger) -> Note {
    let StepCourse { step_ms, in_flight } = of.now;
    let text = match of.other {
        Some((class, other)) => format!(
            "{class} would take {:.1} ms for a step and this schedule takes {step_ms:.1}, by rehearsal with the times of these stages, cut or \
             joined evenly where it needs others. A rank would keep up to {:.1} micro-batches in flight, now {in_flight:.1}",
            other.step_ms, other.in_flight
        ),
        None => "By rehearsal, no other schedule of PyTorch would shorten the step by 2 % with these stages".to_owned(),
    };
    Note { weight: Weight::Note, text: text + "." }
}
