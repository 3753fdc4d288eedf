//! Draws the lines of a chart with their colors, dashes and markers.
//!
//! A series and the positions of its points in pixels go in. This file does not know the axes.

use plotters::element::{PathElement, Polygon};
use plotters::prelude::*;

use super::chart::{Series, Stroke};
use super::draw::{Area, Outcome};

/// The palette of Okabe and Ito, whose colors people with any color vision can tell apart. Its yellow is left
/// out, because it is too pale for a line on white. Charts with few lines use the first colors.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(0, 0, 0),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
];

fn color(series: &Series) -> RGBColor {
    COLOURS[series.look % COLOURS.len()]
}

/// Whether all points lie at one place, so that there is no line through them.
pub(super) fn is_point(points: &[(f64, f64)]) -> bool {
    points.split_first().is_some_and(|(first, rest)| rest.iter().all(|point| point == first))
}

/// Draws a line with its markers. A single point is a marker, whatever the stroke.
pub(super) fn line<DB: DrawingBackend>(
    area: &Area<DB>,
    series: &Series,
    pixels: &[(f64, f64)],
    k: i32,
) -> Outcome<DB> {
    let place = |&(x, y): &(f64, f64)| (x.round() as i32, y.round() as i32);
    if is_point(pixels) {
        return pixels.first().map_or(Ok(()), |at| marker(area, series, place(at), k));
    }
    stroke(area, series, pixels, k)?;
    if series.stroke == Stroke::Dotted {
        return Ok(());
    }
    pixels.iter().try_for_each(|at| marker(area, series, place(at), k))
}

/// Draws a piece of a line for the legend. The sample of a single point is its marker alone.
pub(super) fn sample<DB: DrawingBackend>(
    area: &Area<DB>,
    series: &Series,
    ends: [(f64, f64); 2],
    is_point: bool,
    k: i32,
) -> Outcome<DB> {
    if !is_point {
        stroke(area, series, &ends, k)?;
    }
    if !is_point && series.stroke == Stroke::Dotted {
        return Ok(());
    }
    let [(from, y), (to, _)] = ends;
    marker(area, series, (((from + to) / 2.0).round() as i32, y.round() as i32), k)
}

/// Draws a line without its markers.
fn stroke<DB: DrawingBackend>(
    area: &Area<DB>,
    series: &Series,
    pixels: &[(f64, f64)],
    k: i32,
) -> Outcome<DB> {
    let (on, off, width) = match series.stroke {
        Stroke::Solid => (f64::INFINITY, 0.0, 3),
        Stroke::Dashed => (11.0, 7.0, 3),
        Stroke::Dotted => (2.5, 4.5, 2),
    };
    let style = color(series).stroke_width((width * k) as u32);
    for dash in dashes(pixels, on * f64::from(k), off * f64::from(k)) {
        let dash: Vec<(i32, i32)> =
            dash.iter().map(|(x, y)| (x.round() as i32, y.round() as i32)).collect();
        area.draw(&PathElement::new(dash, style))?;
    }
    Ok(())
}

/// A vertical bar with a short line across each of its ends.
pub(super) fn range<DB: DrawingBackend>(
    area: &Area<DB>,
    series: &Series,
    ends: [(f64, f64); 2],
    k: i32,
) -> Outcome<DB> {
    let style = color(series).stroke_width(k as u32);
    let [(x, low), (_, high)] = ends.map(|(x, y)| (x.round() as i32, y.round() as i32));
    area.draw(&PathElement::new(vec![(x, low), (x, high)], style))?;
    for y in [low, high] {
        area.draw(&PathElement::new(vec![(x - 5 * k, y), (x + 5 * k, y)], style))?;
    }
    Ok(())
}

/// Cuts a line into pieces of length `on`, `off` apart. A piece bends with the line.
fn dashes(pixels: &[(f64, f64)], on: f64, off: f64) -> Vec<Vec<(f64, f64)>> {
    let mut all = Vec::new();
    let mut dash: Vec<(f64, f64)> = pixels.first().copied().into_iter().collect();
    let (mut is_on, mut left) = (true, on);
    for ends in pixels.windows(2) {
        let (mut from, to) = (ends[0], ends[1]);
        loop {
            let length = (to.0 - from.0).hypot(to.1 - from.1);
            if length < left {
                left -= length;
                break;
            }
            let part = left / length.max(f64::MIN_POSITIVE);
            from = (from.0 + part * (to.0 - from.0), from.1 + part * (to.1 - from.1));
            if is_on {
                dash.push(from);
                all.push(std::mem::take(&mut dash));
            } else {
                dash = vec![from];
            }
            (is_on, left) = (!is_on, if is_on { off } else { on });
        }
        if is_on {
            dash.push(to);
        }
    }
    if dash.len() > 1 {
        all.push(dash);
    }
    all
}

/// Draws a marker in the series' own shape, so that lines can be told apart without color too.
fn marker<DB: DrawingBackend>(
    area: &Area<DB>,
    series: &Series,
    (x, y): (i32, i32),
    k: i32,
) -> Outcome<DB> {
    // Corners in units of the marker's radius. The shapes have different radii in order to look equally
    // large.
    let regular = |corners: usize, turn: f64, radius: f64| -> Vec<(f64, f64)> {
        let angle = |at| (at as f64 / corners as f64 + turn) * std::f64::consts::TAU;
        (0..corners).map(|at| (radius * angle(at).sin(), -radius * angle(at).cos())).collect()
    };
    let shape = match series.look % 6 {
        0 => regular(32, 0.0, 1.0),
        1 => regular(4, 0.125, 1.25),
        2 => regular(3, 0.0, 1.4),
        3 => regular(4, 0.0, 1.35),
        4 => regular(3, 0.5, 1.4),
        _ => regular(5, 0.0, 1.2),
    };
    let scaled = |radius: f64| -> Vec<(i32, i32)> {
        let radius = radius * f64::from(k);
        let place = |(dx, dy): &(f64, f64)| {
            (x + (dx * radius).round() as i32, y + (dy * radius).round() as i32)
        };
        shape.iter().map(place).collect()
    };
    match series.stroke {
        Stroke::Solid => area.draw(&Polygon::new(scaled(6.0), color(series).filled())),
        Stroke::Dashed => {
            area.draw(&Polygon::new(scaled(7.0), color(series).filled()))?;
            area.draw(&Polygon::new(scaled(4.0), WHITE.filled()))
        }
        Stroke::Dotted => area.draw(&Polygon::new(scaled(4.0), color(series).filled())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dashes_have_their_length_and_bend() {
        let corner = [(0.0, 0.0), (3.0, 0.0), (3.0, 4.0)];
        assert_eq!(dashes(&corner, f64::INFINITY, 0.0), [corner.to_vec()]);
        let cut = dashes(&corner, 4.0, 1.0);
        let first = vec![(0.0, 0.0), (3.0, 0.0), (3.0, 1.0)];
        assert_eq!(cut, [first, vec![(3.0, 2.0), (3.0, 4.0)]]);
        assert!(dashes(&[(1.0, 1.0)], 4.0, 1.0).is_empty());
    }
}
