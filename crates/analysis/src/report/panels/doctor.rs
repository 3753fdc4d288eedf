//! The advice of the trace doctor in a report: a table of all of it, the place of each on the time line, and the speeds of
//! collectives.
//!
//! An [`Examination`] goes in. Panels and notes are added to a report. The figures come from `doctor`.

use super::shared::COUNT;
use crate::doctor::against::{Against, CauseRow};
use crate::doctor::collectives::{Collective, WORST};
use crate::doctor::{Advice, Diagnosis, Examination, Strip};
use crate::report::chart::{Color, Row, Segment};
use crate::report::{Body, Note, Panel, Report, Section, Weight};
use crate::table::{Cell, Columns};

/// The most pieces of advice on the console and at the top of the page.
const SHOWN: usize = 3;
const MS: (&str, usize) = ("ms/step", 2);

/// Adds an examination to a report: its section comes first. Its advice, or its silence about several steps, replaces that of the path
/// across ranks.
pub fn add_examination(report: &mut Report, of: &Examination) {
    let diagnosis = &of.diagnosis;
    // A step has the work that it launched, however late the device does it.
    let length = report.figures.iter_mut().find(|of| of.column.key == "step_ms");
    if let Some((figure, ms)) = length.zip(diagnosis.step_ms) {
        figure.value = Cell::Number(ms);
    }
    if !diagnosis.advice.is_empty() || diagnosis.steps > 1 {
        report.notes.retain(|note| note.weight != Weight::Advice);
    }
    let shown = diagnosis.advice.iter().enumerate().take(SHOWN);
    let mut notes: Vec<Note> = shown
        .map(|(at, advice)| Note { weight: Weight::Advice, text: words(at, advice) })
        .collect();
    notes.append(&mut report.notes);
    report.notes = notes;
    for unseen in &diagnosis.unseen {
        report.note(Weight::Note, unseen);
    }
    let mut panels = vec![table(diagnosis)];
    panels.extend(diagnosis.advice.iter().enumerate().map(|(at, advice)| place(at, advice)));
    panels.push(collectives(&of.collectives));
    panels.retain(|panel| !matches!(panel.body, Body::Nothing(_)));
    if !panels.is_empty() {
        let lead = "Each change with its evidence and the gain of a replay of the steps with the cause taken away.";
        report
            .sections
            .insert(0, Section::new("doctor", "What would make the steps shorter", lead, panels));
    }
}

fn words(at: usize, advice: &Advice) -> String {
    let evidence = &advice.evidence;
    format!(
        "{}. Longest in rank {}, {:.2} ms after its trace begins, for {:.2} ms (\"advice {}\" in the report)",
        advice.words(),
        evidence.rank,
        evidence.after_ms,
        evidence.dur_us / 1e3,
        at + 1
    )
}

#[rustfmt::skip]
fn table(diagnosis: &Diagnosis) -> Panel {
    let columns = Columns::<(usize, &Advice)>::new()
        .add("number", "advice", COUNT, "Its place in order of the gain.", |of| of.0 + 1)
        .add("cause", "cause", COUNT, "The kind of cause, as files name it.", |of| of.1.cause.key)
        .add("title", "what", COUNT, "What takes the time.", |of| of.1.title.clone())
        .add("low_ms", "gains at least", MS, "What a step would gain if the change did as little as can be expected of it.", |of| of.1.gain.low_ms)
        .add("high_ms", "gains at most", MS, "The same if it did as much as can be expected.", |of| of.1.gain.high_ms)
        .add("step_ms", "step now", MS, "The mean length of a step.", |of| of.1.step_ms)
        .add("change", "change", COUNT, "What to write in the program.", |of| of.1.change.replace('\n', "; "))
        .add("evidence", "evidence", COUNT, "Times and counts in the traces.", |of| of.1.evidence.text.clone())
        .add("names", "names", COUNT, "The operators or kernels that take most of the time.", |of| of.1.evidence.names.join(", "))
        .add("line", "line", COUNT, "The line of the program that takes most of the time, if the trace has stacks (with_stack=True).", |of| of.1.evidence.line.clone())
        .add("rank", "rank", COUNT, "The rank that shows it most.", |of| of.1.evidence.rank)
        .add("file", "file", COUNT, "The trace of that rank.", |of| of.1.evidence.file.clone())
        .add("start_us", "from", ("us", 3), "Where it is longest, on the clock of that trace.", |of| of.1.evidence.start_us)
        .add("dur_us", "for", ("us", 3), "How long it is there.", |of| of.1.evidence.dur_us);
    let rows: Vec<(usize, &Advice)> = diagnosis.advice.iter().enumerate().collect();
    let definition = "All advice, the largest gain first. A change that would gain less than 2 % of a step is not listed, nor a cause \
        that a change above it takes away.";
    Panel::table("advice", "Advice", definition, columns.table(rows), "Nothing that these traces show would gain 2 % of a step.")
}

