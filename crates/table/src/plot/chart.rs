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
    /// What it shows, without the unit.
    pub label: String,
    /// Unit of the values, which decides how ticks are written.
    pub unit: Unit,
    /// How its values are spaced.
    pub spacing: Spacing,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stroke {
    /// A solid line with filled markers: what was measured.
    Solid,
    /// A dashed line with hollow markers: what is compared with it.
    Dashed,
    /// A dotted line without markers: what was predicted.
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
    /// reaches. They show the spread of what the points are medians of.
    pub ranges: Vec<(f64, f64, f64)>,
    /// How the line is drawn.
    pub stroke: Stroke,
    /// The number of the color and the marker. Lines that belong together share it.
    pub look: usize,
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
