//! Line charts, each axis logarithmic or linear, and charts of bars and of time lines, as PNG and SVG.
//!
//! A title, axes with units and named series of points, or named bars, go in. The contents of a file come out. This module
//! knows neither what was measured nor where the file goes. The same drawing code serves both formats. The text of a PNG
//! is drawn with a font that the program contains, so a chart looks the same on a machine without fonts.

use std::fmt;

mod axis;
mod bars;
mod bitmap;
mod chart;
mod draw;
mod lanes;
mod legend;
mod line;

pub use bitmap::Font;
pub use draw::Surface;

use bitmap::Bitmap;
use draw::{Color, WHITE};

use crate::canvas::{Align, Canvas, Point};

pub use axis::Unit;
pub use bars::{BarChart, BarGroup, RangedBar};
pub use chart::{Axis, LineChart, SIZE, Series, Spacing, Stroke};
pub use lanes::LaneChart;

/// Why a chart could not be drawn.
#[derive(thiserror::Error)]
pub enum PlotError {
    /// No series has a point that the axes can show.
    #[error("the chart \"{title}\" has no point that its axes can show")]
    Empty {
        /// The chart's title.
        title: String,
    },
    /// A library failed.
    #[error("cannot draw the chart \"{title}\": {reason}")]
    Draw {
        /// The chart's title.
        title: String,
        /// The library's message.
        reason: String,
    },
}

impl fmt::Debug for PlotError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A chart that becomes a file.
pub trait Picture {
    /// Its title, for messages.
    fn title(&self) -> &str;

    /// Its width and height in pixels.
    fn size(&self) -> (u32, u32) {
        SIZE
    }

    /// Draws it. Errors if there is nothing to draw.
    #[doc(hidden)]
    fn draw(&self, surface: &mut dyn Surface, font: &Font) -> Result<(), PlotError>;

    /// The chart as an SVG. The only font name in it is the generic `sans-serif`.
    fn svg(&self) -> Result<String, PlotError> {
        let (width, height) = self.size();
        let size = (f64::from(width), f64::from(height));
        let mut canvas = Canvas::new(size.0, size.1);
        canvas.rect((0.0, 0.0), size, hex(WHITE), "");
        self.draw(&mut canvas, &font(self)?)?;
        Ok(canvas.file())
    }

    /// The chart as a PNG.
    fn png(&self) -> Result<Vec<u8>, PlotError> {
        let font = font(self)?;
        let mut bitmap =
            Bitmap::new(self.size(), &font).ok_or_else(|| failed(self, "it is too large"))?;
        self.draw(&mut bitmap, &font)?;
        bitmap.png().map_err(|error| failed(self, error))
    }
}

impl Picture for LineChart {
    fn title(&self) -> &str {
        &self.title
    }

    fn draw(&self, surface: &mut dyn Surface, font: &Font) -> Result<(), PlotError> {
        if self.series.iter().all(|series| self.drawable(series).next().is_none()) {
            return Err(PlotError::Empty { title: self.title.clone() });
        }
        draw::chart(surface, self, font);
        Ok(())
    }
}

impl<P: Picture + ?Sized> Picture for Box<P> {
    fn title(&self) -> &str {
        (**self).title()
    }

    fn size(&self) -> (u32, u32) {
        (**self).size()
    }

    fn draw(&self, surface: &mut dyn Surface, font: &Font) -> Result<(), PlotError> {
        (**self).draw(surface, font)
    }
}

fn font<P: Picture + ?Sized>(picture: &P) -> Result<Font, PlotError> {
    Font::new().map_err(|error| failed(picture, error))
}

fn failed<P: Picture + ?Sized>(picture: &P, reason: impl fmt::Display) -> PlotError {
    PlotError::Draw { title: picture.title().to_owned(), reason: reason.to_string() }
}

impl Surface for Canvas {
    fn fill(&mut self, corners: &[Point], color: Color) {
        self.polygon(corners, hex(color), "");
    }

    fn stroke(&mut self, points: &[Point], width: f64, color: Color, dashes: Option<[f64; 2]>) {
        self.dashed_line(points, width, hex(color), dashes, "");
    }

    fn write(&mut self, words: &str, at: Point, size: f64, color: Color, align: Align) {
        self.text(words, at, size, hex(color), align);
    }
}

fn hex([red, green, blue]: Color) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

#[cfg(test)]
mod tests {
    use tiny_skia::Pixmap;

    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> LineChart {
        LineChart {
            title: "Time & size".to_owned(),
            subtitle: String::new(),
            x: Axis::logarithmic("Size", Unit::Bytes),
            y: Axis::logarithmic("Time", Unit::Microseconds),
            series: vec![Series::line("first", points)],
        }
    }

    #[test]
    fn an_svg_holds_its_texts_and_names_no_particular_font() {
        let text = chart(vec![(1e3, 12.0), (1e6, 900.0), (1e9, 8e5)]).svg().unwrap();
        for part in ["Time &amp; size", "first", "Size", "1 KB", "100 MB", "10 ms", "Time (us)"] {
            let found = text.contains(part);
            assert_eq!(found, part != "Time (us)", "{part}: ticks carry the unit");
        }
        assert!(text.starts_with("<svg width=\"1200\" height=\"800\" viewBox=\"0 0 1200 800\""));
        assert!(text.contains("font-family=\"sans-serif\""));
        assert!(!text.contains("DejaVu"));
    }

