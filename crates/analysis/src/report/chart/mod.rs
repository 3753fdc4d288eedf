//! Charts of a report, as pieces of SVG for a page with a light and a dark theme.
//!
//! Named values and their meanings go in. The text of an `<svg>` element comes out. `plotters` draws; then its
//! fixed colours are replaced by variables of the page's style sheet, so the page decides how they look. A chart
//! does not know what was measured.

mod bars;
mod donut;
mod lanes;
mod lines;
mod stacked;

use plotters::coord::Shift;
use plotters::element::{PathElement, Polygon, Rectangle, Text};
use plotters::prelude::{DrawingArea, IntoDrawingArea, RGBColor, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, IntoFont, TextStyle, register_font};

pub use bars::{Bar, Bars};
pub use donut::{Donut, Donuts};
pub use lanes::{Jump, Lane, Lanes, Segment};
pub use lines::{Line, Lines};
pub use stacked::{Part, Stack, Stacked};

use crate::plot::{FONT, PlotError};

/// What a colour stands for. The page's style sheet has a variable of each name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageColor {
    /// Text.
    Text,
    /// Text that steps back.
    Muted,
    /// Lines of the background.
    Grid,
    /// The room that a bar could fill.
    Track,
    /// Text on a filled shape.
    OnFill,
    /// Arithmetic.
    Compute,
    /// Collectives and messages.
    Communication,
    /// Copies, sets and memory in use.
    Memory,
    /// Nothing runs.
    Idle,
    /// Work beside arithmetic, or other work than arithmetic.
    NonCompute,
    /// Computation and communication at once.
    Both,
    /// Waiting for another rank.
    Wait,
    /// The host, where it neither computes nor communicates.
    Host,
    /// Of a step: waiting for a batch.
    DataWait,
    /// Of a step: the forward pass.
    Forward,
    /// Of a step: the backward pass.
    Backward,
    /// Of a step: what synchronisation adds.
    Sync,
    /// Of a step: the update.
    Optimizer,
    /// What has no name of its own.
    Other,
    /// One of several things of one kind; their number repeats after [`PageColor::NUM_SERIES`].
    Series(usize),
    /// No colour, but a shape that the pointer meets.
    Clear,
}

impl PageColor {
    /// How many colours there are for things of one kind.
    pub const NUM_SERIES: usize = 8;

    const NAMED: [(PageColor, &'static str); 20] = [
        (PageColor::Text, "text"),
        (PageColor::Muted, "muted"),
        (PageColor::Grid, "grid"),
        (PageColor::Track, "track"),
        (PageColor::OnFill, "on-fill"),
        (PageColor::Compute, "compute"),
        (PageColor::Communication, "comm"),
        (PageColor::Memory, "memory"),
        (PageColor::Idle, "idle"),
        (PageColor::NonCompute, "non-compute"),
        (PageColor::Both, "both"),
        (PageColor::Wait, "wait"),
        (PageColor::Host, "host"),
        (PageColor::DataWait, "data-wait"),
        (PageColor::Forward, "forward"),
        (PageColor::Backward, "backward"),
        (PageColor::Sync, "sync"),
        (PageColor::Optimizer, "optimizer"),
        (PageColor::Other, "other"),
        (PageColor::Clear, "clear"),
    ];

    /// The variable of the style sheet.
    pub(super) fn variable(self) -> String {
        match self {
            PageColor::Series(number) => format!("--series-{}", number % Self::NUM_SERIES),
            named => format!("--{}", Self::NAMED[named.index()].1),
        }
    }

    /// The colour of text on a shape filled with this one.
    fn on(self) -> PageColor {
        match self {
            PageColor::Idle
            | PageColor::Grid
            | PageColor::Track
            | PageColor::Clear
            | PageColor::Wait => PageColor::Text,
            _ => PageColor::OnFill,
        }
    }

    fn index(self) -> usize {
        match self {
            PageColor::Series(number) => Self::NAMED.len() + number % Self::NUM_SERIES,
            named => Self::NAMED.iter().position(|(color, _)| *color == named).unwrap_or(0),
        }
    }

    /// The colour that stands for it until the drawing is done; no drawing has others.
    fn stand_in(self) -> RGBColor {
        RGBColor(1, 0, self.index() as u8)
    }

    fn all() -> impl Iterator<Item = PageColor> {
        let series = (0..Self::NUM_SERIES).map(PageColor::Series);
        Self::NAMED.iter().map(|(color, _)| *color).chain(series)
    }
}

/// Width of a chart that fills the page.
pub(super) const FULL: i32 = 1120;
/// Width of a chart that shares a row with another.
pub(super) const HALF: i32 = 540;
/// Width of a chart that shares a row with two others.
pub(super) const THIRD: i32 = 350;

/// The library draws at whole coordinates; this many of them make one pixel of a chart.
const FINE: f64 = 10.0;

/// The average width of a letter as a part of the font size. It is that of a wide font, because the reader's
/// font is unknown.
const WIDE: f64 = 0.61;

/// Sizes of text.
const SIZE: f64 = 12.0;
const SMALL: f64 = 11.0;

/// Where text stands in relation to its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Align {
    Left,
    Middle,
    Right,
}

