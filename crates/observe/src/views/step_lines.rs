//! The time line of a step, as text and as `step.svg`: the main thread, and the buckets on their way.
//!
//! All times are means over ranks and steps. The last batch of a step is drawn; those before it are one part. Pipelines have
//! another picture in the same file.

use paceline_failure::{Failure, Result};
use paceline_host::text::plural;
use paceline_table::chart::{Chart, Color, Picture, Row, Rows, Segment, Shown};

use crate::figures::facts::Facts;
use crate::insight::anatomy::BucketLine;
use crate::record::op_moments::OpMoments;
use crate::record::readiness::Moments;
use crate::record::times::StepTimes;
use crate::views::blocks::has_anatomy;
use crate::views::pipeline_lanes;

/// How wide a picture is at most, and where no width is known.
const WIDTH: usize = 80;
/// The signs of buckets, by number.
const NUMBERS: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// The name of the picture in the run folder.
pub(crate) const FILE_NAME: &str = "step.svg";

/// The picture for a file, if the steps have this form or are those of a pipeline.
pub(crate) fn svg(facts: &Facts) -> Result<Option<String>> {
    let (rows, subtitle) = match &facts.pipeline {
        Some(of) => (pipeline_lanes::rows(of), pipeline_lanes::subtitle(facts, of)),
        None => {
            let (model, strategy) = (facts.config.model.name(), facts.config.strategy.name());
            let ranks = plural(facts.config.world_size, "rank");
            let subtitle = format!("{model}, {strategy}, {ranks}: means over ranks and steps");
            (explained(lanes_of(facts)), subtitle)
        }
    };
    if rows.is_empty() {
        return Ok(None);
    }
    let svg = picture(rows, subtitle).svg();
    Ok(Some(svg.map_err(|error| Failure::Run(format!("{FILE_NAME}: {error}")))?))
}

/// The rows with names of buckets for a legend.
fn explained(mut lanes: Vec<Row>) -> Vec<Row> {
    for segment in lanes.iter_mut().skip(1).flat_map(|lane| &mut lane.segments) {
        segment.kind = match segment.color {
            Color::Wait => "bucket waits for the last rank",
            _ => "bucket on its way",
        }
        .to_owned();
    }
    lanes
}

fn picture(rows: Vec<Row>, subtitle: String) -> Picture {
    let title = "Where the time of a step goes".to_owned();
    Picture { title, subtitle, chart: Chart::Rows(Rows::new(Shown::Lanes, "ms", rows)) }
}

/// The picture of the usual step as text, or nothing if the steps do not have this form.
pub(crate) fn drawing(facts: &Facts, width: Option<usize>) -> Vec<String> {
    drawn(&lanes_of(facts), width.unwrap_or(WIDTH).min(WIDTH))
}

/// The rows of the usual step, or nothing if the steps do not have this form.
pub(crate) fn lanes_of(facts: &Facts) -> Vec<Row> {
    if facts.config.pipeline.is_some() || !has_anatomy(facts) {
        return Vec::new();
    }
    let mean = |part: fn(&StepTimes) -> u64| facts.steps.mean(part).map_or(0.0, |ns| ns / 1e6);
    let moments = Moments::mean(facts.reports.iter().map(|report| &report.alike.moments));
    lanes(&facts.anatomy.buckets, moments.passes, mean(|t| t.step), mean(|t| t.optimizer))
}

/// The rows: the main thread, and the operations that carry gradients, if any. In milliseconds after the batch arrived.
fn lanes(
    buckets: &[BucketLine],
    [earlier, begin, end, sent]: [f64; 4],
    step_ms: f64,
    optimizer_ms: f64,
) -> Vec<Row> {
    if !(end > begin && step_ms >= end) {
        return Vec::new();
    }
    let sent = if sent > end { sent } else { step_ms };
    let updated = (sent - optimizer_ms).max(end);
    let main = [
        ("earlier batches", 0.0, earlier, Color::Compute),
        ("forward", earlier, begin, Color::Forward),
        ("backward", begin, end, Color::Backward),
        ("wait", end, updated, Color::Wait),
        ("optimizer", updated, sent, Color::Optimizer),
        ("parameters", sent, step_ms, Color::Communication),
    ];
    let segment = |name: &str, kind: &str, start: f64, end: f64, color| {
        let [name, kind] = [name, kind].map(str::to_owned);
        Segment { start, end, name, kind, color }
    };
    let main = main.into_iter().filter(|(_, start, end, _)| end > start);
    let main = main.map(|(name, start, end, color)| segment(name, name, start, end, color));
    let lane = |label: &str, segments| Row { label: label.to_owned(), segments, ..Row::default() };
    let mut lanes = vec![lane("main", main.collect())];
    let bucket = |(at, op): (usize, &OpMoments)| {
        let name = format!("bucket {at}");
        let sign = char::from(NUMBERS[at % NUMBERS.len()]).to_string();
        let wait = segment(&name, "-", op.sent_ms, op.present_ms, Color::Wait);
        [wait, segment(&name, &sign, op.present_ms, op.done_ms, Color::Communication)]
    };
    let buckets = buckets.iter().map(|of| &of.op).enumerate().flat_map(bucket);
    let segments: Vec<Segment> = buckets.collect();
    if !segments.is_empty() {
        lanes.push(lane("buckets", segments));
    }
    lanes
}

