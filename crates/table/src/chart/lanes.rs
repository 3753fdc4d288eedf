//! Rows of segments on one time scale, and arrows that lead from one row to another.

use maud::Markup;

use super::color::PageColor;
use super::labels::{RowLabels, scale_below};
use super::scale::brief;
use super::words::{SMALL, fitted, legend_of, width_of};
use crate::canvas::{Align, Canvas};

/// A piece of a row: a range of time with a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Where it begins, in the chart's unit.
    pub start: f64,
    /// Where it ends.
    pub end: f64,
    /// The name of the piece.
    pub name: String,
    /// The kind of the piece, for the legend.
    pub kind: String,
    /// The color of that kind.
    pub color: PageColor,
}

/// A row.
#[derive(Clone, Debug, PartialEq)]
pub struct Lane {
    /// Its name.
    pub label: String,
    /// Its segments.
    pub segments: Vec<Segment>,
}

/// An arrow from one row to another.
#[derive(Clone, Debug, PartialEq)]
pub struct Jump {
    /// The index of the row and the time at which it begins.
    pub from: (usize, f64),
    /// The index of the row and the time at which it ends.
    pub to: (usize, f64),
    /// The name of the arrow.
    pub name: String,
}

/// Rows on one scale, from zero.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lanes {
    /// The unit of the scale.
    pub unit: String,
    /// The rows, from top to bottom.
    pub lanes: Vec<Lane>,
    /// The arrows between rows.
    pub jumps: Vec<Jump>,
}

const ROW: f64 = 46.0;
const THICK: f64 = 24.0;

impl Lanes {
    /// Where the last segment ends.
    fn end(&self) -> f64 {
        let ends = self.lanes.iter().flat_map(|lane| &lane.segments).map(|segment| segment.end);
        ends.fold(0.0, f64::max)
    }

    /// The kinds of all segments with their colors, in order of appearance.
    pub fn legend(&self) -> Vec<(String, PageColor)> {
        let segments = self.lanes.iter().flat_map(|lane| &lane.segments);
        legend_of(segments.map(|segment| (segment.kind.as_str(), segment.color)))
    }

    /// The `<svg>` element, `width` pixels wide.
    pub fn svg(&self, width: i32, title: &str) -> Markup {
        let labels = RowLabels::new(self.lanes.iter().map(|l| l.label.as_str()), width);
        let (left, row) = (labels.left(), ROW + labels.above());
        let bottom = row * self.lanes.len() as f64;
        let mut canvas = Canvas::new(f64::from(width), bottom + 24.0);
        let right = f64::from(width) - 30.0;
        let end = self.end();
        let scale = if end > 0.0 { (right - left) / end } else { 0.0 };
        let x = |at: f64| left + at.max(0.0) * scale;
        let top = |lane: usize| lane as f64 * row + labels.above();
        let middle = |lane: usize| top(lane) + ROW / 2.0;
        scale_below(&mut canvas, end, &self.unit, (0.0, bottom), x);
        for (at, lane) in self.lanes.iter().enumerate() {
            labels.draw(&mut canvas, &lane.label, top(at) + 6.0, middle(at));
            let whole = [(x(0.0), middle(at)), (x(end), middle(at))];
            canvas.line(&whole, 1.0, PageColor::Grid, "");
            for segment in &lane.segments {
                let (from, to) = (x(segment.start), x(segment.end));
                let half = THICK / 2.0;
                let hover = format!(
                    "{}, {}: {} {}, from {} to {}",
                    lane.label,
                    segment.name,
                    brief(segment.end - segment.start),
                    self.unit,
                    brief(segment.start),
                    brief(segment.end)
                );
                // Segments shorter than a pixel stay visible.
                let to = to.max(from + 0.5);
                let (top, below) = ((from, middle(at) - half), (to, middle(at) + half));
                canvas.rect(top, below, segment.color, &hover);
                let words = fitted(&segment.name, SMALL, to - from - 6.0);
                if to - from > 40.0 && width_of(&words, SMALL) < to - from {
                    let place = (from + 4.0, middle(at));
                    let color = segment.color.on();
                    canvas.text(&words, place, SMALL, color, Align::Left);
                }
            }
        }
        for jump in &self.jumps {
            let side = if jump.to.0 > jump.from.0 { 1.0 } else { -1.0 };
            let from = (x(jump.from.1), middle(jump.from.0) + side * THICK / 2.0);
            let to = (x(jump.to.1), middle(jump.to.0) - side * THICK / 2.0);
            canvas.line(&[from, to], 1.6, PageColor::Text, &jump.name);
            let tip = [to, (to.0 - 3.0, to.1 - side * 6.0), (to.0 + 3.0, to.1 - side * 6.0)];
            canvas.polygon(&tip, PageColor::Text, &jump.name);
        }
        canvas.element(title)
    }
}
