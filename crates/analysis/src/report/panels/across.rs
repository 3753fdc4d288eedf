//! Panels across ranks: the critical path through collectives, and which ranks made others wait.
//!
//! The analysis across ranks goes in. A section and notes come out. The figures come from `ranks`.

use super::shared::{COUNT, MS, PERCENT, RANK, ms, us};
use crate::ranks::{
    AcrossRanks, ClockSource, CriticalPath, MatchedCollective, RankClock, RankShare, RankWaits,
    StepPath, Stragglers,
};
use crate::report::chart::{Chart, Color, Jump, Row, Rows, Segment, Shown};
use crate::report::{Body, Note, Panel, Section, Weight, Width};
use crate::table::{Cell, Columns, counted};

const NO_PATH: &str = "No step has a critical path.";

/// The most segments of a chart. With thousands of collectives, each segment would be a pixel wide.
const SEGMENTS: usize = 1500;
/// If there are more ranks than this, ranks that are not on the path get no row.
const ALL_LANES: usize = 16;
/// The most names per rank in the table of parts.
const PARTS: usize = 8;

pub(super) fn section(across: &AcrossRanks) -> Section {
    let panels = vec![
        lanes(across),
        shares(across),
        waits(across).wide(Width::Half),
        stragglers(across),
        worst(across),
        parts(across),
        clocks(across),
    ];
    Section::new(
        "across",
        "Across ranks",
        "Collectives join the ranks: what each step depended on, and who made whom wait.",
        panels,
    )
}

/// Notes that a reader of this section needs.
pub(super) fn notes(across: &AcrossRanks) -> Vec<Note> {
    let mut notes = Vec::new();
    let mut note = |weight, text| notes.push(Note { weight, text });
    if let Some(advice) = across.path.headline() {
        note(Weight::Advice, advice);
    }
    let Stragglers { num_incomplete, num_collectives, num_unmatched, .. } = across.stragglers;
    if num_incomplete > 0 {
        let [one, many] =
            ["lacks", "lack"].map(|of| format!("of {num_collectives} collectives {of}"));
        let lack = counted(num_incomplete as u64, &one, &many);
        let text = "a rank of the group, which may have been the last to arrive.";
        note(Weight::Warning, format!("{lack} {text}"));
    }
    if num_unmatched > 0 {
        let (one, many) = ("call of a collective has", "calls of collectives have");
        let have = counted(num_unmatched as u64, one, many);
        let text = "no counterpart in another rank's trace, so who waited for whom is unknown.";
        note(Weight::Note, format!("{have} {text}"));
    }
    notes.extend(across.pipeline.as_ref().map(super::pipeline::note));
    notes
}

/// The step of median length. The first step of a window is often longer, because the profiler starts in it.
fn shown_step(across: &AcrossRanks) -> Option<&StepPath> {
    let steps = across.path.steps.iter().filter(|step| !step.segments.is_empty());
    let mut by_length: Vec<&StepPath> = steps.collect();
    by_length.sort_by_key(|step| step.len_ns());
    by_length.get(by_length.len() / 2).copied()
}

/// The critical path of one step, as a chart.
fn lanes(across: &AcrossRanks) -> Panel {
    let definition = "The path is followed backwards from the end of the rank whose step ended last: through \
         its own work to the last collective that it waited for, from there to the rank that came last to \
         that collective, and so on. Only the path is drawn, for the step of median length. Making work on \
         the path shorter makes the step shorter, and nothing else does.";
    let panel =
        |body| Panel::new("path", "Critical path through collectives", "ms", definition, body);
    let Some(step) = shown_step(across) else {
        return panel(Body::Nothing(NO_PATH.into()));
    };
    let begin = step.segments.iter().map(|segment| segment.start_ns).min().unwrap_or(0);
    let mut ranks = across.ranks.clone();
    if ranks.len() > ALL_LANES {
        let shown = &step.segments[..step.segments.len().min(SEGMENTS)];
        ranks.retain(|rank| shown.iter().any(|segment| segment.rank == *rank));
    }
    let lane = |rank: &usize| Row { label: format!("rank {rank}"), ..Row::default() };
    let mut lanes: Vec<Row> = ranks.iter().map(lane).collect();
    let place = |rank: usize| ranks.iter().position(|of| *of == rank);
    let mut jumps = Vec::new();
    for (at, segment) in step.segments.iter().take(SEGMENTS).enumerate() {
        let Some(lane) = place(segment.rank) else { continue };
        let (start, end) =
            (ms(segment.start_ns - begin), ms(segment.start_ns - begin + segment.dur_ns));
        // A segment gets the color of the kind that takes most of its time.
        let kinds = [
            ("computation", Color::Compute, segment.compute_ns),
            ("transfer", Color::Communication, segment.transfer_ns),
            ("host", Color::Host, segment.host_ns()),
        ];
        let (kind, color, _) = kinds.into_iter().max_by_key(|of| of.2).unwrap_or(kinds[2]);
        let seq = segment.seq.map_or(String::new(), |seq| format!(" #{seq}"));
        let name = format!("{}{seq}", segment.what);
        lanes[lane].segments.push(Segment {
            start,
            end,
            name: name.clone(),
            kind: kind.into(),
            color,
        });
        let next = step.segments.get(at + 1).and_then(|next| Some((place(next.rank)?, next)));
        if let Some((other, next)) = next.filter(|(other, _)| *other != lane) {
            jumps.push(Jump {
                from: (lane, end),
                to: (other, ms(next.start_ns - begin)),
                name: format!("from rank {} to rank {}", segment.rank, next.rank),
            });
        }
    }
    let rows = Rows { jumps, ..Rows::new(Shown::Lanes, "ms", lanes) };
    let mut panel = panel(Body::Chart(Chart::Rows(rows)));
    if let Some(number) = step.step {
        panel.title = format!("{} in step {number}", panel.title);
    }
    panel
}

