//! Line charts, each axis logarithmic or linear, as PNG and SVG.
//!
//! A title, two axes with units and named series of points go in. The contents of a file come out. This module
//! knows neither what was measured nor where the file goes. The same drawing code serves both formats. The text of a PNG
//! is drawn with a font that the program contains, so a chart looks the same on a machine without fonts.

use std::fmt;

mod axis;
mod chart;
mod draw;
mod legend;
mod line;

use paceline_files::printable;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

pub use axis::Unit;
pub use chart::{Axis, LineChart, SIZE, Series, Spacing, Stroke};

/// A chart is drawn this many times larger. Coordinates are whole numbers in both formats, so at the final
/// size a circle would have visible corners. The bitmap back end does not antialias lines and filled shapes.
/// Averaging the pixels of a PNG smooths them.
const OVERSAMPLING: u32 = 3;

pub(crate) static FONT: &[u8] = include_bytes!("../../assets/DejaVuSans.ttf");

/// Why a chart could not be drawn.
#[derive(thiserror::Error)]
pub enum PlotError {
    /// No series has a point that the axes can show.
    #[error("the chart \"{title}\" has no point that its axes can show")]
    Empty {
        /// The chart's title.
        title: String,
    },
    /// The drawing library failed.
    #[error("cannot draw the chart \"{title}\": {reason}")]
    Draw {
        /// The chart's title.
        title: String,
        /// What the library says.
        reason: String,
    },
}

impl fmt::Debug for PlotError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl LineChart {
    /// The chart as an SVG. The only font name in it is the generic `sans-serif`.
    pub fn svg(&self) -> Result<String, PlotError> {
        let shown = self.prepare()?;
        let large = (SIZE.0 * OVERSAMPLING, SIZE.1 * OVERSAMPLING);
        let mut text = String::new();
        {
            let area = SVGBackend::with_string(&mut text, large).into_drawing_area();
            let medium = draw::Medium { k: OVERSAMPLING as i32, is_bitmap: false };
            draw::chart(&area, &shown, medium).map_err(|error| self.failed(error))?;
            area.present().map_err(|error| self.failed(error))?;
        }
        // The view box keeps the coordinates; only the size at which the chart is shown changes.
        let size = |(width, height): (u32, u32)| format!("width=\"{width}\" height=\"{height}\"");
        Ok(text.replacen(&size(large), &size(SIZE), 1))
    }

    /// The chart as a PNG.
    pub fn png(&self) -> Result<Vec<u8>, PlotError> {
        let shown = self.prepare()?;
        let large = (SIZE.0 * OVERSAMPLING, SIZE.1 * OVERSAMPLING);
        let mut pixels = vec![0; 3 * (large.0 * large.1) as usize];
        {
            let area = BitMapBackend::with_buffer(&mut pixels, large).into_drawing_area();
            let medium = draw::Medium { k: OVERSAMPLING as i32, is_bitmap: true };
            draw::chart(&area, &shown, medium).map_err(|error| self.failed(error))?;
            area.present().map_err(|error| self.failed(error))?;
        }
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, SIZE.0, SIZE.1);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().map_err(|error| self.failed(error))?;
        writer.write_image_data(&averaged(&pixels)).map_err(|error| self.failed(error))?;
        writer.finish().map_err(|error| self.failed(error))?;
        Ok(bytes)
    }

    /// Checks that there is something to draw, and registers the font. Returns the chart with texts that can be drawn: names
    /// may hold anything.
    fn prepare(&self) -> Result<Self, PlotError> {
        if self.series.iter().all(|series| self.drawable(series).next().is_none()) {
            return Err(PlotError::Empty { title: self.title.clone() });
        }
        register_font("sans-serif", FontStyle::Normal, FONT)
            .map_err(|_| self.failed("the font is not understood"))?;
        let mut shown = self.clone();
        let texts = [&mut shown.title, &mut shown.subtitle, &mut shown.x.label, &mut shown.y.label];
        let names = shown.series.iter_mut().map(|series| &mut series.name);
        texts.into_iter().chain(names).for_each(|text| *text = printable(text).into_owned());
        Ok(shown)
    }

    fn failed(&self, reason: impl std::fmt::Display) -> PlotError {
        PlotError::Draw { title: self.title.clone(), reason: reason.to_string() }
    }
}

