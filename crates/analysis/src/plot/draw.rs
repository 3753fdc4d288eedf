//! Draws a line chart on any back end of `plotters`.
//!
//! A chart goes in, and is drawn on an area. The legend has its own column at the right, so that it never
//! covers a line. This file does not know the format of the output.

use plotters::coord::Shift;
use plotters::element::{PathElement, Text};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontTransform, TextStyle};

use super::axis::Scale;
use super::chart::{LineChart, SIZE};
use super::line::{line, marker, range, stroke};

pub(super) type Area<DB> = DrawingArea<DB, Shift>;
pub(super) type Outcome<DB> = Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

const TEXT_COLOR: RGBColor = RGBColor(40, 40, 40);
const GREY: RGBColor = RGBColor(110, 110, 110);
const GRID: RGBColor = RGBColor(214, 214, 214);
const FAINT: RGBColor = RGBColor(238, 238, 238);

const TITLE: i32 = 32;
const LABEL: i32 = 23;
const SMALL: i32 = 20;

/// Edges of the plot area in pixels. The width of the legend decides the right edge.
const LEFT: i32 = 120;
const TOP: i32 = 92;
const BOTTOM: i32 = SIZE.1 as i32 - 92;

/// In the legend, the length of a line's sample and the largest distance between entries.
const SAMPLE: i32 = 48;
const ENTRY: i32 = 34;

/// The surface on which a chart is drawn.
#[derive(Clone, Copy)]
pub(super) struct Medium {
    /// The factor by which every length is multiplied.
    pub k: i32,
    /// Whether the drawing library places the letters itself. For an SVG, the viewer does.
    pub is_bitmap: bool,
}

/// Draws `chart`.
pub(super) fn chart<DB: DrawingBackend>(
    area: &Area<DB>,
    chart: &LineChart,
    medium: Medium,
) -> Outcome<DB> {
    let k = medium.k;
    area.fill(&WHITE)?;
    let names = chart.series.iter().map(|series| width(area, &series.name, SMALL * k));
    let legend = names.max().unwrap_or(0) / k + SAMPLE + 48;
    // The lines keep at least half of the chart, however long the names are.
    let right = (SIZE.0 as i32 - legend).max(SIZE.0 as i32 / 2);
    let points = || {
        let of_series =
            |series| chart.drawable(series).chain(chart.drawable_ranges(series).flatten());
        chart.series.iter().flat_map(of_series)
    };
    let field = Field {
        x: Scale::new(chart.x.spacing, points().map(|(x, _)| x)),
        y: Scale::new(chart.y.spacing, points().map(|(_, y)| y)),
        right,
        medium,
    };
    field.grid(area, chart)?;
    for series in &chart.series {
        let pixels: Vec<(f64, f64)> =
            chart.drawable(series).map(|point| field.pixel(point)).collect();
        for ends in chart.drawable_ranges(series) {
            range(area, series, ends.map(|end| field.pixel(end)), k)?;
        }
        line(area, series, &pixels, k)?;
    }
    let distance = ENTRY.min((BOTTOM - TOP) / chart.series.len().max(1) as i32);
    for (at, series) in chart.series.iter().enumerate() {
        let (x, y) = (right + 22, TOP + 14 + at as i32 * distance);
        let ends = [(x * k) as f64, ((x + SAMPLE) * k) as f64].map(|x| (x, (y * k) as f64));
        stroke(area, series, &ends, k)?;
        marker(area, series, ((x + SAMPLE / 2) * k, y * k), k)?;
        let place = ((x + SAMPLE + 10) * k, y * k);
        text(area, medium, &series.name, place, SMALL, TEXT_COLOR, (HPos::Left, VPos::Center))?;
    }
    Ok(())
}

/// The plot area and its scales, which map values to pixels.
struct Field {
    x: Scale,
    y: Scale,
    right: i32,
    medium: Medium,
}

impl Field {
    fn pixel(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let k = f64::from(self.medium.k);
        let width = f64::from(self.right - LEFT);
        let height = f64::from(BOTTOM - TOP);
        let (x, y) = (self.x.position(x) * width, self.y.position(y) * height);
        ((f64::from(LEFT) + x) * k, (f64::from(BOTTOM) - y) * k)
    }