/// A drawing in the making. Lengths are in the chart's own pixels, which the page scales.
struct Canvas {
    size: (f64, f64),
    body: String,
    title: String,
}

impl Canvas {
    /// A drawing of this size, which `title` describes to whoever cannot see it.
    fn new(width: i32, height: f64, title: &str) -> Result<Self, PlotError> {
        register_font("sans-serif", FontStyle::Normal, FONT).map_err(|_| PlotError::Draw {
            title: title.to_owned(),
            reason: "the font is not understood".to_owned(),
        })?;
        Ok(Self { size: (f64::from(width), height), body: String::new(), title: title.to_owned() })
    }

    /// A filled rectangle from the left top to the right bottom; `hover` is shown under the pointer.
    fn rect(&mut self, from: (f64, f64), to: (f64, f64), color: PageColor, hover: &str) -> Drawn {
        let style = color.stand_in().filled();
        self.draw(hover, |area| area.draw(&Rectangle::new([fine(from), fine(to)], style)))
    }

    /// A filled shape.
    fn polygon(&mut self, corners: &[(f64, f64)], color: PageColor, hover: &str) -> Drawn {
        let corners: Vec<_> = corners.iter().copied().map(fine).collect();
        self.draw(hover, |area| area.draw(&Polygon::new(corners, color.stand_in())))
    }

    /// A line through all points.
    fn line(&mut self, points: &[(f64, f64)], width: f64, color: PageColor, hover: &str) -> Drawn {
        let style = color.stand_in().stroke_width((width * FINE).round() as u32);
        let points: Vec<_> = points.iter().copied().map(fine).collect();
        self.draw(hover, |area| area.draw(&PathElement::new(points, style)))
    }

    /// Text whose middle line goes through the place.
    fn text(
        &mut self,
        words: &str,
        at: (f64, f64),
        size: f64,
        color: PageColor,
        align: Align,
    ) -> Drawn {
        self.hover_text(words, at, size, color, align, "")
    }

    fn hover_text(
        &mut self,
        words: &str,
        at: (f64, f64),
        size: f64,
        color: PageColor,
        align: Align,
        hover: &str,
    ) -> Drawn {
        let horizontal = match align {
            Align::Left => HPos::Left,
            Align::Middle => HPos::Center,
            Align::Right => HPos::Right,
        };
        // The back end divides the size of a font by this number.
        let font = ("sans-serif", size * FINE * 1.24).into_font();
        let colour = color.stand_in();
        let style = TextStyle::from(font).color(&colour).pos(Pos::new(horizontal, VPos::Center));
        self.draw(hover, |area| area.draw(&Text::new(words.to_owned(), fine(at), style)))
    }

