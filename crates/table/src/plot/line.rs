//! Draws the lines of a chart with their colors, dashes and markers.
//!
//! A series and the positions of its points in pixels go in. This file does not know the axes.

use super::chart::{Series, Stroke};
use super::draw::{Color, Surface, WHITE};
use crate::canvas::Point;

/// The palette of Okabe and Ito, whose colors people with any color vision can distinguish. Its yellow is left
/// out, because it is too pale for a line on white. Charts with few lines use the first colors.
pub(super) const COLORS: [Color; 7] = [
    [0, 114, 178],
    [213, 94, 0],
    [0, 158, 115],
    [204, 121, 167],
    [0, 0, 0],
    [86, 180, 233],
    [230, 159, 0],
];

fn color(series: &Series) -> Color {
    COLORS[series.look % COLORS.len()]
}

/// Whether all points lie at one place, so that there is no line through them.
pub(super) fn is_point(points: &[(f64, f64)]) -> bool {
    points.split_first().is_some_and(|(first, rest)| rest.iter().all(|point| point == first))
}

/// Draws a line with its markers. A single point is a marker, whatever the stroke.
pub(super) fn line(surface: &mut dyn Surface, series: &Series, pixels: &[Point]) {
    if is_point(pixels) {
        return pixels[..1].iter().for_each(|&at| marker(surface, series, at));
    }
    stroke(surface, series, pixels);
    if series.stroke != Stroke::Dotted {
        pixels.iter().for_each(|&at| marker(surface, series, at));
    }
}

/// Draws a piece of a line for the legend. The sample of a single point is its marker alone.
pub(super) fn sample(surface: &mut dyn Surface, series: &Series, ends: [Point; 2], is_point: bool) {
    if !is_point {
        stroke(surface, series, &ends);
    }
    if is_point || series.stroke != Stroke::Dotted {
        let [(from, y), (to, _)] = ends;
        marker(surface, series, ((from + to) / 2.0, y));
    }
}

/// Draws a line without its markers.
fn stroke(surface: &mut dyn Surface, series: &Series, pixels: &[Point]) {
    let (width, dashes) = match series.stroke {
        Stroke::Solid => (3.0, None),
        Stroke::Dashed => (3.0, Some([11.0, 7.0])),
        Stroke::Dotted => (2.0, Some([2.5, 4.5])),
    };
    surface.stroke(pixels, width, color(series), dashes);
}

/// A vertical bar with a short line across each of its ends.
pub(super) fn range(surface: &mut dyn Surface, series: &Series, ends: [Point; 2]) {
    surface.stroke(&ends, 1.0, color(series), None);
    for (x, y) in ends {
        surface.stroke(&[(x - 5.0, y), (x + 5.0, y)], 1.0, color(series), None);
    }
}

/// Draws a marker in the series' own shape, so that lines can be distinguished without color too.
fn marker(surface: &mut dyn Surface, series: &Series, (x, y): Point) {
    // The shapes have different radii in order to look equally large.
    let (corners, turn, size) = match series.look % 6 {
        0 => (32, 0.0, 1.0),
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
        surface.fill(&(0..corners).map(corner).collect::<Vec<_>>(), color);
    };
    match series.stroke {
        Stroke::Solid => shape(6.0, color(series)),
        Stroke::Dashed => {
            shape(7.0, color(series));
            shape(4.0, WHITE);
        }
        Stroke::Dotted => shape(4.0, color(series)),
    }
}
