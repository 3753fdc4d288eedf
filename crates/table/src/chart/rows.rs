//! Rows of segments on one scale from zero: bars, stacks, and lanes of time with arrows.

use super::axis::{Scale, Spacing};
use super::canvas::{Align, Canvas, Font, Point};
use super::color::Color;
use super::legend::{flowed, legend};
use super::lines::interval;
use super::words::{SIZE, SMALL, brief, broken, fitted, like, width_of};

/// A piece of a row.
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
    pub color: Color,
}

/// A row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// A heading above the row; usually empty.
    pub heading: String,
    /// Its name.
    pub label: String,
    /// Its segments, from left to right.
    pub segments: Vec<Segment>,
    /// The range or the confidence interval of its value.
    pub interval: Option<[f64; 2]>,
    /// Text after a bar in place of its value; usually empty.
    pub words: String,
}

impl Row {
    /// A bar, or a note that there is no value.
    pub fn bar(label: impl Into<String>, value: Option<f64>, color: Color) -> Self {
        let value = value.filter(|value| value.is_finite());
        let words = if value.is_some() { "" } else { "no value" }.to_owned();
        let parts = value.map(|value| ("", value, color));
        Self { words, ..Self::stack(label, parts) }
    }

    /// Parts in a row, each with its name, value and color.
    pub fn stack<'a>(
        label: impl Into<String>,
        parts: impl IntoIterator<Item = (&'a str, f64, Color)>,
    ) -> Self {
        let mut next = 0.0;
        let segment = |(name, value, color): (&str, f64, Color)| {
            // A negative part keeps its value, and the part after it begins where it does.
            let (start, end) = (next, next + value);
            next = next.max(end);
            Segment { start, end, name: name.to_owned(), kind: name.to_owned(), color }
        };
        let segments = parts.into_iter().map(segment).collect();
        Self { label: label.into(), segments, ..Self::default() }
    }

    /// The row with this interval.
    pub fn interval(self, low: f64, high: f64) -> Self {
        Self { interval: Some([low, high]), ..self }
    }

    /// Where its last segment ends.
    fn end(&self) -> f64 {
        self.segments.iter().map(|segment| segment.end).fold(0.0, f64::max)
    }
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

/// The meaning of the rows, which decides their words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shown {
    /// Bars, with their values at their ends.
    #[default]
    Bars,
    /// Parts that add up, with their values in them.
    Parts,
    /// Time with the names of what happened.
    Lanes,
}

/// Rows on one scale.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Whether they are bars, stacks or lanes.
    pub shown: Shown,
    /// The unit of the scale.
    pub unit: String,
    /// The value of a full-length bar, such as 100 for percentages; by default that of the longest row.
    pub whole: Option<f64>,
    /// The rows, from top to bottom.
    pub rows: Vec<Row>,
    /// The arrows between rows.
    pub jumps: Vec<Jump>,
}

/// The height of a line of text.
const LINE: f64 = 17.0;
const HEADING: f64 = 26.0;
/// Charts for phones are narrower.
const NARROW: f64 = 400.0;
/// From the left edge of a sample in the legend to its name; twice the side of its square.
const SAMPLE: f64 = 15.0;

