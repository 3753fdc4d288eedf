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
use super::chart::{LineChart, SIZE, Series};
use super::legend::Legend;
use super::line::{is_point, line, range};

pub(super) type Area<DB> = DrawingArea<DB, Shift>;
pub(super) type Outcome<DB> = Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

pub(super) const TEXT_COLOR: RGBColor = RGBColor(40, 40, 40);
const GRAY: RGBColor = RGBColor(110, 110, 110);
const GRID: RGBColor = RGBColor(214, 214, 214);
const FAINT: RGBColor = RGBColor(238, 238, 238);

const TITLE: i32 = 32;
const LABEL: i32 = 23;
pub(super) const SMALL: i32 = 20;

/// Edges of the plot area in pixels. The width of the legend decides the right edge.
const LEFT: i32 = 120;
const TOP: i32 = 92;
const BOTTOM: i32 = SIZE.1 as i32 - 92;

/// The distance from the texts to the edges of the picture.
const MARGIN: i32 = 14;

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
    let legend =
        Legend::new(&chart.series, BOTTOM - TOP, |words| width(area, words, SMALL * k) / k);
    let right = SIZE.0 as i32 - MARGIN - legend.width();
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
    let is_point = |series: &Series| is_point(&chart.drawable(series).collect::<Vec<_>>());
    legend.draw(area, medium, (right, TOP), is_point)
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
        for (ticks, color) in [(&self.x.minor, FAINT), (&self.x.major, GRID)] {
            for x in ticks.iter().map(|&tick| left + along(&self.x, tick, right - left)) {
                let style = color.stroke_width(k as u32);
                area.draw(&PathElement::new(vec![(x, top), (x, bottom)], style))?;
            }
        }
        for (ticks, color) in [(&self.y.minor, FAINT), (&self.y.major, GRID)] {
            for y in ticks.iter().map(|&tick| bottom - along(&self.y, tick, bottom - top)) {
                let style = color.stroke_width(k as u32);
                area.draw(&PathElement::new(vec![(left, y), (right, y)], style))?;
            }
        }
        let frame = GRAY.stroke_width(k as u32);
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
        for (words, y, largest, color) in
            [(&chart.title, 22, TITLE, TEXT_COLOR), (&chart.subtitle, 60, SMALL, GRAY)]
        {
            let room = SIZE.0 as i32 - LEFT - MARGIN;
            let size = fitting(largest, width(area, words, largest * k) / k, room);
            text(area, medium, words, (left, y * k), size, color, (HPos::Left, VPos::Top))?;
        }
        let label = format!("{}{}", chart.x.label, chart.x.unit.suffix());
        let place = (middle.0, bottom + 46 * k);
        let size = fitting(LABEL, width(area, &label, LABEL * k), middle.0 * 2 - MARGIN * k);
        text(area, medium, &label, place, size, TEXT_COLOR, (HPos::Center, VPos::Top))?;
        let label = format!("{}{}", chart.y.label, chart.y.unit.suffix());
        let size = fitting(LABEL, width(area, &label, LABEL * k), (TOP + BOTTOM - MARGIN) * k);
        let font = ("sans-serif", size * k).into_font().transform(FontTransform::Rotate270);
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

/// The size at which text of this width has room, at most `largest`, at which it was measured.
fn fitting(largest: i32, width: i32, room: i32) -> i32 {
    if width <= room { largest } else { (largest * room / width).max(1) }
}

/// Draws text at a position in pixels. `size` is not yet multiplied by `k`.
pub(super) fn text<DB: DrawingBackend>(
    area: &Area<DB>,
    medium: Medium,
    words: &str,
    (x, y): (i32, i32),
    size: i32,
    color: RGBColor,
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
    let style = TextStyle::from(font).color(&color).pos(Pos::new(horizontal, vertical));
    area.draw(&Text::new(words.to_owned(), (x, y + lower), style))
}
