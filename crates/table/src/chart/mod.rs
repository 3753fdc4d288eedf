//! Charts as SVG: the same drawing in a page and in a file of its own, with colors for light and dark.
//!
//! A chart has lines over two axes with their intervals, or rows of segments (bars, stacks, lanes) on one scale. In a page its
//! colors are variables of the style sheet ([`style`]).

use maud::Markup;

mod axis;
mod canvas;
mod color;
mod legend;
mod lines;
mod rows;
mod words;

pub use axis::{Axis, Spacing};
pub use color::{Color, style};
pub use lines::{Lines, Series, Stroke};
pub use rows::{Jump, Row, Rows, Segment, Shown};

use canvas::{Align, Canvas, Font};
use words::{SMALL, broken, fitted, width_of};

/// Width, in pixels, of a chart that fills the page.
pub const FULL: i32 = 1120;
/// Width of a chart that shares a row with another.
pub const HALF: i32 = 540;
/// Width of a chart that shares a row with two others, and of every chart on a phone.
pub const THIRD: i32 = 350;
/// All widths, the largest first. `page.css` shows the drawing that fits the panel.
pub const WIDTHS: [i32; 3] = [FULL, HALF, THIRD];

/// The marks of a chart.
#[derive(Clone, Debug, PartialEq)]
pub enum Chart {
    /// Rows of segments on one scale.
    Rows(Rows),
    /// Lines over two axes.
    Lines(Lines),
}

impl Chart {
    /// Whether there is nothing to draw.
    pub fn is_empty(&self) -> bool {
        match self {
            Chart::Rows(rows) => rows.segments().next().is_none(),
            Chart::Lines(lines) => lines.is_empty(),
        }
    }

    /// The `<svg>` element of a page, `width` pixels wide. `title` describes it to readers who cannot see it.
    pub fn element(&self, width: i32, title: &str) -> Markup {
        let mut canvas = Canvas::new(f64::from(width));
        let height = self.draw(&mut canvas, 0.0, 250.0);
        canvas.element(height, title)
    }

    /// Draws the chart from `top` on, and returns its lower edge.
    fn draw(&self, canvas: &mut Canvas, top: f64, height: f64) -> f64 {
        match self {
            Chart::Rows(rows) => rows.draw(canvas, top),
            Chart::Lines(lines) => lines.draw(canvas, top, height),
        }
    }
}

/// A chart that becomes a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// The title.
    pub title: String,
    /// Smaller lines below the title: where and when it was measured. May be empty.
    pub subtitle: String,
    /// The marks.
    pub chart: Chart,
}

/// A picture has no mark that can be drawn.
#[derive(Debug, thiserror::Error)]
#[error("the chart \"{0}\" has no point that its axes can show")]
pub struct EmptyPicture(String);

impl Picture {
    /// The width of a file without its margin, and the margin.
    const SIZE: (f64, f64) = (732.0, 14.0);

    /// Lines over two axes.
    pub fn lines(title: String, subtitle: String, axes: [Axis; 2], series: Vec<Series>) -> Self {
        let [x, y] = axes;
        Self { title, subtitle, chart: Chart::Lines(Lines { x, y, series }) }
    }

    /// The series of its lines.
    pub fn series(&self) -> &[Series] {
        match &self.chart {
            Chart::Rows(_) => &[],
            Chart::Lines(lines) => &lines.series,
        }
    }