    /// Draws something with the library and takes over what it wrote.
    fn draw<E: std::error::Error>(
        &mut self,
        hover: &str,
        draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), E>,
    ) -> Drawn {
        let failed = |e: &dyn std::error::Error| PlotError::Draw {
            title: self.title.clone(),
            reason: e.to_string(),
        };
        let mut text = String::new();
        {
            let size = (self.size.0 * FINE, self.size.1 * FINE);
            let size = (size.0 as u32, size.1 as u32);
            let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
            draw(&area).map_err(|e| failed(&e))?;
            area.present().map_err(|e| failed(&e))?;
        }
        // The first tag opens the whole and the last one closes it.
        let inner = text.split_once('\n').map_or("", |(_, rest)| rest);
        let inner = inner.rsplit_once("</svg>").map_or(inner, |(inner, _)| inner);
        if hover.is_empty() {
            self.body.push_str(inner);
        } else {
            self.body.push_str(&format!("<g><title>{}</title>{inner}</g>", escaped(hover)));
        }
        Ok(())
    }

    /// The name of a row, at the left of `left`.
    fn row_label(&mut self, label: &str, left: f64, middle: f64) -> Drawn {
        let words = fitted(label, SIZE, left - 10.0);
        self.hover_text(&words, (left - 8.0, middle), SIZE, PageColor::Text, Align::Right, label)
    }

    /// The ticks of a scale from zero to `end` below the rows, with lines from `top` to `bottom`.
    fn scale_below(
        &mut self,
        (end, count): (f64, f64),
        unit: &str,
        (top, bottom): (f64, f64),
        x: impl Fn(f64) -> f64,
    ) -> Drawn {
        let ticks = ticks(end, count);
        for (&tick, label) in ticks.iter().zip(tick_labels(&ticks, unit)) {
            self.line(&[(x(tick), top), (x(tick), bottom)], 1.0, PageColor::Grid, "")?;
            self.text(&label, (x(tick), bottom + 12.0), SMALL, PageColor::Muted, Align::Middle)?;
        }
        Ok(())
    }

    /// The finished element.
    fn finish(self) -> String {
        let mut body = self.body.replace(" opacity=\"1\"", "").replace(" stroke=\"none\"", "");
        body = body.replace(" font-family=\"sans-serif\"", "");
        for color in PageColor::all() {
            let RGBColor(r, g, b) = color.stand_in();
            let stand_in = format!("\"#{r:02X}{g:02X}{b:02X}\"");
            body = body.replace(&stand_in, &format!("\"var({})\"", color.variable()));
        }
        let (width, height) = self.size;
        format!(
            "<svg viewBox=\"0 0 {} {}\" style=\"max-width:{width}px\" role=\"img\" \
             aria-label=\"{}\">\n{body}</svg>\n",
            (width * FINE) as u32,
            (height * FINE) as u32,
            escaped(&self.title)
        )
    }
}

/// Names and colours, each name once, in order of appearance.
fn legend_of<'a>(all: impl Iterator<Item = (&'a str, PageColor)>) -> Vec<(String, PageColor)> {
    let mut legend: Vec<(String, PageColor)> = Vec::new();
    for (name, color) in all {
        if !legend.iter().any(|(of, _)| of == name) {
            legend.push((name.to_owned(), color));
        }
    }
    legend
}

type Drawn = Result<(), PlotError>;

fn fine((x, y): (f64, f64)) -> (i32, i32) {
    ((x * FINE).round() as i32, (y * FINE).round() as i32)
}

/// Text as it may stand in an element or an attribute.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // A name in a trace may hold anything, and other control characters are no text.
            c if c.is_control() && c != '\n' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Roughly how wide text is: the mean of a proportional font. A guess on the safe side; the browser
/// sets the text.
fn width_of(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * WIDE
}

/// The text, or its begin and its end if it would be wider than `room`.
fn fitted(text: &str, size: f64, room: f64) -> String {
    let fits = (room / (size * WIDE)) as usize;
    let chars: Vec<char> = text.chars().collect();
    if chars.len() <= fits {
        return text.to_owned();
    }
    let kept = fits.saturating_sub(1);
    let (head, tail) = (kept - kept / 3, kept / 3);
    let begin: String = chars[..head].iter().collect();
    let end: String = chars[chars.len() - tail..].iter().collect();
    format!("{begin}\u{2026}{end}")
}

/// The size of the column of labels at the left of a chart.
fn label_column<'a>(labels: impl Iterator<Item = &'a str>, width: f64) -> f64 {
    let widest = labels.map(|label| width_of(label, SIZE)).fold(0.0, f64::max);
    (widest + 10.0).min(width * 0.4)
}

