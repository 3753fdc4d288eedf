//! A line chart: its axes and its series. Nothing here draws.

use super::axis::Unit;

/// Width and height of a chart in pixels.
pub const SIZE: (u32, u32) = (1200, 800);

/// How values are spaced along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spacing {
    /// Equal lengths are equal factors. Shows positive values.
    Logarithmic,
    /// Equal lengths are equal differences, from zero on. Shows values that are not negative.
    Linear,
}

impl Spacing {
    pub(super) fn shows(self, value: f64) -> bool {
        let enough = match self {
            Spacing::Logarithmic => value > 0.0,
            Spacing::Linear => value >= 0.0,
        };
        enough && value.is_finite()
    }
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// The quantity that it shows, without the unit.
    pub label: String,
    /// Unit of the values, which decides how ticks are written.
    pub unit: Unit,
    /// How its values are spaced.
    pub spacing: Spacing,
}

impl Axis {
    /// An axis on which equal lengths are equal differences.
    pub fn linear(label: impl Into<String>, unit: Unit) -> Self {
        Self { label: label.into(), unit, spacing: Spacing::Linear }
    }

    /// An axis on which equal lengths are equal factors.
    pub fn logarithmic(label: impl Into<String>, unit: Unit) -> Self {
        Self { label: label.into(), unit, spacing: Spacing::Logarithmic }
    }
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stroke {
    /// A solid line with filled markers: measured values.
    Solid,
    /// A dashed line with hollow markers: values to compare with.
    Dashed,
    /// A dotted line without markers: predicted values.
    Dotted,
}

/// A named line of points.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points, in the order in which they are joined. Those that have no place on the axes (see
    /// [`Spacing`]) are left out.
    pub points: Vec<(f64, f64)>,
    /// Vertical bars beside the line: a place on the horizontal axis, and the values between which a bar
    /// reaches. They show the spread of the values whose medians are the points.
    pub ranges: Vec<(f64, f64, f64)>,
    /// How the line is drawn.
    pub stroke: Stroke,
    /// The number of the color and the marker. Lines that belong together share it.
    pub look: usize,
}

impl Series {
    /// A solid line through `points`, in the first look and without ranges.
    pub fn line(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self {
            name: name.into(),
            points: points.into_iter().collect(),
            ranges: Vec::new(),
            stroke: Stroke::Solid,
            look: 0,
        }
    }

    /// The series with this stroke.
    pub fn stroke(self, stroke: Stroke) -> Self {
        Self { stroke, ..self }
    }

    /// The series with this color and marker.
    pub fn look(self, look: usize) -> Self {
        Self { look, ..self }
    }

    /// The series with these vertical bars.
    pub fn ranges(self, ranges: impl IntoIterator<Item = (f64, f64, f64)>) -> Self {
        Self { ranges: ranges.into_iter().collect(), ..self }
    }
}

/// A chart of lines.
#[derive(Clone, Debug)]
pub struct LineChart {
    /// Title.
    pub title: String,
    /// A smaller line below the title: where and when it was measured. May be empty.
    pub subtitle: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines, in the order of the legend.
    pub series: Vec<Series>,
}

impl LineChart {
    /// The points of a series that can be drawn.
    pub(super) fn drawable<'a>(
        &self,
        series: &'a Series,
    ) -> impl Iterator<Item = (f64, f64)> + use<'a> {
        let (x_axis, y_axis) = (self.x.spacing, self.y.spacing);
        series.points.iter().copied().filter(move |&(x, y)| x_axis.shows(x) && y_axis.shows(y))
    }

    /// The lower and the upper ends of the ranges of a series that can be drawn.
    pub(super) fn drawable_ranges<'a>(
        &self,
        series: &'a Series,
    ) -> impl Iterator<Item = [(f64, f64); 2]> + use<'a> {
        let (x_axis, y_axis) = (self.x.spacing, self.y.spacing);
        let is_shown =
            move |&(x, low, high): &_| x_axis.shows(x) && y_axis.shows(low) && y_axis.shows(high);
        let ends = |(x, low, high)| [(x, low), (x, high)];
        series.ranges.iter().copied().filter(is_shown).map(ends)
    }
}
