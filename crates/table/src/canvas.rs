//! The canvas on which all charts are drawn, and the SVG that it becomes.
//!
//! Shapes and text go in, each with a color: a fixed one, or a variable of a page's style sheet. The text of an `<svg>`
//! element comes out, for a page or for a file. This file does not know what kind of chart it draws.

use maud::{Markup, PreEscaped, Render, html};
use paceline_files::{printable, printable_lines};

/// The distance from the middle of a capital letter to the baseline, as a fraction of the font size. It hardly differs
/// between fonts.
pub(crate) const HALF_CAPITAL: f64 = 0.36;

/// A place, in pixels from the top left corner.
pub(crate) type Point = (f64, f64);

/// How text is aligned to its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// It begins there.
    Left,
    /// Its middle is there.
    Middle,
    /// It ends there.
    Right,
    /// In the middle, and read from below.
    Rising,
}

/// A drawing that is not finished yet. Lengths are in its own pixels, which a page scales.
pub(crate) struct Canvas {
    size: Point,
    body: String,
}

impl Canvas {
    /// An empty drawing of this width and height.
    pub(crate) fn new(width: f64, height: f64) -> Self {
        Self { size: (short(width), short(height)), body: String::new() }
    }

    /// Draws a filled rectangle from the top left to the bottom right. `hover` is shown under the pointer.
    pub(crate) fn rect(&mut self, from: Point, to: Point, color: impl Render, hover: &str) {
        let (x, y) = (short(from.0), short(from.1));
        let (width, height) = (short(short(to.0) - x), short(short(to.1) - y));
        let shape = html! { rect x=(x) y=(y) width=(width) height=(height) fill=(color) {} };
        self.add(shape, hover);
    }

    /// Draws a filled shape.
    pub(crate) fn polygon(&mut self, corners: &[Point], color: impl Render, hover: &str) {
        self.add(html! { polygon points=(joined(corners)) fill=(color) {} }, hover);
    }

    /// Draws a line through all points.
    pub(crate) fn line(&mut self, points: &[Point], width: f64, color: impl Render, hover: &str) {
        self.dashed_line(points, width, color, None, hover);
    }

    /// Draws a line through all points. `dashes` are the lengths of a dash and of the gap after it.
    pub(crate) fn dashed_line(
        &mut self,
        points: &[Point],
        width: f64,
        color: impl Render,
        dashes: Option<[f64; 2]>,
        hover: &str,
    ) {
        let dashes = dashes.map(|[on, off]| format!("{on} {off}"));
        let shape = html! {
            polyline points=(joined(points)) fill="none" stroke=(color) stroke-width=(width)
                stroke-dasharray=[dashes] {}
        };
        self.add(shape, hover);
    }

    /// Draws text that is vertically centered at `at`.
    pub(crate) fn text(
        &mut self,
        words: &str,
        at: Point,
        size: f64,
        color: impl Render,
        align: Align,
    ) {
        self.hover_text(words, at, size, color, align, "");
    }

    pub(crate) fn hover_text(
        &mut self,
        words: &str,
        at: Point,
        size: f64,
        color: impl Render,
        align: Align,
        hover: &str,
    ) {
        let (x, y) = (short(at.0), short(at.1));
        let anchor = match align {
            Align::Left => None,
            Align::Middle | Align::Rising => Some("middle"),
            Align::Right => Some("end"),
        };
        let turn = (align == Align::Rising).then(|| format!("rotate(-90 {x} {y})"));
        let shape = html! {
            text x=(x) y=(short(at.1 + HALF_CAPITAL * size)) transform=[turn] text-anchor=[anchor]
                font-size=(short(size)) fill=(color) { (printable(words)) }
        };
        self.add(shape, hover);
    }

    fn add(&mut self, shape: Markup, hover: &str) {
        let shape = match hover {
            "" => shape,
            _ => html! { g { title { (printable_lines(hover)) } (shape) } },
        };
        self.body.push_str(&shape.0);
        self.body.push('\n');
    }

    /// The finished element of a page. `title` describes it to readers who cannot see it.
    pub(crate) fn element(self, title: &str) -> Markup {
        let (width, height) = self.size;
        html! {
            svg class={ "w" (width) } viewBox={ "0 0 " (width) " " (height) } role="img"
                aria-label=(printable_lines(title)) { "\n" (PreEscaped(self.body)) }
            "\n"
        }
    }

    /// The finished drawing as a file of its own. The only font name in it is the generic `sans-serif`.
    pub(crate) fn file(self) -> String {
        let (width, height) = self.size;
        let drawing = html! {
            svg width=(width) height=(height) viewBox={ "0 0 " (width) " " (height) }
                xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" {
                "\n" (PreEscaped(self.body))
            }
            "\n"
        };
        drawing.0
    }
}

/// A coordinate with one decimal: finer steps cannot be seen. One that is not a number becomes zero.
fn short(coordinate: f64) -> f64 {
    let tenths = if coordinate.is_finite() { (coordinate * 10.0).round() } else { 0.0 };
    // A negative zero becomes a zero without a sign.
    tenths / 10.0 + 0.0
}

fn joined(points: &[Point]) -> String {
    let pair = |&(x, y): &Point| format!("{},{}", short(x), short(y));
    points.iter().map(pair).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::PageColor;

    #[test]
    fn drawings_have_the_colors_of_the_page() {
        let mut canvas = Canvas::new(100.0, 40.0);
        canvas.rect((0.0, 0.0), (10.0, 5.5), PageColor::Compute, "1 & 2");
        canvas.text("x<y", (1.0, 2.0), 12.0, PageColor::Series(9), Align::Left);
        let svg = canvas.element("a <title>").0;
        assert!(svg.contains("<g><title>1 &amp; 2</title><rect"), "{svg}");
        assert!(svg.contains("height=\"5.5\" fill=\"var(--compute)\">"), "{svg}");
        assert!(svg.contains("x&lt;y") && svg.contains("fill=\"var(--series-1)\""), "{svg}");
        assert!(svg.contains("aria-label=\"a &lt;title&gt;\""), "{svg}");
        assert!(!svg.contains('#') && !svg.contains("http"), "{svg}");
    }

    #[test]
    fn coordinates_are_short() {
        assert_eq!(joined(&[(0.1 + 0.2, -0.04), (f64::NAN, 12.0)]), "0.3,0 0,12");
    }
}