/// Ticks from zero to `high`, about `count` of them, at round numbers.
fn ticks(high: f64, count: f64) -> Vec<f64> {
    if !(high > 0.0 && high.is_finite()) {
        return vec![0.0];
    }
    let power = 10f64.powf((high / count).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    let step = steps.into_iter().find(|step| high / step <= count * 1.3).unwrap_or(steps[3]);
    (0..=(high / step * (1.0 + 1e-9)) as u32).map(|at| f64::from(at) * step).collect()
}

/// How ticks are written: all with as many decimals as their distance needs, the last with the unit.
fn tick_labels(ticks: &[f64], unit: &str) -> Vec<String> {
    let step = ticks.get(1).copied().unwrap_or(1.0);
    let decimals = if step >= 1.0 { 0 } else { (-step.log10() - 1e-9).ceil() as usize };
    let label = |(at, &tick): (usize, &f64)| {
        let unit = if at + 1 == ticks.len() { format!(" {unit}") } else { String::new() };
        match tick {
            0.0 => format!("0{unit}"),
            _ if decimals > 4 => format!("{tick:.0e}{unit}"),
            _ => format!("{}{unit}", crate::table::grouped(tick, decimals)),
        }
    };
    ticks.iter().enumerate().map(label).collect()
}

/// A number for a label by itself, with four significant digits at most.
pub(super) fn brief(value: f64) -> String {
    match value.abs() {
        size if value == value.round() && size < 1e6 => crate::table::grouped(value, 0),
        size if size < 0.01 => format!("{value:.2e}"),
        size => crate::table::grouped(value, decimals_for(size)),
    }
}

/// How many decimals all numbers of a chart have whose largest is this one.
fn decimals_for(largest: f64) -> usize {
    match largest.abs() {
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    }
}

/// A function that writes all numbers of a chart with the same number of decimals; without decimals if all
/// numbers are whole.
fn like(values: impl Iterator<Item = f64> + Clone) -> impl Fn(f64) -> String {
    let is_whole = values.clone().all(|value| value == value.round());
    let largest = values.map(f64::abs).filter(|value| value.is_finite()).fold(0.0, f64::max);
    let decimals = if is_whole { 0 } else { decimals_for(largest) };
    let is_tiny = largest < 0.01 && !is_whole;
    move |value| match is_tiny {
        true => format!("{value:.2e}"),
        false => crate::table::grouped(value, decimals),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawings_have_the_colours_of_the_page() {
        let mut canvas = Canvas::new(100, 40.0, "a <title>").unwrap();
        canvas.rect((0.0, 0.0), (10.0, 5.5), PageColor::Compute, "1 & 2").unwrap();
        canvas.text("x<y", (1.0, 2.0), SIZE, PageColor::Series(9), Align::Left).unwrap();
        let svg = canvas.finish();
        assert!(svg.contains("<g><title>1 &amp; 2</title><rect"), "{svg}");
        assert!(svg.contains("height=\"55\" fill=\"var(--compute)\"/>"), "{svg}");
        assert!(svg.contains("x&lt;y") && svg.contains("fill=\"var(--series-1)\""), "{svg}");
        assert!(svg.contains("aria-label=\"a &lt;title&gt;\""), "{svg}");
        assert!(!svg.contains('#') && !svg.contains("http"), "{svg}");
    }

    #[test]
    fn long_names_keep_both_ends() {
        assert_eq!(fitted("short", SIZE, 100.0), "short");
        let cut = fitted("ncclDevKernel_AllReduce_Sum_f32_RING_LL", SIZE, 100.0);
        assert!(cut.starts_with("ncclDevK") && cut.ends_with("_LL"), "{cut}");
        assert!(width_of(&cut, SIZE) <= 100.0);
        assert_eq!(fitted("anything", SIZE, 0.0), "\u{2026}");
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(100.0, 5.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks(0.0, 5.0), [0.0]);
        assert_eq!(ticks(f64::NAN, 5.0), [0.0]);
        assert!(ticks(0.37, 6.0).len() >= 4);
        assert_eq!(tick_labels(&ticks(2.0, 4.0), "ms"), ["0", "0.5", "1.0", "1.5", "2.0 ms"]);
        assert_eq!(tick_labels(&ticks(0.2, 4.0), "s"), ["0", "0.05", "0.10", "0.15", "0.20 s"]);
        assert_eq!(
            tick_labels(&ticks(4000.0, 4.0), ""),
            ["0", "1,000", "2,000", "3,000", "4,000 "]
        );
        assert_eq!(tick_labels(&ticks(0.0, 4.0), "s"), ["0 s"]);
    }

    #[test]
    fn labels_have_few_digits() {
        let all = [0.0, 12.0, 1234.56, 123.456, 1.234, 0.01234, 1e-5].map(brief);
        assert_eq!(all, ["0", "12", "1,235", "123.5", "1.23", "0.012", "1.00e-5"]);
    }
}