impl Rows {
    /// Rows without arrows.
    pub fn new(shown: Shown, unit: &str, rows: impl IntoIterator<Item = Row>) -> Self {
        Self { shown, unit: unit.to_owned(), rows: rows.into_iter().collect(), ..Self::default() }
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = &Segment> + Clone {
        self.rows.iter().flat_map(|row| &row.segments)
    }

    /// Draws the chart from `top` on, and returns its lower edge.
    pub(super) fn draw(&self, canvas: &mut Canvas, top: f64) -> f64 {
        let mut kinds: Vec<(&str, Color)> = Vec::new();
        for segment in self.segments() {
            if !kinds.iter().any(|(kind, _)| *kind == segment.kind) {
                kinds.push((&segment.kind, segment.color));
            }
        }
        let top = legend(canvas, &kinds, (top, SAMPLE), |canvas, at, color| {
            square(canvas, at, *color, "");
        });
        let layout = RowLayout::new(self, canvas.width, canvas.is_file);
        let mut edge = top;
        let mut tops = Vec::new();
        for row in &self.rows {
            edge += layout.above(row) + if row.heading.is_empty() { 0.0 } else { HEADING };
            tops.push(edge);
            edge += layout.row + LINE * layout.below(row).last().map_or(0, |of| of.2.1 + 1) as f64;
        }
        if self.shown == Shown::Bars {
            canvas.line(&[(layout.left, top), (layout.left, edge)], 1.0, Color::Grid, "");
        } else {
            layout.scale(canvas, (top, edge));
        }
        for (row, top) in self.rows.iter().zip(&tops) {
            layout.draw(canvas, row, *top);
        }
        let middle = |at: usize| tops[at] + layout.row / 2.0;
        for jump in &self.jumps {
            let side = if jump.to.0 > jump.from.0 { 1.0 } else { -1.0 };
            let half = side * layout.half;
            let from = (layout.x(jump.from.1), middle(jump.from.0) + half);
            let to = (layout.x(jump.to.1), middle(jump.to.0) - half);
            canvas.line(&[from, to], 1.6, Color::Text, &jump.name);
            let tip = [to, (to.0 - 3.0, to.1 - side * 6.0), (to.0 + 3.0, to.1 - side * 6.0)];
            canvas.polygon(&tip, Color::Text, &jump.name);
        }
        edge + if self.shown == Shown::Bars { 2.0 } else { 24.0 }
    }

    /// The words after a row.
    fn words(&self, row: &Row, number: impl Fn(f64) -> String) -> String {
        match row.segments.last().filter(|_| self.shown == Shown::Bars && row.words.is_empty()) {
            Some(bar) => format!("{} {}", number(bar.end), self.unit).trim_end().to_owned(),
            None => row.words.clone(),
        }
    }

    /// The words under the pointer.
    fn hover(&self, row: &Row, segment: &Segment) -> String {
        let (label, unit, Segment { start, end, name, .. }) = (&row.label, &self.unit, segment);
        let length = brief(end - start);
        match (self.shown, row.interval) {
            (Shown::Bars, None) => format!("{label}: {end} {unit}"),
            (Shown::Bars, Some([low, high])) => format!("{label}: {end} {unit} ({low} to {high})"),
            (Shown::Parts, _) => {
                let total = row.end();
                let percent = if total > 0.0 { 100.0 * (end - start) / total } else { 0.0 };
                let total = brief(total);
                format!("{label}, {name}: {length} {unit} ({percent:.2} % of {total} {unit})")
            }
            (Shown::Lanes, _) => {
                let (start, end) = (brief(*start), brief(*end));
                format!("{label}, {name}: {length} {unit}, from {start} to {end}")
            }
        }
    }
}

/// Draws a small square to the right of `at`.
fn square(canvas: &mut Canvas, (x, y): Point, color: Color, hover: &str) {
    let half = SAMPLE / 4.0;
    canvas.rect((x, y - half), (x + 2.0 * half, y + half), color, hover);
}

struct RowLayout<'a> {
    of: &'a Rows,
    width: f64,
    /// Whether names stand above their rows: long names in a file or on a narrow chart.
    is_above: bool,
    /// The height of a row, and half of that of a segment.
    row: f64,
    half: f64,
    /// Where rows begin, and the pixels that the scale takes.
    left: f64,
    room: f64,
    scale: Scale,
    number: Box<dyn Fn(f64) -> String>,
}

impl<'a> RowLayout<'a> {
    fn new(of: &'a Rows, width: f64, is_file: bool) -> Self {
        let names = of.rows.iter().map(|row| width_of(&row.label, SIZE));
        let widest = names.fold(0.0, f64::max) + 10.0;
        // A longer name loses its middle. On a chart for a phone little would be left of it.
        let is_above = widest > 0.4 * width && (is_file || width < NARROW);
        // Half of the first label of the scale lies to the left of its tick.
        let left = if is_above { 4.0 } else { widest.min(0.4 * width) };
        let lengths: Vec<f64> = of.segments().map(|segment| segment.end - segment.start).collect();
        let number = Box::new(like(lengths.into_iter()));
        let words = of.rows.iter().map(|row| width_of(&of.words(row, &number), SIZE) + 10.0);
        let room = (width - left - words.fold(30.0, f64::max)).max(0.0);
        let ends = of.segments().map(|segment| segment.end);
        let intervals = of.rows.iter().filter_map(|row| Some(row.interval?[1]));
        let ends = ends.chain(intervals).chain(of.whole).filter(|end| end.is_finite());
        let ends: Vec<f64> = ends.collect();
        let scale = Scale::new(Spacing::Linear, ends.iter().copied(), room);
        let (row, half) = match of.shown {
            Shown::Bars => (24.0, 7.5),
            Shown::Parts => (30.0, 10.5),
            Shown::Lanes => (46.0, 12.0),
        };
        Self { of, width, is_above, row, half, left, room, scale, number }
    }

    fn name(&self, row: &Row) -> Vec<String> {
        if self.is_above {
            broken(&row.label, SIZE, self.width - self.left)
        } else {
            vec![fitted(&row.label, SIZE, self.left - 10.0)]
        }
    }