/// Nanoseconds of all steps as milliseconds per step.
fn per_step(path: &CriticalPath) -> impl Fn(i64) -> f64 + Copy + use<> {
    let num_steps = path.steps.len().max(1) as f64;
    move |ns| ms(ns) / num_steps
}

/// The time that each rank has on the critical path, per step.
fn shares(across: &AcrossRanks) -> Panel {
    let mut ranks: Vec<_> = across.path.ranks.iter().take(super::shared::RANKS).collect();
    ranks.sort_by_key(|share| share.rank);
    let per_step = per_step(&across.path);
    let stacks = ranks.iter().map(|share| {
        let parts = [
            ("computation", per_step(share.compute_ns), Color::Compute),
            ("host", per_step(share.host_ns), Color::Host),
            ("transfer", per_step(share.transfer_ns), Color::Communication),
        ];
        Row::stack(format!("rank {}", share.rank), parts)
    });
    let body = match across.path.len_ns() {
        0 => Body::Nothing(NO_PATH.into()),
        _ => Body::stacked("ms per step", stacks),
    };
    Panel::new(
        "path-shares",
        "On the critical path",
        "ms per step",
        "The time that each rank has on the critical path, as a mean over steps. Host: neither computing nor in a \
         collective. Transfer: a collective moved data with all ranks present.",
        body,
    )
    .wide(Width::Half)
}

/// How long each rank waited in collectives, and how long it moved data.
fn waits(across: &AcrossRanks) -> Panel {
    let mut ranks: Vec<_> = across.stragglers.ranks.iter().take(super::shared::RANKS).collect();
    ranks.sort_by_key(|waits| waits.rank);
    let per_step = per_step(&across.path);
    let stacks = ranks.iter().map(|waits| {
        let parts = [
            ("waited", per_step(waits.waited_ns), Color::Wait),
            ("moved data", per_step(waits.transfer_ns), Color::Communication),
        ];
        Row::stack(format!("rank {}", waits.rank), parts)
    });
    let body = match across.stragglers.num_collectives {
        0 => Body::Nothing("No collective is in the traces of two ranks.".into()),
        _ => Body::stacked("ms per step", stacks),
    };
    let source = if across.stragglers.is_measured {
        "The transport measured the waits."
    } else {
        "Waits are computed from the start of the collective on each rank."
    };
    let definition = format!(
        "Time in collectives, as a mean over steps, split at the moment at which the last rank came: until then \
         a rank waited, from then on data moved. {source}"
    );
    Panel::new("waits", "Waiting and moving data", "ms per step", &definition, body)
}

#[rustfmt::skip]
fn stragglers(across: &AcrossRanks) -> Panel {
    let per_step = per_step(&across.path);
    let columns = Columns::<(&RankWaits, Option<&RankShare>)>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.0.rank)
        .add("collectives", "collectives", COUNT,
            "Collectives that it took part in together with others.", |of| of.0.num_collectives)
        .add("times_last", "times last", COUNT, "In how many of them it came last.", |of| of.0.times_last)
        .add("made_wait_ms", "made others wait", MS,
            "How long the others waited for it where it came last, summed over these ranks.",
            move |of| per_step(of.0.made_wait_ns))
        .add("waited_ms", "waited", MS, "How long it waited for the last rank.", move |of| per_step(of.0.waited_ns))
        .add("lead_ms", "later than the next", MS,
            "How much later it came than the rank before it, where it came last: an upper \
             bound on the time that the run would save if this rank were no slower than \
             the second slowest.",
            move |of| per_step(of.0.lead_ns))
        .add("transfer_ms", "moved data", MS,
            "How long data moved, without the wait.", move |of| per_step(of.0.transfer_ns))
        .add("gain_ms", "steps would gain", MS,
            "How much shorter the steps would be if this rank were no later than the next \
             rank wherever the critical path depends on it, at collectives and at the \
             end of the step: an upper bound, since something else may then take as long.",
            move |of| of.1.map(|share| per_step(share.gain_ns)))
        .add("share_pctg", "share of the path", PERCENT,
            "Its computation and host time as a share of the critical path of all steps.",
            |of| of.1.map(|share| 100.0 * share.share));
    let share = |rank| across.path.ranks.iter().find(|share| share.rank == rank);
    let rows = across.stragglers.ranks.iter().map(|waits| (waits, share(waits.rank)));
    Panel::new(
        "stragglers",
        "Stragglers",
        "",
        "Which ranks came last to collectives, and how long the others waited for them. The rank that made \
         the others wait longest comes first. Times are means over steps.",
        Body::Table(columns.table(rows)),
    )
}

