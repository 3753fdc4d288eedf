//! Lines over two axes, with the intervals of their points.

use super::axis::{Axis, Scale};
use super::canvas::{Align, Canvas, Font, Point};
use super::color::Color;
use super::legend::legend;
use super::words::{SIZE, SMALL, fitted, width_of};

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stroke {
    /// A solid line with filled markers: measured values.
    Solid,
    /// A dashed line with hollow markers: values to compare with.
    Dashed,
    /// A dotted line without markers: predicted values.
    Dotted,
    /// Steps without markers: each value holds until the next one.
    Steps,
}

/// A named line of points.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points, in order. Those without a position on the axes are left out.
    pub points: Vec<(f64, f64)>,
    /// Ranges or confidence intervals: horizontal position, low end, high end.
    pub intervals: Vec<(f64, f64, f64)>,
    /// How the line is drawn.
    pub stroke: Stroke,
    /// The number of color and marker, shared by lines that belong together.
    pub look: usize,
}

impl Series {
    /// A solid line in the first look, without intervals.
    pub fn line(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let points = points.into_iter().collect();
        Self { name: name.into(), points, intervals: Vec::new(), stroke: Stroke::Solid, look: 0 }
    }

    /// The series with this stroke.
    pub fn stroke(self, stroke: Stroke) -> Self {
        Self { stroke, ..self }
    }

    /// The series with this color and marker.
    pub fn look(self, look: usize) -> Self {
        Self { look, ..self }
    }

    /// The series with these intervals.
    pub fn intervals(self, intervals: impl IntoIterator<Item = (f64, f64, f64)>) -> Self {
        Self { intervals: intervals.into_iter().collect(), ..self }
    }

    fn color(&self) -> Color {
        Color::Series(self.look)
    }

    fn has_markers(&self) -> bool {
        matches!(self.stroke, Stroke::Solid | Stroke::Dashed)
    }

    /// Draws the line without its markers.
    fn stroke_through(&self, canvas: &mut Canvas, points: &[Point], hover: &str) {
        let form = match self.stroke {
            Stroke::Solid => (2.0, None),
            Stroke::Dashed => (2.0, Some([7.0, 5.0])),
            Stroke::Dotted => (1.5, Some([2.0, 3.0])),
            Stroke::Steps => (1.6, None),
        };
        canvas.dashed_line(points, form, self.color(), hover);
    }

    /// Draws a marker in the series' own shape, to tell lines apart without color.
    fn marker(&self, canvas: &mut Canvas, (x, y): Point, hover: &str) {
        // Different radii make the shapes look equally large.
        let (corners, turn, size) = match self.look % 6 {
            0 => (24, 0.0, 1.0),
            1 => (4, 0.125, 1.25),
            2 => (3, 0.0, 1.4),
            3 => (4, 0.0, 1.35),
            4 => (3, 0.5, 1.4),
            _ => (5, 0.0, 1.2),
        };
        let mut shape = |radius: f64, color: Color| {
            let angle = |at| (f64::from(at) / f64::from(corners) + turn) * std::f64::consts::TAU;
            let corner =
                |at| (x + size * radius * angle(at).sin(), y - size * radius * angle(at).cos());
            canvas.polygon(&(0..corners).map(corner).collect::<Vec<_>>(), color, hover);
        };
        shape(4.0, self.color());
        if self.stroke == Stroke::Dashed {
            shape(2.4, Color::Card);
        }
    }
}

/// Lines over two axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lines {
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines, in the order of the legend; later ones lie above earlier ones.
    pub series: Vec<Series>,
}

/// From the left edge of a sample in the legend to its name, and the sample's length.
const SAMPLE: f64 = 30.0;
const SAMPLE_LINE: f64 = 24.0;
/// The most columns of points of all lines; [`thinned`] keeps up to four points of each.
const POINTS: usize = 3000;