    /// The height that a name adds above its row.
    fn above(&self, row: &Row) -> f64 {
        if self.is_above { LINE * self.name(row).len() as f64 } else { 0.0 }
    }

    fn x(&self, value: f64) -> f64 {
        self.left + self.room * self.scale.position(value.max(0.0))
    }

    /// The words in a segment, if they fit: a value only as a whole, a name also without its middle.
    fn inside(&self, segment: &Segment) -> Option<String> {
        let length = self.x(segment.end) - self.x(segment.start);
        match self.of.shown {
            Shown::Bars => None,
            Shown::Parts => {
                let value = (self.number)(segment.end - segment.start);
                (width_of(&value, SMALL) + 8.0 < length).then_some(value)
            }
            Shown::Lanes => (length > 40.0).then(|| fitted(&segment.name, SMALL, length - 6.0)),
        }
    }

    /// The values that are too wide for their parts, with their positions below the row, on a narrow chart.
    fn below(&self, row: &'a Row) -> Vec<(&'a Segment, String, (f64, usize))> {
        let is_hidden = |of: &&Segment| of.end != of.start && self.inside(of).is_none();
        let is_wanted = self.width < NARROW && self.of.shown == Shown::Parts;
        let hidden: Vec<_> = row.segments.iter().filter(|of| is_wanted && is_hidden(of)).collect();
        let values: Vec<_> = hidden.iter().map(|of| (self.number)(of.end - of.start)).collect();
        let lengths = values.iter().map(|value| SAMPLE + width_of(value, SMALL));
        let places = flowed(lengths, self.room + 30.0);
        hidden
            .into_iter()
            .zip(values)
            .zip(places)
            .map(|((of, value), at)| (of, value, at))
            .collect()
    }

    /// Draws a row with this upper edge of its segments.
    fn draw(&self, canvas: &mut Canvas, row: &Row, top: f64) {
        let (left, middle) = (self.left, top + self.row / 2.0);
        if !row.heading.is_empty() {
            let at = (0.0, top - self.above(row) - LINE / 2.0);
            canvas.text(&row.heading, at, Font(SIZE, Color::Muted, Align::Left), "");
        }
        let (mut at, align) = if self.is_above {
            ((left, top - self.above(row) + LINE / 2.0 + 2.0), Align::Left)
        } else {
            ((left - 8.0, middle), Align::Right)
        };
        for line in self.name(row) {
            canvas.text(&line, at, Font(SIZE, Color::Text, align), &row.label);
            at.1 += LINE;
        }
        let (from, to) = (middle - self.half, middle + self.half);
        if self.of.whole.is_some() {
            canvas.rect((left, from), (left + self.room, to), Color::Track, "");
        } else if self.of.shown == Shown::Lanes {
            canvas.line(&[(left, middle), (left + self.room, middle)], 1.0, Color::Grid, "");
        }
        for segment in &row.segments {
            // Segments shorter than a pixel stay visible, unless their length is zero or negative.
            let start = self.x(segment.start);
            let least = if segment.end > segment.start { 0.5 } else { 0.0 };
            let end = self.x(segment.end).max(start + least);
            canvas.rect((start, from), (end, to), segment.color, &self.of.hover(row, segment));
            if let Some(words) = self.inside(segment) {
                let font = Font(SMALL, segment.color.on(), Align::Middle);
                canvas.text(&words, ((start + end) / 2.0, middle), font, "");
            }
        }
        let mut end = self.x(row.end());
        if let Some([low, high]) = row.interval {
            interval(canvas, [low, high].map(|of| (self.x(of), middle)), Color::Text);
            end = end.max(self.x(high));
        }
        let end = if self.of.whole.is_some() { left + self.room } else { end };
        let font = Font(SIZE, Color::Text, Align::Left);
        canvas.text(&self.of.words(row, &self.number), (end + 6.0, middle), font, "");
        for (segment, value, (x, line)) in self.below(row) {
            let at = (left + x, top + self.row + LINE * (line as f64 + 0.5) - 2.0);
            square(canvas, at, segment.color, &segment.name);
            let font = Font(SMALL, Color::Text, Align::Left);
            canvas.text(&value, (at.0 + SAMPLE, at.1), font, &segment.name);
        }
    }