/// The time line around the place where a cause is longest.
fn place(at: usize, advice: &Advice) -> Panel {
    let lane = |strip: &Strip| {
        let segment = |(start, end, name, is_it): &(f64, f64, String, bool)| Segment {
            start: *start,
            end: *end,
            name: name.clone(),
            kind: if *is_it { "at that time" } else { "before and after" }.to_owned(),
            color: if *is_it { Color::Wait } else { Color::Muted },
        };
        let segments = strip.pieces.iter().map(segment).collect();
        Row { label: strip.label.clone(), segments, ..Row::default() }
    };
    let number = at + 1;
    let definition = format!(
        "{}. What ran around the place where it is longest: in rank {}, {:.2} ms after its trace begins.",
        advice.evidence.text, advice.evidence.rank, advice.evidence.after_ms
    );
    let body = Body::lanes(advice.evidence.around.iter().map(lane));
    Panel::new(
        &format!("advice-{number}"),
        &format!("Advice {number}: {}", advice.title),
        "ms",
        &definition,
        body.or("Nothing ran there."),
    )
}

#[rustfmt::skip]
fn collectives(all: &[Collective]) -> Panel {
    let columns = Columns::<&Collective>::new()
        .add("name", "collective", COUNT, "The collective.", |of| of.name.clone())
        .add("ranks", "ranks", COUNT, "The ranks of its group.", |of| of.ranks)
        .add("bytes", "bytes", COUNT, "The larger buffer of a rank.", |of| of.bytes)
        .add("calls", "calls", COUNT, "How often, over all ranks.", |of| of.calls)
        .add("time_ms", "moved data", ("ms", 3), "The time without waits for slower ranks, in sum.", |of| of.time_ns as f64 / 1e6)
        .add("busbw_gb_s", "bus bandwidth", ("GB/s", 2), "As nccl-tests defines it: bytes on the busiest wire per second.", |of| of.busbw / 1e9)
        .add("link_pctg", "of the link", ("%", 1), "Bus bandwidth as a part of --link.", |of| of.part.map(|part| 100.0 * part));
    let definition = format!("Collectives whose sizes are recorded: the {WORST} that lose most time.");
    Panel::table("messages", "Collectives by size", &definition, columns.table(all), "No sizes are recorded.")
}

/// The section that compares two diagnoses, and its note.
#[rustfmt::skip]
pub fn add_against(report: &mut Report, against: &Against) {
    let columns = Columns::<&CauseRow>::new()
        .add("cause", "cause", COUNT, "The kind of cause, as files name it.", |of| of.cause.key)
        .add("title", "what", COUNT, "What takes the time.", |of| of.title.clone())
        .add("became", "became", COUNT, "gone: at most half of its time is left, and nothing is advised. stayed: advised before, and still there. new: advised after only.", |of| of.became())
        .add("promised_low_ms", "promised at least", MS, "What taking it away was to gain, before.", |of| of.promised_ms.map(|of| of.0))
        .add("promised_high_ms", "promised at most", MS, "The high end of that.", |of| of.promised_ms.map(|of| of.1))
        .add("left_low_ms", "left at least", MS, "What taking it away would gain, after.", |of| of.left_ms.map(|of| of.0))
        .add("left_high_ms", "left at most", MS, "The high end of that.", |of| of.left_ms.map(|of| of.1));
    let body = Body::Table(columns.table(&against.causes)).or("Nothing is advised before or after.");
    let definition = "The causes of lost time in both, by the replay of each. The gain of the step is held against what the causes promised that \
        take less than half of their time afterwards.";
    let panel = Panel::new("causes", "By cause", "", definition, body);
    report.notes.insert(0, Note { weight: Weight::Advice, text: against.words() });
    report.sections.insert(0, Section::new("against", "Before and after", "", vec![panel]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Figure;
    use crate::table::Head;

    /// Whether the advice of the path across ranks stays beside a diagnosis of so many steps.
    #[test]
    fn silence_about_several_steps_is_an_answer() {
        for (steps, stays) in [(0, 1), (1, 1), (5, 0)] {
            let mut report = Report::default();
            report.note(Weight::Advice, "Rank 1 holds 76 % of the critical path");
            // The step is as long as the device's part of it.
            let column = Head::new("step_ms", "step", ("ms", 2), "");
            report.figures.push(Figure { column, value: Cell::Number(5.0) });
            let diagnosis = Diagnosis { steps, step_ms: Some(9.0), ..Diagnosis::default() };
            add_examination(&mut report, &Examination { diagnosis, ..Examination::default() });
            assert_eq!(report.notes.len(), stays, "{steps}");
            assert_eq!(report.figures[0].value, Cell::Number(9.0));
        }
    }
}
