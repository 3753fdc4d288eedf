//! The time line of one step: every thread of the host and every stream of the device.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::kernels::color;
use super::shared::{label, ms};
use crate::hta::{Analysis, KernelKind};
use crate::report::chart::{Color, Row, Segment};
use crate::report::{Body, Panel};
use crate::steps;
use crate::timeline::{TimeRange, Timeline, TrackId};

/// The most rows, and the most pieces of a row. Shorter ones are drawn together.
const LANES: usize = 24;
const PIECES: i64 = 400;

/// Something on a row: its name, and for work of a device its kind.
type Piece<'a> = (TimeRange, &'a str, Option<KernelKind>);

/// The step of median length of the first rank that has one.
pub(super) fn panel(analysis: &Analysis, timelines: &[Timeline]) -> Panel {
    let found = analysis.ranks.iter().find_map(|rank| {
        let step = rank.anatomy.as_ref()?.line.as_ref()?.step;
        let is_its = |(at, of): &(usize, &Timeline)| of.rank.unwrap_or(*at) == rank.rank;
        Some((label(rank), step, timelines.iter().enumerate().find(is_its)?.1))
    });
    let (mut title, mut rows) = ("A whole step".to_owned(), Vec::new());
    if let Some((rank, step, timeline)) = found {
        title = format!("Step {} of {rank}, all threads and streams", step.number);
        rows = lanes(timeline, step.time);
    }
    let definition = "The step of median length of the first rank, since it began. Threads: the outermost operators and calls of the runtime library. \
        Streams: kernels and copies that ran in this time, also those of the step before. Pieces too short to be drawn are put together.";
    Panel::new("whole-step", &title, "ms", definition, Body::lanes(rows).or("No trace has steps."))
}

fn lanes(timeline: &Timeline, step: TimeRange) -> Vec<Row> {
    let text = |id| timeline.names.text(id);
    let mut rows: BTreeMap<(bool, TrackId), Vec<Piece>> = BTreeMap::new();
    let operators = timeline.operators.iter().map(|of| (of.name, of.lane, of.time));
    let calls = timeline.launches.iter().map(|of| (of.name, of.lane, of.time));
    for (name, lane, time) in operators.chain(calls) {
        if steps::number(text(name)).is_none() {
            rows.entry((false, lane)).or_default().push((time, text(name), None));
        }
    }
    for kernel in &timeline.kernels {
        let kind = KernelKind::of_kernel(text(kernel.name));
        if kind != KernelKind::Other {
            let piece = (kernel.time, text(kernel.name), Some(kind));
            rows.entry((true, kernel.lane)).or_default().push(piece);
        }
    }
    let row = |((is_device, lane), pieces): ((bool, TrackId), Vec<Piece>)| {
        let info = &timeline.lanes[lane.0 as usize];
        let what = if is_device { "stream" } else { "thread" };
        let name = info.name.clone().filter(|name| !name.trim().is_empty());
        let label = name.unwrap_or_else(|| format!("{what} {}", info.tid));
        let segments = drawn(pieces, step);
        (!segments.is_empty()).then(|| Row { label, segments, ..Row::default() })
    };
    rows.into_iter().filter_map(row).take(LANES).collect()
}

/// The outermost pieces within a step. Neighbors that are too short to be seen become one.
fn drawn(mut pieces: Vec<Piece>, step: TimeRange) -> Vec<Segment> {
    let least_ns = (step.dur_ns / PIECES).max(1);
    pieces.retain(|of| of.0.end_ns() > step.start_ns && of.0.start_ns < step.end_ns());
    pieces.sort_by_key(|of| (of.0.start_ns, Reverse(of.0.end_ns())));
    let mut out: Vec<(TimeRange, &str, Option<KernelKind>, usize)> = Vec::new();
    let mut covered_ns = i64::MIN;
    for (time, name, kind) in pieces {
        if time.end_ns() <= covered_ns {
            continue;
        }
        covered_ns = time.end_ns();
        match out.last_mut() {
            Some((last, _, of, count))
                if *of == kind && time.end_ns().saturating_sub(last.start_ns) <= least_ns =>
            {
                (*last, *count) = (TimeRange::between(last.start_ns, time.end_ns()), *count + 1);
            }
            _ => out.push((time, name, kind, 1)),
        }
    }
    let segment =
        |(time, name, kind, count): (TimeRange, &str, Option<KernelKind>, usize)| Segment {
            start: ms(time.start_ns.saturating_sub(step.start_ns)).max(0.0),
            end: ms(time.end_ns().min(step.end_ns()).saturating_sub(step.start_ns)),
            name: if count == 1 { name.to_owned() } else { format!("{count} from {name} on") },
            kind: kind.map_or("host", KernelKind::name).to_owned(),
            color: kind.map_or(Color::Host, color),
        };
    out.into_iter().map(segment).collect()
}
