//! The canvas on which charts are drawn, and the SVG that it becomes.
//!
//! Shapes and text go in, each with a [`Color`]. An `<svg>` element comes out, for a page or a file.

use maud::{Markup, PreEscaped, html};
use paceline_files::{printable, printable_lines};

use super::color::{Color, fixed};

/// From the middle of a capital letter to the baseline, as a fraction of the font size, for nearly all fonts.
const HALF_CAPITAL: f64 = 0.36;

/// A position, in pixels from the top left corner.
pub(super) type Point = (f64, f64);

/// How text is aligned to its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Align {
    /// It begins there.
    Left,
    /// Its middle is there.
    Middle,
    /// It ends there.
    Right,
    /// Its middle is there, and it is read from below.
    Rising,
}

/// The size, the color and the alignment of a text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Font(pub f64, pub Color, pub Align);

/// An unfinished drawing. Lengths are in its own pixels, which a page scales.
pub(super) struct Canvas {
    pub width: f64,
    /// Whether it becomes a file, where names are whole: nothing may appear under a pointer.
    pub is_file: bool,
    body: String,
}

impl Canvas {
    /// An empty drawing of this width.
    pub fn new(width: f64) -> Self {
        Self { width, is_file: false, body: String::new() }
    }

    /// Draws a filled rectangle from the top left to the bottom right. `hover` is shown under the pointer.
    pub fn rect(&mut self, from: Point, to: Point, color: Color, hover: &str) {
        let (x, y) = (short(from.0), short(from.1));
        let (width, height) = (short(short(to.0) - x), short(short(to.1) - y));
        let shape = html! { rect x=(x) y=(y) width=(width) height=(height) fill=(color) {} };
        self.add(shape, hover);
    }

    /// Draws a filled shape.
    pub fn polygon(&mut self, corners: &[Point], color: Color, hover: &str) {
        self.add(html! { polygon points=(joined(corners)) fill=(color) {} }, hover);
    }

    /// Draws a line through all points.
    pub fn line(&mut self, points: &[Point], width: f64, color: Color, hover: &str) {
        self.dashed_line(points, (width, None), color, hover);
    }

    /// Draws a line. Its form is its width, and the lengths of a dash and a gap.
    pub fn dashed_line(
        &mut self,
        points: &[Point],
        (width, dashes): (f64, Option<[f64; 2]>),
        color: Color,
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
    pub fn text(&mut self, words: &str, at: Point, font: Font, hover: &str) {
        if words.is_empty() {
            return;
        }
        let (Font(size, color, align), x, y) = (font, short(at.0), short(at.1));
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
    pub fn element(self, height: f64, title: &str) -> Markup {
        let (width, height) = (short(self.width), short(height));
        html! {
            svg class={ "w" (width) } viewBox={ "0 0 " (width) " " (height) } role="img"
                aria-label=(printable_lines(title)) { "\n" (PreEscaped(self.body)) }
            "\n"
        }
    }

    /// The finished drawing as a file, with a margin. Its only font name is the generic `sans-serif`.
    pub fn file(self, height: f64, margin: f64) -> String {
        let (width, height) = (short(self.width + 2.0 * margin), short(height + 2.0 * margin));
        let edge = -margin;
        let paper =
            html! { rect x=(edge) y=(edge) width=(width) height=(height) fill=(Color::Card) {} };
        let (body, dark) = fixed(paper.0 + "\n" + &self.body);
        let drawing = html! {
            svg width=(width) height=(height)
                viewBox={ (edge) " " (edge) " " (width) " " (height) }
                xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" {
                "\n" style { (PreEscaped(dark)) } "\n" (PreEscaped(body))
            }
            "\n"
        };
        drawing.0
    }
}

/// A coordinate with one decimal: finer steps cannot be seen. NaN becomes zero.
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

    fn drawn() -> Canvas {
        let mut canvas = Canvas::new(100.0);
        canvas.rect((0.0, 0.0), (10.0, 5.5), Color::Compute, "1 & 2");
        let font = Font(12.0, Color::Series(9), Align::Left);
        canvas.text("x<y", (1.0, 2.0), font, "");
        canvas
    }

    #[test]
    fn drawings_of_a_page_have_its_colors() {
        let svg = drawn().element(40.0, "a <title>").0;
        assert!(svg.contains("<g><title>1 &amp; 2</title><rect"), "{svg}");
        assert!(svg.contains("height=\"5.5\" fill=\"var(--compute)\">"), "{svg}");
        assert!(svg.contains("x&lt;y") && svg.contains("fill=\"var(--series-1)\""), "{svg}");
        assert!(svg.contains("aria-label=\"a &lt;title&gt;\""), "{svg}");
        assert!(!svg.contains('#') && !svg.contains("http"), "{svg}");
    }

    #[test]
    fn a_file_is_light_for_every_viewer_and_dark_where_the_reader_prefers_it() {
        let svg = drawn().file(40.0, 5.0);
        assert!(svg.starts_with("<svg width=\"110\" height=\"50\" viewBox=\"-5 -5 110 50\""));
        assert!(svg.contains("font-family=\"sans-serif\"") && !svg.contains("var("), "{svg}");
        assert!(svg.contains("height=\"5.5\" fill=\"#2b68ad\">"), "{svg}");
        assert!(svg.contains("[fill=\"#2b68ad\"]{fill:#6ba6e8}"), "{svg}");
    }

    #[test]
    fn coordinates_are_short() {
        assert_eq!(joined(&[(0.1 + 0.2, -0.04), (f64::NAN, 12.0)]), "0.3,0 0,12");
    }
}