impl Lines {
    /// The points with a position on the axes. Steps go down to zero at a negative value; otherwise the value before would
    /// seem to hold.
    fn shown(&self, series: &Series) -> Vec<Point> {
        let is_low = |y: f64| y < 0.0 && series.stroke == Stroke::Steps;
        let points = series.points.iter().map(|&(x, y)| (x, if is_low(y) { 0.0 } else { y }));
        let is_shown = |&(x, y): &Point| self.x.spacing.shows(x) && self.y.spacing.shows(y);
        points.filter(is_shown).collect()
    }

    /// The ends of the intervals with a position on the axes.
    fn ends(&self, series: &Series) -> Vec<[Point; 2]> {
        let is_shown = |&(x, low, high): &(f64, f64, f64)| {
            let y = self.y.spacing;
            self.x.spacing.shows(x) && y.shows(low) && y.shows(high)
        };
        let all = series.intervals.iter().copied().filter(is_shown);
        all.map(|(x, low, high)| [(x, low), (x, high)]).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.series.iter().all(|series| self.shown(series).is_empty())
    }

    /// Draws the chart from `top` on, and returns its lower edge.
    pub(super) fn draw(&self, canvas: &mut Canvas, top: f64, height: f64) -> f64 {
        let all = self.series.iter().map(|series| (series, self.shown(series)));
        let drawn: Vec<_> = all.filter(|(_, points)| !points.is_empty()).collect();
        let entries: Vec<_> = drawn.iter().map(|of| (of.0.name.as_str(), of)).collect();
        let top = legend(canvas, &entries, (top, SAMPLE), |canvas, (x, y), (series, points)| {
            if !is_point(points) {
                series.stroke_through(canvas, &[(x, y), (x + SAMPLE_LINE, y)], "");
            }
            if is_point(points) || series.has_markers() {
                series.marker(canvas, (x + SAMPLE_LINE / 2.0, y), "");
            }
        });
        let ends = drawn.iter().flat_map(|(series, _)| self.ends(series)).flatten();
        let places = drawn.iter().flat_map(|(_, points)| points).copied().chain(ends).collect();
        let field = PlotArea::new(self, canvas.width, (top + 8.0, top + height), places);
        field.grid(canvas, self);
        for (series, points) in &drawn {
            for ends in self.ends(series) {
                interval(canvas, ends.map(|end| field.place(end)), series.color());
            }
            field.line(canvas, self, series, points);
        }
        field.bottom + if self.x.label.is_empty() { 24.0 } else { 42.0 }
    }
}

/// Whether all points are equal.
fn is_point(points: &[Point]) -> bool {
    points.iter().all(|point| *point == points[0])
}

/// A line between two ends, with a short line across each of them.
pub(super) fn interval(canvas: &mut Canvas, ends: [Point; 2], color: Color) {
    canvas.line(&ends, 1.0, color, "");
    let across = if ends[0].0 == ends[1].0 { (3.5, 0.0) } else { (0.0, 3.5) };
    for (x, y) in ends {
        let line = [(x - across.0, y - across.1), (x + across.0, y + across.1)];
        canvas.line(&line, 1.0, color, "");
    }
}

