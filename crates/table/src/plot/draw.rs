//! Draws a line chart.
//!
//! A chart goes in, and is drawn on a white surface. The legend has its own column at the right, so that it never covers a
//! line. This file does not know whether the surface is an SVG or a bitmap.

use super::axis::Scale;
use super::bitmap::Font;
use super::chart::{LineChart, SIZE, Series};
use super::legend::Legend;
use super::line::{is_point, line, range};
use crate::canvas::{Align, Point};

/// Red, green and blue.
pub(super) type Color = [u8; 3];

/// The surface on which a chart is drawn. Lengths are pixels.
pub trait Surface {
    /// Fills a shape.
    fn fill(&mut self, corners: &[Point], color: Color);

    /// Draws a line through all points. `dashes` are the lengths of a dash and of the gap after it.
    fn stroke(&mut self, points: &[Point], width: f64, color: Color, dashes: Option<[f64; 2]>);

    /// Draws text that is vertically centered at `at`.
    fn write(&mut self, words: &str, at: Point, size: f64, color: Color, align: Align);
}

pub(super) const WHITE: Color = [255; 3];
pub(super) const TEXT_COLOR: Color = [40; 3];
const GRAY: Color = [110; 3];
const GRID: Color = [214; 3];
const FAINT: Color = [238; 3];

const TITLE: f64 = 27.0;
const LABEL: f64 = 20.0;
pub(super) const SMALL: f64 = 17.0;

const WIDTH: f64 = SIZE.0 as f64;
const HEIGHT: f64 = SIZE.1 as f64;

/// Edges of the plot area in pixels. The width of the legend decides the right edge.
const LEFT: f64 = 120.0;
const TOP: f64 = 92.0;
const BOTTOM: f64 = HEIGHT - 92.0;

/// The distance from the texts to the edges of the picture.
const MARGIN: f64 = 14.0;

/// Draws `chart`.
pub(super) fn chart(surface: &mut dyn Surface, chart: &LineChart, font: &Font) {
    let legend = Legend::new(&chart.series, BOTTOM - TOP, |words| font.width(words, SMALL));
    let right = WIDTH - MARGIN - legend.width();
    let points = || {
        let of_series =
            |series| chart.drawable(series).chain(chart.drawable_ranges(series).flatten());
        chart.series.iter().flat_map(of_series)
    };
    let field = Field {
        x: Scale::new(chart.x.spacing, points().map(|(x, _)| x)),
        y: Scale::new(chart.y.spacing, points().map(|(_, y)| y)),
        right,
    };
    field.grid(surface, chart, font);
    for series in &chart.series {
        let pixels: Vec<Point> = chart.drawable(series).map(|point| field.pixel(point)).collect();
        for ends in chart.drawable_ranges(series) {
            range(surface, series, ends.map(|end| field.pixel(end)));
        }
        line(surface, series, &pixels);
    }
    let is_point = |series: &Series| is_point(&chart.drawable(series).collect::<Vec<_>>());
    legend.draw(surface, (right, TOP), is_point);
}

/// The plot area and its scales, which map values to pixels.
struct Field {
    x: Scale,
    y: Scale,
    right: f64,
}

impl Field {
    fn pixel(&self, (x, y): (f64, f64)) -> Point {
        (self.x_pixel(x), self.y_pixel(y))
    }

    fn x_pixel(&self, value: f64) -> f64 {
        LEFT + self.x.position(value) * (self.right - LEFT)
    }

    fn y_pixel(&self, value: f64) -> f64 {
        BOTTOM - self.y.position(value) * (BOTTOM - TOP)
    }

    /// Draws everything but the lines and the legend.
    fn grid(&self, surface: &mut dyn Surface, chart: &LineChart, font: &Font) {
        let right = self.right;
        let middle = ((LEFT + right) / 2.0, (TOP + BOTTOM) / 2.0);
        for (ticks, color) in [(&self.x.minor, FAINT), (&self.x.major, GRID)] {
            for x in ticks.iter().map(|&tick| self.x_pixel(tick)) {
                surface.stroke(&[(x, TOP), (x, BOTTOM)], 1.0, color, None);
            }
        }
        for (ticks, color) in [(&self.y.minor, FAINT), (&self.y.major, GRID)] {
            for y in ticks.iter().map(|&tick| self.y_pixel(tick)) {
                surface.stroke(&[(LEFT, y), (right, y)], 1.0, color, None);
            }
        }
        let corners = [(LEFT, TOP), (right, TOP), (right, BOTTOM), (LEFT, BOTTOM), (LEFT, TOP)];
        surface.stroke(&corners, 1.0, GRAY, None);
        for &tick in &self.x.major {
            let place = (self.x_pixel(tick), BOTTOM + 17.0);
            surface.write(&chart.x.unit.tick(tick), place, SMALL, TEXT_COLOR, Align::Middle);
        }
        for &tick in &self.y.major {
            let place = (LEFT - 10.0, self.y_pixel(tick));
            surface.write(&chart.y.unit.tick(tick), place, SMALL, TEXT_COLOR, Align::Right);
        }
        let fitting = |words: &str, largest: f64, room: f64| {
            largest * (room / font.width(words, largest)).min(1.0)
        };
        for (words, y, largest, color) in
            [(&chart.title, 32.0, TITLE, TEXT_COLOR), (&chart.subtitle, 66.0, SMALL, GRAY)]
        {
            let size = fitting(words, largest, WIDTH - LEFT - MARGIN);
            surface.write(words, (LEFT, y), size, color, Align::Left);
        }
        let label = format!("{}{}", chart.x.label, chart.x.unit.suffix());
        let size = fitting(&label, LABEL, middle.0 * 2.0 - MARGIN);
        surface.write(&label, (middle.0, BOTTOM + 54.0), size, TEXT_COLOR, Align::Middle);
        let label = format!("{}{}", chart.y.label, chart.y.unit.suffix());
        let size = fitting(&label, LABEL, TOP + BOTTOM - MARGIN);
        surface.write(&label, (26.0, middle.1), size, TEXT_COLOR, Align::Rising);
    }
}