/// The rows as text, each segment as the first letter of its kind.
fn drawn(lanes: &[Row], width: usize) -> Vec<String> {
    let Some(main) = lanes.first() else { return Vec::new() };
    let ends = lanes.iter().flat_map(|lane| &lane.segments).map(|segment| segment.end);
    let whole = ends.fold(0.0, f64::max);
    let margin = lanes.iter().map(|lane| lane.label.len()).max().unwrap_or(0) + 2;
    let room = width.saturating_sub(margin).max(1);
    let column = |ms: f64| ((ms / whole * room as f64).round() as usize).min(room);
    let names: Vec<&str> = main.segments.iter().map(|segment| segment.kind.as_str()).collect();
    let beside = if lanes.len() > 1 { "; buckets (- waits)" } else { "" };
    let last = main.segments.last().map_or(0.0, |segment| segment.end);
    let mut lines = vec![format!("A step, {last:.2} ms: {}{beside}", names.join(", "))];
    for Row { label, segments, .. } in lanes {
        let mut row = vec![b' '; room];
        for segment in segments {
            let (start, end) = (column(segment.start), column(segment.end));
            let is_short = start >= end && segment.end > segment.start && segment.kind != "-";
            // Every piece of time is visible, if there is room.
            let start = if is_short { start.min(room - 1) } else { start };
            let end = if is_short { start + 1 } else { end };
            let letter = segment.kind.as_bytes().first().copied().unwrap_or(b'?');
            row[start.min(end)..end].fill(letter);
        }
        let row = String::from_utf8_lossy(&row).trim_end().to_owned();
        lines.push(format!("{label:<margin$}{row}"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forward pass of 10 ms and a backward pass of 20.
    const PASSES: [f64; 4] = [0.0, 10.0, 30.0, 0.0];

    fn of_step(buckets: &[[f64; 3]], step_ms: f64, optimizer_ms: f64) -> Vec<Row> {
        let bucket = |[sent_ms, present_ms, done_ms]: &[f64; 3]| {
            let op = OpMoments {
                bytes: 8,
                ready_ms: *sent_ms,
                sent_ms: *sent_ms,
                present_ms: *present_ms,
                done_ms: *done_ms,
                hidden_ms: 0.0,
            };
            BucketLine { op, units: Vec::new() }
        };
        let buckets: Vec<BucketLine> = buckets.iter().map(bucket).collect();
        lanes(&buckets, PASSES, step_ms, optimizer_ms)
    }

    #[test]
    fn what_is_drawn() {
        let lanes = of_step(&[[14.0, 16.0, 20.0], [30.0, 30.0, 36.0]], 40.0, 4.0);
        let lines = drawn(&lanes, 49);
        assert_eq!(
            lines[0],
            "A step, 40.00 ms: forward, backward, wait, optimizer; buckets (- waits)"
        );
        assert_eq!(lines[1], "main     ffffffffffbbbbbbbbbbbbbbbbbbbbwwwwwwoooo");
        assert_eq!(lines[2], "buckets                --0000          111111");
        let alone = drawn(&of_step(&[], 40.0, 10.0), 46);
        assert_eq!(alone[0], "A step, 40.00 ms: forward, backward, optimizer");
        assert_eq!(alone[1..], ["main  ffffffffffbbbbbbbbbbbbbbbbbbbboooooooooo"]);
        let short = drawn(&of_step(&[], 40.0, 0.1), 46);
        assert_eq!(short[1], "main  ffffffffffbbbbbbbbbbbbbbbbbbbbwwwwwwwwwo");
        let lines = drawn(&super::lanes(&[], [6.0, 10.0, 30.0, 37.0], 40.0, 2.0), 46);
        let parts = "earlier batches, forward, backward, wait, optimizer, parameters";
        assert_eq!(lines[0], format!("A step, 40.00 ms: {parts}"));
        assert_eq!(lines[1], "main  eeeeeeffffbbbbbbbbbbbbbbbbbbbbwwwwwooppp");
    }

    #[test]
    fn the_picture_names_what_is_drawn() {
        let lanes = of_step(&[[14.0, 16.0, 20.0], [30.0, 30.0, 36.0]], 40.0, 4.0);
        let svg = picture(explained(lanes), "cnn, ddp, 2 ranks".to_owned()).svg().unwrap();
        let shown = [
            "cnn, ddp",
            "forward",
            "optimizer",
            "bucket 1",
            "bucket on its way",
            "waits for the last",
            "40 ms",
        ];
        for part in shown {
            assert!(svg.contains(part), "{part}: {svg}");
        }
    }

    #[test]
    fn every_line_fits_and_nothing_is_drawn_of_nothing() {
        let buckets: Vec<[f64; 3]> =
            (0..50).map(|at| [f64::from(at); 3].map(|ms| ms * 0.7)).collect();
        for width in [0, 1, 9, 10, 80] {
            let lines = drawn(&of_step(&buckets, 40.0, 0.001), width);
            let most = lines[1..].iter().map(|line| line.len()).max().unwrap_or(0);
            assert!(most <= width.max(10), "{width}: {lines:?}");
        }
        assert!(drawn(&lanes(&[], [0.0; 4], 0.0, 0.0), 80).is_empty());
    }
}
