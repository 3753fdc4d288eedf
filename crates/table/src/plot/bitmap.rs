//! A bitmap of a chart, with text in the font that the program contains.
//!
//! Shapes and text go in, and a PNG comes out. The fonts of the machine are not read, so a chart looks the same everywhere.
//! This file does not know what is drawn.

use paceline_files::printable;
use tiny_skia::{FillRule, Paint, Path, PathBuilder, Pixmap, Stroke, StrokeDash, Transform};
use ttf_parser::{Face, OutlineBuilder};

use super::draw::{Color, Surface};
use crate::canvas::{Align, HALF_CAPITAL, Point};

static FONT: &[u8] = include_bytes!("../../assets/DejaVuSans.ttf");

/// The font. It measures the text of an SVG too.
pub struct Font(Face<'static>);

impl Font {
    pub(super) fn new() -> Result<Self, String> {
        Face::parse(FONT, 0).map(Self).map_err(|error| error.to_string())
    }

    /// The width of text in pixels.
    pub(super) fn width(&self, words: &str, size: f64) -> f64 {
        f64::from(self.outline(words).right) * self.scale(size)
    }

    /// Pixels per unit of the font.
    fn scale(&self, size: f64) -> f64 {
        size / f64::from(self.0.units_per_em())
    }

    fn outline(&self, words: &str) -> Outline {
        let mut outline = Outline::default();
        for letter in printable(words).chars() {
            // The first glyph of a font stands for letters that it lacks.
            let glyph = self.0.glyph_index(letter).unwrap_or_default();
            self.0.outline_glyph(glyph, &mut outline);
            outline.right += f32::from(self.0.glyph_hor_advance(glyph).unwrap_or_default());
        }
        outline
    }
}

/// The outlines of some letters beside each other, in units of the font.
#[derive(Default)]
struct Outline {
    path: PathBuilder,
    right: f32,
}

impl OutlineBuilder for Outline {
    fn move_to(&mut self, x: f32, y: f32) {
        self.path.move_to(self.right + x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.path.line_to(self.right + x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        self.path.quad_to(self.right + x1, y1, self.right + x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let right = self.right;
        self.path.cubic_to(right + x1, y1, right + x2, y2, right + x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}

/// A drawing in pixels.
pub(super) struct Bitmap<'a> {
    pixels: Pixmap,
    font: &'a Font,
}

impl<'a> Bitmap<'a> {
    /// A white drawing of this width and height; `None` if it is too large.
    pub(super) fn new((width, height): (u32, u32), font: &'a Font) -> Option<Self> {
        let mut pixels = Pixmap::new(width, height)?;
        pixels.fill(tiny_skia::Color::WHITE);
        Some(Self { pixels, font })
    }

    pub(super) fn png(&self) -> Result<Vec<u8>, String> {
        self.pixels.encode_png().map_err(|error| error.to_string())
    }

    fn fill_path(&mut self, path: Option<Path>, color: Color, place: Transform) {
        if let Some(path) = path {
            self.pixels.fill_path(&path, &paint(color), FillRule::Winding, place, None);
        }
    }
}

impl Surface for Bitmap<'_> {
    fn fill(&mut self, corners: &[Point], color: Color) {
        let mut path = through(corners);
        path.close();
        self.fill_path(path.finish(), color, Transform::identity());
    }

    fn stroke(&mut self, points: &[Point], width: f64, color: Color, dashes: Option<[f64; 2]>) {
        let dash = dashes.map(|lengths| lengths.map(|length| length as f32).to_vec());
        let dash = dash.and_then(|lengths| StrokeDash::new(lengths, 0.0));
        let stroke = Stroke { width: width as f32, dash, ..Stroke::default() };
        if let Some(path) = through(points).finish() {
            let place = Transform::identity();
            self.pixels.stroke_path(&path, &paint(color), &stroke, place, None);
        }
    }

    fn write(&mut self, words: &str, (x, y): Point, size: f64, color: Color, align: Align) {
        let Outline { path, right } = self.font.outline(words);
        let scale = self.font.scale(size) as f32;
        let (left, angle) = match align {
            Align::Left => (0.0, 0.0),
            Align::Middle => (-right / 2.0, 0.0),
            Align::Right => (-right, 0.0),
            Align::Rising => (-right / 2.0, -90.0),
        };
        let place = Transform::from_translate(x as f32, y as f32)
            .pre_concat(Transform::from_rotate(angle))
            .pre_translate(0.0, (HALF_CAPITAL * size) as f32)
            .pre_scale(scale, -scale)
            .pre_translate(left, 0.0);
        self.fill_path(path.finish(), color, place);
    }
}

fn paint([red, green, blue]: Color) -> Paint<'static> {
    let mut paint = Paint::default();
    paint.set_color_rgba8(red, green, blue, 255);
    paint
}

fn through(points: &[Point]) -> PathBuilder {
    let mut path = PathBuilder::new();
    for (at, &(x, y)) in points.iter().enumerate() {
        let (x, y) = (x as f32, y as f32);
        if at == 0 { path.move_to(x, y) } else { path.line_to(x, y) }
    }
    path
}