#[rustfmt::skip]
fn worst(across: &AcrossRanks) -> Panel {
    // For a single collective, unlike the means of other tables.
    const MS: (&str, usize) = ("ms", 3);
    let columns = Columns::<&MatchedCollective>::new()
        .add("name", "collective", COUNT, "The collective's name in the traces.", |of| of.name.clone())
        .add("step", "step", COUNT, "The step in which its last rank came.", |of| of.step)
        .add("seq", "number", COUNT, "Its place in the sequence of its group.", |of| of.seq)
        .add("last_rank", "last rank", COUNT, "The rank that came last.", |of| of.last().rank)
        .add("made_wait_ms", "made others wait", MS,
            "The sum of the others' waits, each minus the last rank's own wait.",
            |of| ms(of.made_wait_ns()))
        .add("lead_ms", "later than the next", MS,
            "How much later the last rank came than the one before it.", |of| ms(of.lead_ns()))
        .add("transfer_ms", "moved data", MS,
            "How long data moved on the last rank.", |of| ms(of.last().transfer_ns()));
    let definition =
        "The collectives, at most twenty, whose last rank made the others wait longest.";
    Panel::table("worst", "Longest waits", definition, columns.table(&across.stragglers.worst), "No collective made a rank wait.")
}

/// A row of the table of parts: the rank (`None` for a transfer), the name, the kind, and the time of all steps.
type PathPart<'a> = (Option<usize>, &'a str, &'static str, i64);

/// The parts of the critical path, transfers included: the rows add up to the path, except for cut-off rows.
#[rustfmt::skip]
fn parts(across: &AcrossRanks) -> Panel {
    let (len_ns, per_step) = (across.path.len_ns(), per_step(&across.path));
    let columns = Columns::<PathPart>::new()
        .add("rank", "rank", COUNT, "The rank that did it; all for transfers, in which all ranks of a collective take part.",
            |of| of.0.map_or(Cell::Text("all".into()), Cell::from))
        .add("what", "what", COUNT,
            "The collective that moved data. Otherwise the span in which the path lies. Without a span: the kernel \
             or operator that took most of the time, or host.",
            |of| of.1.to_owned())
        .add("kind", "kind", COUNT, "work: computation and host time of a rank. transfer: a collective moved data \
             with all ranks present.", |of| of.2)
        .add("time_ms", "time on the path", MS, "Time on the critical path, as a mean over steps.",
            move |of| per_step(of.3))
        .add("share_pctg", "share", PERCENT, "Share of the critical path of all steps.",
            move |of| (len_ns > 0).then(|| 100.0 * of.3 as f64 / len_ns as f64));
    let work = across.path.ranks.iter().flat_map(|share| {
        share.parts.iter().take(PARTS).map(|(what, ns)| (Some(share.rank), what.as_str(), "work", *ns))
    });
    let transfers = across.path.transfers.iter().take(PARTS);
    let transfers = transfers.map(|of| (None, of.what.as_str(), "transfer", of.time_ns));
    let mut rows: Vec<PathPart> = work.chain(transfers).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.3));
    let definition = "What the critical path of all steps consists of, the longest first: the eight longest parts of \
        each rank, and the eight longest transfers.";
    Panel::table("path-parts", "What the path consists of", definition, columns.table(rows), NO_PATH)
}

#[rustfmt::skip]
fn clocks(across: &AcrossRanks) -> Panel {
    const EXACT: (&str, usize) = ("us", 3);
    let columns = Columns::<&RankClock>::new()
        .add("rank", "rank", COUNT, RANK, |of| of.rank)
        .add("source", "offset", COUNT, "Where the offset of its clock comes from.", |of| match of.source {
            ClockSource::Reference => "reference".to_owned(),
            ClockSource::Measured => "measured while the ranks ran".to_owned(),
            ClockSource::Estimated { num_collectives } => {
                format!("estimated from {num_collectives} collectives")
            }
            ClockSource::AsWritten => "none: times as written".to_owned(),
        })
        .add("begin_us", "at the start", EXACT,
            "The offset that is added to the rank's clock to get the reference rank's, at \
             the start of its trace.",
            |of| us(of.offset_begin_ns))
        .add("end_us", "at the end", EXACT,
            "The same at the end of its trace. It is interpolated linearly in between.", |of| us(of.offset_end_ns))
        .add("error_us", "error", EXACT,
            "By how much the offset may be wrong.", |of| of.error_ns.map(|ns| us(ns as i64)));
    Panel::new(
        "clocks",
        "Clocks",
        "",
        "How the clocks of the ranks were aligned. Every figure across ranks is only as \
         exact as this.",
        Body::Table(columns.table(&across.clocks.ranks)),
    )
}