    #[test]
    fn a_png_has_its_size_and_is_not_blank() {
        let bytes = chart(vec![(8.0, 3.0), (8.0, 3.0)]).png().unwrap();
        let picture = Pixmap::decode_png(&bytes).unwrap();
        assert_eq!((picture.width(), picture.height()), SIZE);
        let dark =
            picture.data().chunks(4).filter(|pixel| pixel[..3].iter().all(|&part| part < 90));
        let dark = dark.count();
        assert!(dark > 500, "the text is missing: {dark} dark pixels");
    }

    #[test]
    fn a_chart_without_a_point_is_refused() {
        let error = chart(vec![(0.0, 3.0), (2.0, f64::NAN)]).png().unwrap_err();
        assert!(error.to_string().contains("no point"), "{error}");
    }

    #[test]
    fn a_single_point_is_a_marker_and_no_line() {
        let drawn = |points: Vec<(f64, f64)>, stroke| {
            let mut chart = chart(points);
            chart.series[0].stroke = stroke;
            let svg = chart.svg().unwrap();
            let of_series = "stroke=\"#0072B2\"";
            (svg.matches("<polygon").count(), svg.matches(of_series).count())
        };
        for stroke in [Stroke::Solid, Stroke::Dotted] {
            // A marker in the chart and one in the legend.
            assert_eq!(drawn(vec![(8.0, 3.0)], stroke), (2, 0), "{stroke:?}");
            assert_eq!(drawn(vec![(8.0, 3.0), (8.0, 3.0)], stroke), (2, 0), "{stroke:?}");
        }
        assert_eq!(drawn(vec![(8.0, 3.0), (9.0, 4.0)], Stroke::Solid), (3, 2));
        let dotted = drawn(vec![(8.0, 3.0), (9.0, 4.0)], Stroke::Dotted);
        assert_eq!(dotted, (0, 2), "a line without markers");
    }

    #[test]
    fn long_names_stay_within_the_picture() {
        let mut chart = chart(vec![(1e3, 12.0), (1e6, 900.0)]);
        let name =
            "strategy.name=simple_ddp, strategy.bucket_cap_mb=25.0, compute_threads=2, nproc=2";
        chart.series[0].name = name.to_owned();
        chart.title = format!("{name} by {name}");
        let svg = chart.svg().unwrap();
        assert!(!svg.contains(&format!(">{name}<")), "the name has one line");
        for word in name.split(' ') {
            assert!(svg.contains(word), "{word} is not whole: {svg}");
        }
        let picture = Pixmap::decode_png(&chart.png().unwrap()).unwrap();
        let at_edge = |row: &[u8]| row[row.len() - 4 * 6..].iter().any(|part| *part < 200);
        let mut rows = picture.data().chunks(4 * SIZE.0 as usize);
        assert!(!rows.any(at_edge), "something is drawn at the edge");
    }

    #[test]
    fn names_break_no_drawing() {
        let mut chart = chart(vec![(1e3, 12.0), (1e6, 900.0)]);
        chart.title = "a\u{1b}[31m\u{202e}b".to_owned();
        chart.subtitle = "a\0b".to_owned();
        chart.series[0].name = "lr=\u{7}\u{2067}1 <x>".to_owned();
        let svg = chart.svg().unwrap();
        assert_eq!(svg, paceline_files::printable_lines(&svg), "all of it can be seen");
        for shown in ["a\\u{1b}[31m\\u{202e}b", "a\\u{0}b", "lr=\\u{7}\\u{2067}1 &lt;x&gt;"] {
            assert!(svg.contains(shown), "no {shown} in {svg}");
        }
        chart.png().unwrap();
    }

    #[test]
    fn zero_has_a_place_on_a_linear_axis_only() {
        let mut chart = chart(vec![(1.0, 0.0), (2.0, -1.0), (0.0, 5.0)]);
        assert_eq!(chart.drawable(&chart.series[0]).count(), 0);
        chart.y.spacing = Spacing::Linear;
        assert_eq!(chart.drawable(&chart.series[0]).collect::<Vec<_>>(), [(1.0, 0.0)]);
    }

    #[test]
    fn ranges_lie_within_the_axes() {
        let mut chart = chart(vec![(1.0, 5.0)]);
        chart.series[0].ranges = vec![(1.0, 4.0, 9.0), (1.0, 0.0, 2.0)];
        let ends: Vec<_> = chart.drawable_ranges(&chart.series[0]).collect();
        assert_eq!(ends, [[(1.0, 4.0), (1.0, 9.0)]], "zero has no place on this axis");
        let lines = |chart: &LineChart| chart.svg().unwrap().matches("<polyline").count();
        let with = lines(&chart);
        chart.series[0].ranges.clear();
        assert!(with >= lines(&chart) + 3, "a bar and its two ends");
    }
}
