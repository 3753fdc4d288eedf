//! The canvas on which charts are drawn, in the chart's own pixels.
//!
//! Shapes and text go in, each with a [`PageColor`] that says what its color means. The text of an `<svg>`
//! element comes out. `plotters` draws with fixed colors, which are then replaced by variables of the page's
//! style sheet. This file does not know what kind of chart it draws.

use paceline_files::{printable, printable_lines};
use plotters::coord::Shift;
use plotters::element::{PathElement, Polygon, Rectangle, Text};
use plotters::prelude::{DrawingArea, IntoDrawingArea, RGBColor, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, IntoFont, TextStyle, register_font};

use super::color::PageColor;
use super::scale::{tick_count, tick_labels, ticks};
use crate::plot::{FONT, PlotError};

/// `plotters` draws at whole coordinates. This many of them make one pixel of a chart.
const FINE: f64 = 10.0;

/// The average width of a letter, as a fraction of the font size. It is that of a wide font, because the
/// reader's font is unknown.
const WIDE: f64 = 0.61;

/// Font sizes.
pub(super) const SIZE: f64 = 12.0;
pub(super) const SMALL: f64 = 11.0;

/// How text is aligned to its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Middle,
    Right,
}

/// A drawing that is not finished yet. Lengths are in the chart's own pixels, which the page scales.
pub(super) struct Canvas {
    size: (f64, f64),
    body: String,
    title: String,
}

impl Canvas {
    /// An empty drawing of this size. `title` describes it to readers who cannot see it.
    pub(super) fn new(width: i32, height: f64, title: &str) -> Result<Self, PlotError> {
        register_font("sans-serif", FontStyle::Normal, FONT).map_err(|_| PlotError::Draw {
            title: title.to_owned(),
            reason: "the font is not understood".to_owned(),
        })?;
        Ok(Self { size: (f64::from(width), height), body: String::new(), title: title.to_owned() })
    }

    /// Draws a filled rectangle from the top left to the bottom right. `hover` is shown under the pointer.
    pub(super) fn rect(
        &mut self,
        from: (f64, f64),
        to: (f64, f64),
        color: PageColor,
        hover: &str,
    ) -> Drawn {
        let style = color.stand_in().filled();
        self.draw(hover, |area| area.draw(&Rectangle::new([fine(from), fine(to)], style)))
    }

    /// Draws a filled shape.
    pub(super) fn polygon(
        &mut self,
        corners: &[(f64, f64)],
        color: PageColor,
        hover: &str,
    ) -> Drawn {
        let corners: Vec<_> = corners.iter().copied().map(fine).collect();
        self.draw(hover, |area| area.draw(&Polygon::new(corners, color.stand_in())))
    }

    /// Draws a line through all points.
    pub(super) fn line(
        &mut self,
        points: &[(f64, f64)],
        width: f64,
        color: PageColor,
        hover: &str,
    ) -> Drawn {
        let style = color.stand_in().stroke_width((width * FINE).round() as u32);
        let points: Vec<_> = points.iter().copied().map(fine).collect();
        self.draw(hover, |area| area.draw(&PathElement::new(points, style)))
    }

    /// Draws text that is vertically centered at `at`.
    pub(super) fn text(
        &mut self,
        words: &str,
        at: (f64, f64),
        size: f64,
        color: PageColor,
        align: Align,
    ) -> Drawn {
        self.hover_text(words, at, size, color, align, "")
    }

    pub(super) fn hover_text(
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
        // The back end divides font sizes by 1.24.
        let font = ("sans-serif", size * FINE * 1.24).into_font();
        let color = color.stand_in();
        let style = TextStyle::from(font).color(&color).pos(Pos::new(horizontal, VPos::Center));
        let words = printable(words).into_owned();
        self.draw(hover, |area| area.draw(&Text::new(words, fine(at), style)))
    }

    /// Lets `draw` draw with the library, and adds what the library wrote to the body.
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
        // The first line opens the `<svg>` element and the last tag closes it: both are dropped.
        let inner = text.split_once('\n').map_or("", |(_, rest)| rest);
        let inner = inner.rsplit_once("</svg>").map_or(inner, |(inner, _)| inner);
        if hover.is_empty() {
            self.body.push_str(inner);
        } else {
            self.body.push_str(&format!("<g><title>{}</title>{inner}</g>", escaped(hover)));
        }
        Ok(())
    }

    /// Draws a scale from zero to `end` below the rows. Each tick has a line from `top` to `bottom`.
    pub(super) fn scale_below(
        &mut self,
        end: f64,
        unit: &str,
        (top, bottom): (f64, f64),
        x: impl Fn(f64) -> f64,
    ) -> Drawn {
        let ticks = ticks(end, tick_count(x(end) - x(0.0)));
        for (&tick, label) in ticks.iter().zip(tick_labels(&ticks, unit)) {
            self.line(&[(x(tick), top), (x(tick), bottom)], 1.0, PageColor::Grid, "")?;
            self.text(&label, (x(tick), bottom + 12.0), SMALL, PageColor::Muted, Align::Middle)?;
        }
        Ok(())
    }

    /// The finished element.
    pub(super) fn finish(self) -> String {
        let mut body = self.body.replace(" opacity=\"1\"", "").replace(" stroke=\"none\"", "");
        body = body.replace(" font-family=\"sans-serif\"", "");
        for color in PageColor::all() {
            let RGBColor(r, g, b) = color.stand_in();
            let stand_in = format!("\"#{r:02X}{g:02X}{b:02X}\"");
            body = body.replace(&stand_in, &format!("\"var({})\"", color.variable()));
        }
        let (width, height) = self.size;
        format!(
            "<svg class=\"w{width}\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n\
             {body}</svg>\n",
            (width * FINE) as u32,
            (height * FINE) as u32,
            escaped(&self.title)
        )
    }
}

/// Names and colors, each name once, in order of appearance.
pub(super) fn legend_of<'a>(
    all: impl Iterator<Item = (&'a str, PageColor)>,
) -> Vec<(String, PageColor)> {
    let mut legend: Vec<(String, PageColor)> = Vec::new();
    for (name, color) in all {
        if !legend.iter().any(|(of, _)| of == name) {
            legend.push((name.to_owned(), color));
        }
    }
    legend
}

pub(super) type Drawn = Result<(), PlotError>;

fn fine((x, y): (f64, f64)) -> (i32, i32) {
    ((x * FINE).round() as i32, (y * FINE).round() as i32)
}

/// Text escaped for an element or an attribute of the page. A name in a trace may hold anything, and most control
/// characters may not stand in XML at all.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in printable_lines(text).chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Estimates how wide text is, from the average letter of a proportional font. The estimate is on the safe
/// side, because the browser chooses the font.
pub(super) fn width_of(text: &str, size: f64) -> f64 {
    printable(text).chars().count() as f64 * size * WIDE
}

/// The text, or its beginning and its end if the whole would be wider than `room`.
pub(super) fn fitted(text: &str, size: f64, room: f64) -> String {
    let fits = (room / (size * WIDE)) as usize;
    let text = printable(text);
    let chars: Vec<char> = text.chars().collect();
    if chars.len() <= fits {
        return text.into_owned();
    }
    let kept = fits.saturating_sub(1);
    let (head, tail) = (kept - kept / 3, kept / 3);
    let begin: String = chars[..head].iter().collect();
    let end: String = chars[chars.len() - tail..].iter().collect();
    format!("{begin}\u{2026}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawings_have_the_colors_of_the_page() {
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
}