    /// The picture as an SVG file.
    pub fn svg(&self) -> Result<String, EmptyPicture> {
        if self.chart.is_empty() {
            return Err(EmptyPicture(self.title.clone()));
        }
        let (width, margin) = Self::SIZE;
        let mut canvas = Canvas::new(width);
        canvas.is_file = true;
        // A long title gets smaller letters, as long as they can be read.
        let size = (17.0 * width / width_of(&self.title, 17.0)).clamp(SMALL, 17.0);
        let font = Font(size, Color::Text, Align::Left);
        canvas.text(&fitted(&self.title, size, width), (0.0, 10.0), font, &self.title);
        let mut y = 33.0;
        for line in broken(&self.subtitle, SMALL, width) {
            let font = Font(SMALL, Color::Muted, Align::Left);
            canvas.text(&line, (0.0, y), font, &self.subtitle);
            y += 15.0;
        }
        let height = self.chart.draw(&mut canvas, y + 2.0, 380.0);
        Ok(canvas.file(height, margin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(points: Vec<(f64, f64)>) -> Picture {
        let axes = [Axis::logarithmic("Size", "B"), Axis::logarithmic("Time", "us")];
        let series = vec![Series::line("first", points.clone()), Series::line("second", points)];
        Picture::lines("Time & size".to_owned(), "here".to_owned(), axes, series)
    }

    #[test]
    fn a_file_has_its_words_and_is_the_same_each_time() {
        let points = vec![(1e3, 12.0), (1e6, 900.0), (1e9, 8e5)];
        let text = picture(points.clone()).svg().unwrap();
        for part in ["Time &amp; size", "here", "first", "Size", "1 KB", "100 MB", "10 ms"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(text, picture(points).svg().unwrap());
    }

    #[test]
    fn a_long_subtitle_has_several_lines() {
        let subtitle = "measured, ".repeat(30);
        let picture = Picture { subtitle, ..picture(vec![(1e3, 12.0)]) };
        let svg = picture.svg().unwrap();
        let words = |line: &str| line.matches("measured,").count() - 30;
        let lines: Vec<_> =
            svg.lines().filter(|line| line.contains("measured,")).map(words).collect();
        assert_eq!((lines.len(), lines.iter().sum::<usize>()), (3, 30), "{svg}");
    }

    #[test]
    fn names_of_variants_are_whole_in_a_file() {
        let names = [1, 25].map(|mb| format!("precision=f32, bucket-cap-mb={mb}, layout=nhwc"));
        let bars = names.each_ref().map(|name| Row::bar(name, Some(1.0), Color::Other));
        let chart = Chart::Rows(Rows::new(Shown::Bars, "", bars));
        let rows = Picture { chart, ..picture(Vec::new()) }.svg().unwrap();
        let lengthened = names.each_ref().map(|name| format!("{}{name}", "a=1, ".repeat(20)));
        let series = lengthened.map(|name| Series::line(name, [(1e3, 12.0)]));
        let axes = [Axis::linear("", ""), Axis::linear("", "")];
        let lines = Picture::lines(String::new(), String::new(), axes, series.into());
        let lines = lines.svg().unwrap();
        for (mb, name) in [1, 25].iter().zip(&names) {
            assert!(rows.contains(&format!(">{name}</text>")), "{rows}");
            let end = format!("bucket-cap-mb={mb}, layout=nhwc</text>");
            assert!(lines.contains(&end), "{end}: {lines}");
        }
    }

    #[test]
    fn a_picture_without_a_mark_is_refused() {
        let error = picture(vec![(0.0, 3.0), (2.0, f64::NAN)]).svg().unwrap_err();
        assert!(error.to_string().contains("\"Time & size\" has no point"), "{error}");
        let chart = Chart::Rows(Rows::new(Shown::Bars, "", [Row::bar("a", None, Color::Other)]));
        assert!(Picture { chart, ..picture(Vec::new()) }.svg().is_err());
    }

    #[test]
    fn names_break_no_drawing() {
        let long = "strategy.bucket_cap_mb=25.0, ".repeat(20);
        let points = [(1e3, 12.0), (1e6, 900.0)];
        let series = ["lr=\u{7}\u{2067}1 <x>", &long].map(|name| Series::line(name, points));
        let axes = [Axis::linear("", ""), Axis::linear("", "")];
        let title = "a\u{1b}[31m\u{202e}b".to_owned();
        let svg = Picture::lines(title, "a\0b".to_owned(), axes, series.into()).svg().unwrap();
        assert_eq!(svg, paceline_files::printable_lines(&svg), "all of it can be seen");
        for shown in ["a\\u{1b}[31m\\u{202e}b", "a\\u{0}b", "lr=\\u{7}\\u{2067}1 &lt;x&gt;"] {
            assert!(svg.contains(shown), "no {shown} in {svg}");
        }
        assert!(!svg.contains(&format!("{long}</text>")), "the name runs off the picture");
        assert!(svg.contains(&format!("<title>{long}</title>")), "it is whole under the pointer");
    }
}