    /// Draws everything but the lines and the legend.
    fn grid<DB: DrawingBackend>(&self, area: &Area<DB>, chart: &LineChart) -> Outcome<DB> {
        let (medium, k) = (self.medium, self.medium.k);
        let middle = ((LEFT + self.right) / 2 * k, (TOP + BOTTOM) / 2 * k);
        let (left, right, top, bottom) = (LEFT * k, self.right * k, TOP * k, BOTTOM * k);
        for (ticks, colour) in [(&self.x.minor, FAINT), (&self.x.major, GRID)] {
            for x in ticks.iter().map(|&tick| left + along(&self.x, tick, right - left)) {
                let style = colour.stroke_width(k as u32);
                area.draw(&PathElement::new(vec![(x, top), (x, bottom)], style))?;
            }
        }
        for (ticks, colour) in [(&self.y.minor, FAINT), (&self.y.major, GRID)] {
            for y in ticks.iter().map(|&tick| bottom - along(&self.y, tick, bottom - top)) {
                let style = colour.stroke_width(k as u32);
                area.draw(&PathElement::new(vec![(left, y), (right, y)], style))?;
            }
        }
        let frame = GREY.stroke_width(k as u32);
        // A path instead of a rectangle: the SVG back end keeps a rectangle's stroke at one unit.
        let corners = vec![(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
        area.draw(&PathElement::new(corners, frame))?;
        for &tick in &self.x.major {
            let place = (left + along(&self.x, tick, right - left), bottom + 10 * k);
            let name = chart.x.unit.tick(tick);
            text(area, medium, &name, place, SMALL, TEXT_COLOR, (HPos::Center, VPos::Top))?;
        }
        for &tick in &self.y.major {
            let place = (left - 10 * k, bottom - along(&self.y, tick, bottom - top));
            let name = chart.y.unit.tick(tick);
            text(area, medium, &name, place, SMALL, TEXT_COLOR, (HPos::Right, VPos::Center))?;
        }
        let title = (left, 22 * k);
        text(area, medium, &chart.title, title, TITLE, TEXT_COLOR, (HPos::Left, VPos::Top))?;
        let below = (left, 60 * k);
        text(area, medium, &chart.subtitle, below, SMALL, GREY, (HPos::Left, VPos::Top))?;
        let label = format!("{}{}", chart.x.label, chart.x.unit.suffix());
        let place = (middle.0, bottom + 46 * k);
        text(area, medium, &label, place, LABEL, TEXT_COLOR, (HPos::Center, VPos::Top))?;
        let label = format!("{}{}", chart.y.label, chart.y.unit.suffix());
        let font = ("sans-serif", LABEL * k).into_font().transform(FontTransform::Rotate270);
        let style =
            TextStyle::from(font).color(&TEXT_COLOR).pos(Pos::new(HPos::Center, VPos::Center));
        area.draw(&Text::new(label, (26 * k, middle.1), style))
    }
}

/// How far along an axis of `length` pixels a tick lies.
fn along(scale: &Scale, tick: f64, length: i32) -> i32 {
    (scale.position(tick) * f64::from(length)).round() as i32
}

fn width<DB: DrawingBackend>(area: &Area<DB>, words: &str, size: i32) -> i32 {
    let style = TextStyle::from(("sans-serif", size).into_font());
    area.estimate_text_size(words, &style).map_or(0, |(width, _)| width as i32)
}

/// Draws text at a position in pixels. `size` is not yet multiplied by `k`.
fn text<DB: DrawingBackend>(
    area: &Area<DB>,
    medium: Medium,
    words: &str,
    (x, y): (i32, i32),
    size: i32,
    colour: RGBColor,
    (horizontal, vertical): (HPos, VPos),
) -> Outcome<DB> {
    let size = size * medium.k;
    // On a bitmap the library draws text higher than asked. These fractions of the size move capitals to the
    // right place. They follow from where the library puts the baseline and from the height of the font's
    // capitals.
    let lower = match vertical {
        _ if !medium.is_bitmap => 0,
        VPos::Center => size * 21 / 100,
        _ => size * 13 / 100,
    };
    let font = ("sans-serif", size).into_font();
    let style = TextStyle::from(font).color(&colour).pos(Pos::new(horizontal, vertical));
    area.draw(&Text::new(words.to_owned(), (x, y + lower), style))
}