/// Scales the drawing down: each pixel of the chart is the mean of a square of drawn pixels, [`OVERSAMPLING`]
/// on each side. A pixel has three bytes.
fn averaged(large: &[u8]) -> Vec<u8> {
    let (width, height, side) = (SIZE.0 as usize, SIZE.1 as usize, OVERSAMPLING as usize);
    let mut small = Vec::with_capacity(3 * width * height);
    for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
        for channel in 0..3 {
            let square = (0..side * side).map(|at| {
                let (row, column) = (y * side + at / side, x * side + at % side);
                u32::from(large[3 * (row * width * side + column) + channel])
            });
            small.push((square.sum::<u32>() / (side * side) as u32) as u8);
        }
    }
    small
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(label: &str, unit: Unit) -> Axis {
        Axis { label: label.to_owned(), unit, spacing: Spacing::Logarithmic }
    }

    fn chart(points: Vec<(f64, f64)>) -> LineChart {
        LineChart {
            title: "Time & size".to_owned(),
            subtitle: String::new(),
            x: axis("Size", Unit::Bytes),
            y: axis("Time", Unit::Microseconds),
            series: vec![Series {
                name: "first".to_owned(),
                points,
                ranges: Vec::new(),
                stroke: Stroke::Solid,
                look: 0,
            }],
        }
    }

    #[test]
    fn an_svg_holds_its_texts_and_names_no_particular_font() {
        let text = chart(vec![(1e3, 12.0), (1e6, 900.0), (1e9, 8e5)]).svg().unwrap();
        for part in ["Time &amp; size", "first", "Size", "1 KB", "100 MB", "10 ms", "Time (us)"] {
            let found = text.contains(part);
            assert_eq!(found, part != "Time (us)", "{part}: ticks carry the unit");
        }
        assert!(text.starts_with("<svg width=\"1200\" height=\"800\" viewBox=\"0 0 3600 2400\""));
        assert!(text.contains("font-family=\"sans-serif\""));
        assert!(!text.contains("DejaVu"));
    }

    #[test]
    fn a_png_has_its_size_and_is_not_blank() {
        let bytes = chart(vec![(8.0, 3.0), (8.0, 3.0)]).png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let frame = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((frame.width, frame.height), SIZE);
        let dark = pixels.chunks(3).filter(|pixel| pixel.iter().all(|&part| part < 90)).count();
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
        let (markers, dots) = drawn(vec![(8.0, 3.0), (9.0, 4.0)], Stroke::Dotted);
        assert!(markers == 0 && dots > 10, "{markers} markers, {dots} dots");
    }

    #[test]
    fn long_names_stay_within_the_picture() {
        let mut chart = chart(vec![(1e3, 12.0), (1e6, 900.0)]);
        let name =
            "strategy.name=simple_ddp, strategy.bucket_cap_mb=25.0, compute_threads=2, nproc=2";
        chart.series[0].name = name.to_owned();
        chart.title = format!("{name} by {name}");
        let svg = chart.svg().unwrap();
        let text: Vec<&str> = svg.lines().map(str::trim).collect();
        assert!(!text.contains(&name), "the name has one line");
        for word in name.split(' ') {
            assert!(text.iter().any(|line| line.contains(word)), "{word} is not whole: {svg}");
        }
        let png = chart.png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        let width = SIZE.0 as usize;
        let at_edge = |row: &[u8]| row[3 * (width - 6)..].iter().any(|part| *part < 200);
        assert!(!pixels.chunks(3 * width).any(at_edge), "something is drawn at the edge");
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