    /// Draws the scale below the rows. Each tick has a line from `top` to `bottom`.
    fn scale(&self, canvas: &mut Canvas, (top, bottom): (f64, f64)) {
        for (&tick, label) in self.scale.major.iter().zip(self.scale.labels(&self.of.unit)) {
            let x = self.x(tick);
            canvas.line(&[(x, top), (x, bottom)], 1.0, Color::Grid, "");
            let font = Font(SMALL, Color::Muted, Align::Middle);
            canvas.text(&label, (x, bottom + 12.0), font, "");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn svg(of: &Rows, width: f64) -> String {
        let mut canvas = Canvas::new(width);
        let height = of.draw(&mut canvas, 0.0);
        canvas.element(height, "").0
    }

    #[test]
    fn every_value_is_on_a_narrow_chart() {
        let names: Vec<String> = (0..12).map(|at| format!("part {at}")).collect();
        let parts = names.iter().enumerate().map(|(at, name)| {
            (name.as_str(), if at == 3 { 800.0 } else { 1.25 + at as f64 }, Color::Series(at))
        });
        let of = Rows::new(Shown::Parts, "ms", [Row::stack("rank 0", parts)]);
        let narrow = svg(&of, 350.0);
        for part in of.segments() {
            let value = part.end - part.start;
            assert!(narrow.contains(&format!(">{value:.1}<")), "{}: {narrow}", part.name);
        }
        let wide = svg(&of, 1120.0);
        assert!(wide.contains(">800.0<") && !wide.contains(">1.2<"), "{wide}");
        assert!(wide.contains("<title>rank 0, part 3: 800 ms (91.2"), "{wide}");
    }

    #[test]
    fn negative_values_stand_in_words_and_take_no_room() {
        let bars = [2.0, -1.5, 0.0].map(|value| Row::bar("a", Some(value), Color::Compute));
        let bars = svg(&Rows::new(Shown::Bars, "ms", bars), 540.0);
        for part in [">-1.50 ms<", "<title>a: -1.5 ms</title>", ">0.00 ms<"] {
            assert!(bars.contains(part), "{part}: {bars}");
        }
        assert_eq!(bars.matches("width=\"0\"").count(), 2, "neither has a length: {bars}");
        let parts =
            [("a", 4.0, Color::Compute), ("b", -3.0, Color::Wait), ("c", 4.0, Color::Other)];
        let of = Rows::new(Shown::Parts, "ms", [Row::stack("rank 0", parts)]);
        let places: Vec<_> = of.segments().map(|part| (part.start, part.end)).collect();
        assert_eq!(places, [(0.0, 4.0), (4.0, 1.0), (4.0, 8.0)]);
        let narrow = svg(&of, 350.0);
        for part in ["rank 0, b: -3 ms (-37.50 % of 8 ms)", ">-3<", "width=\"0\""] {
            assert!(narrow.contains(part), "{part}: {narrow}");
        }
        let short = [1e6, 1e-3].map(|value| Row::bar("a", Some(value), Color::Compute));
        let short = svg(&Rows::new(Shown::Bars, "", short), 540.0);
        assert!(short.contains("width=\"0.5\""), "a short bar stays visible: {short}");
    }

    #[test]
    fn only_long_names_in_a_file_or_on_a_narrow_chart_go_above_their_rows() {
        let long = "paceline_conv_relu_pool_backward_input";
        let of = |name: &str| Rows::new(Shown::Bars, "", [Row::bar(name, Some(1.0), Color::Other)]);
        assert!(svg(&of(long), 350.0).contains(&format!(">{long}</text>")), "the whole name");
        assert!(!svg(&of(long), 540.0).contains(&format!(">{long}</text>")), "a column");
        let above = |name, width, is_file| {
            let of = of(name);
            RowLayout::new(&of, width, is_file).above(&of.rows[0])
        };
        assert_eq!([above("rank 0", 350.0, false), above(long, 350.0, false)], [0.0, LINE]);
        assert_eq!([above(long, 540.0, false), above(long, 540.0, true)], [0.0, LINE]);
        assert_eq!(above(&format!("{long}, {long}"), 350.0, true), 2.0 * LINE);
    }

    #[test]
    fn bars_carry_their_values_and_intervals() {
        let pinned = Row::bar("pinned", Some(160.0), Color::Compute).interval(150.0, 200.0);
        let rows = [
            Row { heading: "16 Gbit/s".into(), ..pinned },
            Row::bar("failed", None, Color::Compute),
        ];
        let of = Rows::new(Shown::Bars, "images/s", rows);
        let drawn = svg(&of, 760.0);
        for part in [">160 images/s<", ">16 Gbit/s<", "(150 to 200)", ">no value<"] {
            assert!(drawn.contains(part), "{part}: {drawn}");
        }
        assert_eq!(drawn.matches("stroke=\"var(--text)\"").count(), 3, "a line and its two ends");
        assert_eq!(RowLayout::new(&of, 760.0, false).scale.position(200.0), 1.0);
    }
}
