//! Lines over a time scale, drawn as steps: a value holds until the next one.

use maud::Markup;

use super::color::PageColor;
use super::scale::{tick_count, tick_labels, ticks};
use super::words::{SMALL, width_of};
use crate::canvas::{Align, Canvas};

/// A line.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// Its color.
    pub color: PageColor,
    /// Times and values, in order of time.
    pub points: Vec<(f64, f64)>,
}

/// Lines over one time scale. Both axes begin at zero.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lines {
    /// The unit of the times.
    pub x_unit: String,
    /// The unit of the values.
    pub y_unit: String,
    /// The lines; later ones lie above earlier ones.
    pub lines: Vec<Line>,
}

const HEIGHT: f64 = 250.0;
const TOP: f64 = 10.0;
/// From the middle of a marker to its corners.
const RADIUS: f64 = 5.0;
/// The most columns of points, over all lines together; [`thinned`] keeps up to four points per column.
const POINTS: usize = 3000;

impl Lines {
    /// Names and colors of all lines, in order of appearance.
    pub fn legend(&self) -> Vec<(String, PageColor)> {
        self.lines.iter().map(|line| (line.name.clone(), line.color)).collect()
    }

    /// The `<svg>` element, `width` pixels wide.
    pub fn svg(&self, width: i32, title: &str) -> Markup {
        let mut canvas = Canvas::new(f64::from(width), HEIGHT + 24.0);
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let x_end = points().map(|point| point.0).fold(0.0, f64::max);
        let y_end = 1.06 * points().map(|point| point.1).fold(0.0, f64::max);
        let y_ticks = ticks(y_end, 5.0);
        let y_labels = tick_labels(&y_ticks, &self.y_unit);
        let widths = y_labels.iter().map(|label| width_of(label, SMALL));
        let left = widths.fold(0.0, f64::max) + 12.0;
        let right = f64::from(width) - 30.0;
        let per = |length: f64, end: f64| if end > 0.0 { length / end } else { 0.0 };
        let (x_scale, y_scale) = (per(right - left, x_end), per(HEIGHT - TOP, y_end));
        let place = |(x, y): (f64, f64)| (left + x.max(0.0) * x_scale, HEIGHT - y * y_scale);
        for (tick, label) in y_ticks.iter().zip(&y_labels) {
            let y = HEIGHT - tick * y_scale;
            canvas.line(&[(left, y), (right, y)], 1.0, PageColor::Grid, "");
            canvas.text(label, (left - 6.0, y), SMALL, PageColor::Muted, Align::Right);
        }
        let x_ticks = ticks(x_end, tick_count(right - left));
        for (tick, label) in x_ticks.iter().zip(tick_labels(&x_ticks, &self.x_unit)) {
            let x = left + tick * x_scale;
            canvas.text(&label, (x, HEIGHT + 13.0), SMALL, PageColor::Muted, Align::Middle);
        }
        // All lines together get about as many points as a single line would get: with many lines, details
        // cannot be distinguished anyway.
        let columns = (POINTS / self.lines.len().max(1)).clamp(25, (right - left) as usize);
        for line in &self.lines {
            let kept = thinned(&line.points, x_end, columns);
            let mut path = Vec::with_capacity(2 * kept.len());
            let mut last: Option<f64> = None;
            for (x, y) in kept {
                path.extend(last.map(|before| place((x, before))));
                path.push(place((x, y)));
                last = Some(y);
            }
            path.extend(last.map(|y| place((x_end, y))));
            if let [(x, y)] = line.points[..] {
                let hover = format!("{}: {y} {} at {x} {}", line.name, self.y_unit, self.x_unit);
                canvas.polygon(&diamond(place((x, y))), line.color, &hover);
                continue;
            }
            let peak = line.points.iter().map(|point| point.1).fold(0.0, f64::max);
            let hover = format!("{}: {peak} {} at most", line.name, self.y_unit);
            if path.len() > 1 {
                canvas.line(&path, 1.6, line.color, &hover);
            }
        }
        canvas.element(title)
    }
}

/// The marker of a single point, through which no line can be drawn.
fn diamond((x, y): (f64, f64)) -> [(f64, f64); 4] {
    [(x, y - RADIUS), (x + RADIUS, y), (x, y + RADIUS), (x - RADIUS, y)]
}

/// Keeps, within each of `pixels` columns, only the first, the smallest, the largest and the last point, in
/// order. The drawing looks the same, and a report of a million samples stays small.
fn thinned(points: &[(f64, f64)], end: f64, pixels: usize) -> Vec<(f64, f64)> {
    if points.len() <= 4 * pixels || end <= 0.0 {
        return points.to_vec();
    }
    let column = |x: f64| (x / end * pixels as f64) as usize;
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

    #[test]
    fn a_single_point_is_a_marker_and_no_line() {
        let line = |points: &[(f64, f64)]| Line {
            name: "cpu".into(),
            color: PageColor::Series(0),
            points: points.to_vec(),
        };
        let svg = |lines: Vec<Line>| {
            let lines = Lines { x_unit: "ms".into(), y_unit: "MB".into(), lines };
            lines.svg(540, "memory").0
        };
        let drawn = "stroke=\"var(--series-0)\"";
        let one = svg(vec![line(&[(3.0, 7.0)])]);
        assert!(one.contains("<title>cpu: 7 MB at 3 ms</title><polygon"), "{one}");
        assert!(!one.contains(drawn), "{one}");
        let two = svg(vec![line(&[(3.0, 7.0), (4.0, 2.0)])]);
        assert!(two.contains(drawn) && !two.contains("<polygon"), "{two}");
    }

    #[test]
    fn thinning_keeps_the_extremes() {
        let wave = |at: u32| if at == 5000 { 9.0 } else { f64::from(at % 7) };
        let points: Vec<_> = (0..100_000).map(|at| (f64::from(at), wave(at))).collect();
        let kept = thinned(&points, 99_999.0, 100);
        assert!(kept.len() <= 404, "{}", kept.len());
        assert!(kept.contains(&(5000.0, 9.0)));
        assert!(kept.is_sorted_by(|a, b| a.0 <= b.0));
        assert_eq!(thinned(&points[..50], 49.0, 100), points[..50]);
    }
}