/// The area of the lines, and the scales that map values to pixels.
struct PlotArea {
    x: Scale,
    y: Scale,
    y_labels: Vec<String>,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl PlotArea {
    fn new(of: &Lines, width: f64, (top, bottom): (f64, f64), points: Vec<Point>) -> Self {
        let y = Scale::new(of.y.spacing, points.iter().map(|point| point.1), bottom - top);
        let y_labels = y.labels(of.y.unit);
        let widths = y_labels.iter().map(|label| width_of(label, SMALL));
        let left = widths.fold(0.0, f64::max) + if of.y.label.is_empty() { 12.0 } else { 30.0 };
        let right = width - 30.0;
        let x = Scale::new(of.x.spacing, points.iter().map(|point| point.0), right - left);
        Self { x, y, y_labels, left, right, top, bottom }
    }

    fn place(&self, (x, y): Point) -> Point {
        (
            self.left + self.x.position(x) * (self.right - self.left),
            self.bottom - self.y.position(y) * (self.bottom - self.top),
        )
    }

    fn grid(&self, canvas: &mut Canvas, of: &Lines) {
        let Self { left, right, top, bottom, .. } = *self;
        let at_x = |tick: f64| left + self.x.position(tick) * (right - left);
        let at_y = |tick: f64| bottom - self.y.position(tick) * (bottom - top);
        let (x, y) = (&self.x, &self.y);
        for (xs, ys, color) in
            [(&x.minor, &y.minor, Color::Track), (&x.major, &y.major, Color::Grid)]
        {
            let upright = xs.iter().map(|&tick| [(at_x(tick), top), (at_x(tick), bottom)]);
            let level = ys.iter().map(|&tick| [(left, at_y(tick)), (right, at_y(tick))]);
            upright.chain(level).for_each(|line| canvas.line(&line, 1.0, color, ""));
        }
        let font = |align| Font(SMALL, Color::Muted, align);
        for (&tick, label) in self.y.major.iter().zip(&self.y_labels) {
            canvas.text(label, (left - 6.0, at_y(tick)), font(Align::Right), "");
        }
        let mut free = 0.0;
        for (&tick, label) in self.x.major.iter().zip(self.x.labels(of.x.unit)) {
            let (x, half) = (at_x(tick), width_of(&label, SMALL) / 2.0);
            // A label that would touch the one before it is left out.
            if x - half >= free {
                canvas.text(&label, (x, bottom + 13.0), font(Align::Middle), "");
                free = x + half + 6.0;
            }
        }
        let (center, middle) = ((left + right) / 2.0, (top + bottom) / 2.0);
        for (label, room, at, align) in [
            (&of.x.label, canvas.width, (center, bottom + 31.0), Align::Middle),
            (&of.y.label, bottom - top, (9.0, middle), Align::Rising),
        ] {
            let font = Font(SIZE, Color::Text, align);
            canvas.text(&fitted(label, SIZE, room), at, font, label);
        }
    }

    /// Draws a line with its markers. A single point is always a marker.
    fn line(&self, canvas: &mut Canvas, of: &Lines, series: &Series, points: &[Point]) {
        let (x_unit, y_unit) = (of.x.unit, of.y.unit);
        let hover = |&(x, y): &Point| format!("{}: {y} {y_unit} at {x} {x_unit}", series.name);
        if is_point(points) {
            return series.marker(canvas, self.place(points[0]), &hover(&points[0]));
        }
        let highest = points.iter().map(|point| point.1).fold(0.0, f64::max);
        let peak = format!("{}: {highest} {y_unit} at most", series.name);
        if series.stroke != Stroke::Steps {
            let pixels: Vec<Point> = points.iter().map(|point| self.place(*point)).collect();
            series.stroke_through(canvas, &pixels, &peak);
            let marked = points.iter().zip(pixels).filter(|_| series.has_markers());
            return marked.for_each(|(point, at)| series.marker(canvas, at, &hover(point)));
        }
        // All lines together get about as many points as a single one would: many lines hide details anyway.
        let columns = (POINTS / of.series.len()).clamp(25, (self.right - self.left) as usize);
        let mut path: Vec<Point> = Vec::new();
        for point in thinned(points, columns) {
            let (x, y) = self.place(point);
            path.extend(path.last().map(|before| (x, before.1)));
            path.push((x, y));
        }
        path.extend(path.last().map(|last| (self.right, last.1)));
        series.stroke_through(canvas, &path, &peak);
    }
}

/// Keeps only the first, smallest, largest and last point of each column. The drawing looks the same, and a report of a
/// million samples stays small.
fn thinned(points: &[Point], num_columns: usize) -> Vec<Point> {
    let end = points.iter().map(|point| point.0).fold(0.0, f64::max);
    if points.len() <= 4 * num_columns || end <= 0.0 {
        return points.to_vec();
    }
    let column = |x: f64| (x / end * num_columns as f64) as usize;
    let of_column = points.chunk_by(|a, b| column(a.0) == column(b.0));
    let kept = of_column.flat_map(|points| {
        let by_value = |a: &usize, b: &usize| points[*a].1.total_cmp(&points[*b].1);
        let least = (0..points.len()).min_by(by_value).unwrap_or(0);
        let greatest = (0..points.len()).max_by(by_value).unwrap_or(0);
        let mut all = vec![0, least, greatest, points.len() - 1];
        all.sort_unstable();
        all.dedup();
        all.into_iter().map(|at| points[at])
    });
    kept.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(points: &[Point], stroke: Stroke) -> Lines {
        let series = vec![Series::line("cpu", points.iter().copied()).stroke(stroke)];
        Lines { x: Axis::linear("", "ms"), y: Axis::linear("", "MB"), series }
    }

    fn svg(of: &Lines) -> String {
        let mut canvas = Canvas::new(540.0);
        of.draw(&mut canvas, 0.0, 250.0);
        canvas.element(300.0, "").0
    }

    #[test]
    fn a_single_point_is_a_marker_and_no_line() {
        let drawn = |points: &[Point], stroke| {
            let svg = svg(&lines(points, stroke));
            (svg.matches("<polygon").count(), svg.matches("stroke=\"var(--series-0)\"").count())
        };
        for stroke in [Stroke::Solid, Stroke::Dotted, Stroke::Steps] {
            assert_eq!(drawn(&[(8.0, 3.0)], stroke), (1, 0), "{stroke:?}");
            assert_eq!(drawn(&[(8.0, 3.0), (8.0, 3.0)], stroke), (1, 0), "{stroke:?}");
        }
        let two = [(8.0, 3.0), (9.0, 4.0)];
        assert_eq!(drawn(&two, Stroke::Solid), (2, 1));
        assert_eq!(drawn(&two, Stroke::Dashed), (4, 1), "hollow markers");
        assert_eq!((drawn(&two, Stroke::Dotted), drawn(&two, Stroke::Steps)), ((0, 1), (0, 1)));
        let one = svg(&lines(&[(3.0, 7.0)], Stroke::Steps));
        assert!(one.contains("<title>cpu: 7 MB at 3 ms</title><polygon"), "{one}");
    }

    #[test]
    fn zero_has_a_position_on_a_linear_axis_only() {
        let mut of = lines(&[(1.0, 0.0), (2.0, -1.0), (0.0, 5.0)], Stroke::Solid);
        of.x = Axis::logarithmic("", "");
        assert_eq!(of.shown(&of.series[0]), [(1.0, 0.0)]);
        of.y = Axis::logarithmic("", "");
        assert!(of.is_empty());
    }

    #[test]
    fn no_value_of_steps_holds_over_a_negative_one() {
        let points = [(1.0, 5.0), (2.0, -1.0), (3.0, f64::NAN), (4.0, 2.0)];
        let shown = |stroke| {
            let of = lines(&points, stroke);
            of.shown(&of.series[0])
        };
        assert_eq!(shown(Stroke::Steps), [(1.0, 5.0), (2.0, 0.0), (4.0, 2.0)]);
        assert_eq!(shown(Stroke::Solid), [(1.0, 5.0), (4.0, 2.0)]);
    }

    #[test]
    fn intervals_lie_within_the_axes() {
        let mut of = lines(&[(1.0, 5.0)], Stroke::Solid);
        of.y = Axis::logarithmic("", "");
        let without = svg(&of).matches("<polyline").count();
        of.series[0].intervals = vec![(1.0, 4.0, 9.0), (1.0, 0.0, 2.0)];
        let ends = of.ends(&of.series[0]);
        assert_eq!(ends, [[(1.0, 4.0), (1.0, 9.0)]], "zero has no position on this axis");
        assert!(svg(&of).matches("<polyline").count() >= without + 3, "a bar and its two ends");
    }

    #[test]
    fn thinning_keeps_the_extremes() {
        let wave = |at: u32| if at == 5000 { 9.0 } else { f64::from(at % 7) };
        let points: Vec<_> = (0..100_000).map(|at| (f64::from(at), wave(at))).collect();
        let kept = thinned(&points, 100);
        assert!(kept.len() <= 404, "{}", kept.len());
        assert!(kept.contains(&(5000.0, 9.0)));
        assert!(kept.is_sorted_by(|a, b| a.0 <= b.0));
        assert_eq!(thinned(&points[..50], 100), points[..50]);
    }
}
