//! Horizontal bars, one below the other, each with its value at its end.

use maud::Markup;

use super::color::PageColor;
use super::labels::RowLabels;
use super::scale::like;
use super::words::{SIZE, width_of};
use crate::canvas::{Align, Canvas};

/// A bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// The name of the bar.
    pub label: String,
    /// Its value, which decides its length; `None` if it is missing.
    pub value: Option<f64>,
    /// Its color.
    pub color: PageColor,
}

/// Bars with a common unit, from zero.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bars {
    /// The unit, written after each value.
    pub unit: String,
    /// The value of a full-length bar, for example 100 for percentages. If `None`, the longest bar is
    /// full-length.
    pub whole: Option<f64>,
    /// The bars, from top to bottom.
    pub bars: Vec<Bar>,
}

const ROW: f64 = 24.0;
const THICK: f64 = 15.0;

impl Bars {
    /// The `<svg>` element, `width` pixels wide.
    pub fn svg(&self, width: i32, title: &str) -> Markup {
        let labels = RowLabels::new(self.bars.iter().map(|bar| bar.label.as_str()), width);
        let row = ROW + labels.above();
        let mut canvas = Canvas::new(f64::from(width), row * self.bars.len().max(1) as f64 + 2.0);
        let left = labels.left();
        let number = like(self.bars.iter().filter_map(|bar| bar.value));
        let shown = |bar: &Bar| match bar.value {
            Some(value) => format!("{} {}", number(value), self.unit),
            None => "no value".to_owned(),
        };
        let values = self.bars.iter().map(|bar| width_of(&shown(bar), SIZE));
        let right = f64::from(width) - values.fold(0.0, f64::max) - 10.0;
        let longest = self.bars.iter().filter_map(|bar| bar.value).fold(0.0, f64::max);
        let longest = self.whole.unwrap_or(0.0).max(longest);
        for (at, bar) in self.bars.iter().enumerate() {
            let top = at as f64 * row + labels.above();
            let middle = top + ROW / 2.0 + 1.0;
            labels.draw(&mut canvas, &bar.label, top, middle);
            self.bar(&mut canvas, bar, (left, right, middle), longest, &shown(bar));
        }
        let bottom = row * self.bars.len() as f64;
        canvas.line(&[(left, 1.0), (left, bottom + 1.0)], 1.0, PageColor::Grid, "");
        canvas.element(title)
    }

    fn bar(
        &self,
        canvas: &mut Canvas,
        bar: &Bar,
        (left, right, middle): (f64, f64, f64),
        longest: f64,
        shown: &str,
    ) {
        let part = match bar.value {
            Some(value) if longest > 0.0 && value.is_finite() => (value / longest).max(0.0),
            _ => 0.0,
        };
        let (top, below) = (middle - THICK / 2.0, middle + THICK / 2.0);
        if self.whole.is_some() {
            canvas.rect((left, top), (right, below), PageColor::Track, "");
        }
        let end = left + (right - left).max(0.0) * part;
        let exact = bar.value.map_or_else(String::new, |v| format!(" ({v} {})", self.unit));
        canvas.rect(
            (left, top),
            (end, below),
            bar.color,
            &format!("{}: {shown}{exact}", bar.label),
        );
        let end = if self.whole.is_some() { right } else { end };
        canvas.text(shown, (end + 6.0, middle), SIZE, PageColor::Text, Align::Left)
    }
}
