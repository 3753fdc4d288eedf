//! A chart of rows of segments on one time scale.
//!
//! Rows go in; they are drawn on a white surface, which is as high as they need. Each kind of segment has a color, which the
//! legend names. This file does not know whether the surface is an SVG or a bitmap.

use super::axis::Scale;
use super::bitmap::Font;
use super::chart::{SIZE, Spacing};
use super::draw::{Color, SMALL, Surface, TEXT_COLOR, WHITE};
use super::line::COLORS;
use super::{Picture, PlotError};
use crate::canvas::{Align, Point};
use crate::chart::Lane;

/// Rows on one scale, from zero.
#[derive(Clone, Debug)]
pub struct LaneChart {
    /// The title.
    pub title: String,
    /// A line below the title.
    pub subtitle: String,
    /// The unit of the scale.
    pub unit: String,
    /// The rows, from top to bottom. The colors of a page do not matter here.
    pub lanes: Vec<Lane>,
}

const GRAY: Color = [110; 3];
const GRID: Color = [214; 3];
const MARGIN: f64 = 14.0;
/// Where the legend stands, and where the rows begin.
const LEGEND: f64 = 104.0;
const TOP: f64 = 136.0;
const ROW: f64 = 64.0;
const THICK: f64 = 40.0;
const SAMPLE: f64 = 18.0;
/// The room below the rows, for the scale.
const BELOW: f64 = 48.0;
const WIDTH: f64 = SIZE.0 as f64;

impl Picture for LaneChart {
    fn title(&self) -> &str {
        &self.title
    }

    fn size(&self) -> (u32, u32) {
        (SIZE.0, (TOP + ROW * self.lanes.len() as f64 + BELOW) as u32)
    }

    fn draw(&self, surface: &mut dyn Surface, font: &Font) -> Result<(), PlotError> {
        let segments = || self.lanes.iter().flat_map(|lane| &lane.segments);
        let end = segments().map(|segment| segment.end).fold(0.0, f64::max);
        if !(end > 0.0 && end.is_finite()) {
            return Err(PlotError::Empty { title: self.title.clone() });
        }
        for (words, y, most, color) in
            [(&self.title, 32.0, 27.0, TEXT_COLOR), (&self.subtitle, 66.0, SMALL, GRAY)]
        {
            let fitting = most * ((WIDTH - 2.0 * MARGIN) / font.width(words, most)).min(1.0);
            surface.write(words, (MARGIN, y), fitting, color, Align::Left);
        }
        let mut kinds: Vec<&str> = Vec::new();
        for segment in segments() {
            if !kinds.contains(&segment.kind.as_str()) {
                kinds.push(&segment.kind);
            }
        }
        let color = |kind: &str| {
            let at = kinds.iter().position(|known| *known == kind);
            COLORS[at.unwrap_or(0) % COLORS.len()]
        };
        let mut x = MARGIN;
        for kind in &kinds {
            fill(
                surface,
                (x, LEGEND - SAMPLE / 2.0),
                (x + SAMPLE, LEGEND + SAMPLE / 2.0),
                color(kind),
            );
            surface.write(kind, (x + SAMPLE + 8.0, LEGEND), SMALL, TEXT_COLOR, Align::Left);
            x += SAMPLE + 8.0 + font.width(kind, SMALL) + 24.0;
        }
        let labels = self.lanes.iter().map(|lane| font.width(&lane.label, SMALL));
        let left = MARGIN + labels.fold(0.0, f64::max) + 12.0;
        let right = WIDTH - MARGIN;
        let bottom = TOP + ROW * self.lanes.len() as f64;
        let scale = Scale::new(Spacing::Linear, [end].into_iter());
        let place = |value: f64| left + scale.position(value.max(0.0)) * (right - left);
        for &tick in &scale.major {
            surface.stroke(&[(place(tick), TOP), (place(tick), bottom)], 1.0, GRID, None);
            // A tick has one digit that counts, up to a rounding error.
            let words = format!("{} {}", (tick * 1e6).round() / 1e6, self.unit);
            surface.write(&words, (place(tick), bottom + 20.0), SMALL, TEXT_COLOR, Align::Middle);
        }
        for (at, lane) in self.lanes.iter().enumerate() {
            let middle = TOP + ROW * (at as f64 + 0.5);
            surface.write(&lane.label, (left - 12.0, middle), SMALL, TEXT_COLOR, Align::Right);
            for segment in lane.segments.iter().filter(|segment| segment.end > segment.start) {
                // Segments shorter than a pixel stay visible.
                let (from, to) = (place(segment.start), place(segment.end));
                let to = to.max(from + 1.0);
                let half = THICK / 2.0;
                fill(surface, (from, middle - half), (to, middle + half), color(&segment.kind));
                if font.width(&segment.name, SMALL) < to - from - 8.0 {
                    let center = ((from + to) / 2.0, middle);
                    surface.write(&segment.name, center, SMALL, WHITE, Align::Middle);
                }
            }
        }
        Ok(())
    }
}

/// Fills the rectangle from the top left to the bottom right.
fn fill(surface: &mut dyn Surface, from: Point, to: Point, color: Color) {
    surface.fill(&[from, (to.0, from.1), to, (from.0, to.1)], color);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::{PageColor, Segment};

    #[test]
    fn rows_carry_their_names_their_kinds_and_a_scale() {
        let chart = |end: f64| {
            let segment = |(name, start, end): (&str, f64, f64)| Segment {
                start,
                end,
                name: name.to_owned(),
                kind: format!("kind of {name}"),
                color: PageColor::Other,
            };
            let lane = |label: &str, segments: &[(&str, f64, f64)]| Lane {
                label: label.to_owned(),
                segments: segments.iter().copied().map(segment).collect(),
            };
            LaneChart {
                title: "A & B".to_owned(),
                subtitle: "means".to_owned(),
                unit: "ms".to_owned(),
                lanes: vec![
                    lane("main", &[("forward", 0.0, end / 2.0), ("short", end / 2.0, end / 1.99)]),
                    lane("buckets", &[("0", end / 2.0, end)]),
                ],
            }
        };
        let svg = chart(0.4).svg().unwrap();
        let shown = [
            "A &amp; B",
            "means",
            "main",
            "buckets",
            ">forward<",
            "kind of short",
            "0.1 ms",
            "0.3 ms",
        ];
        for part in shown {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(!svg.contains(">short<"), "a name that has no room is left out");
        assert!(svg.starts_with("<svg width=\"1200\" height=\"312\""), "{svg}");
        assert!(chart(0.4).png().unwrap().len() > 1000);
        assert!(matches!(chart(0.0).svg(), Err(PlotError::Empty { .. })));
    }
}
