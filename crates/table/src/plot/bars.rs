//! A chart of horizontal bars in groups, each with its value and its range.
//!
//! Named groups of values go in; they are drawn on a white surface. This file does not know whether that is an SVG or a bitmap.

use super::bitmap::Font;
use super::chart::SIZE;
use super::draw::{Color, SMALL, Surface, TEXT_COLOR};
use super::line::COLORS;
use super::{Picture, PlotError};
use crate::canvas::{Align, Point};

/// A bar.
#[derive(Clone, Debug)]
pub struct RangedBar {
    /// The name of the bar.
    pub name: String,
    /// The length of the bar.
    pub value: f64,
    /// The smallest and the largest value, which are drawn as a thin line.
    pub range: (f64, f64),
    /// The value in words, at the end of the bar.
    pub words: String,
}

/// Bars that are compared with each other.
#[derive(Clone, Debug)]
pub struct BarGroup {
    /// The heading of the group. May be empty.
    pub name: String,
    /// The bars, from top to bottom.
    pub bars: Vec<RangedBar>,
}

/// Horizontal bars in groups, all from zero and on one scale.
#[derive(Clone, Debug)]
pub struct BarChart {
    /// The title.
    pub title: String,
    /// A line below the title.
    pub subtitle: String,
    /// The quantity that the bars show, with the unit.
    pub label: String,
    /// The groups, from top to bottom.
    pub groups: Vec<BarGroup>,
}

const GRAY: Color = [110; 3];
const FAINT: Color = [225; 3];
const MARGIN: f64 = 14.0;
const TOP: f64 = 92.0;
const BOTTOM: f64 = SIZE.1 as f64 - 60.0;
const WIDTH: f64 = SIZE.0 as f64;
/// The most room for names.
const NAMES: f64 = 0.42 * WIDTH;
/// The largest height of a row.
const ROW: f64 = 40.0;

impl Picture for BarChart {
    fn title(&self) -> &str {
        &self.title
    }

    fn draw(&self, surface: &mut dyn Surface, font: &Font) -> Result<(), PlotError> {
        let bars = || self.groups.iter().flat_map(|group| &group.bars);
        let longest = bars().map(|bar| bar.value.max(bar.range.1)).fold(0.0, f64::max);
        if !(longest > 0.0 && longest.is_finite()) {
            return Err(PlotError::Empty { title: self.title.clone() });
        }
        let named = self.groups.iter().filter(|group| !group.name.is_empty()).count();
        let row = ((BOTTOM - TOP) / (bars().count() + named) as f64).min(ROW);
        let size = SMALL.min(row * 0.62);
        let widest = |words: &mut dyn Iterator<Item = &str>| {
            words.map(|words| font.width(words, size)).fold(0.0, f64::max)
        };
        let left = MARGIN + widest(&mut bars().map(|bar| bar.name.as_str())).min(NAMES) + 12.0;
        let right = WIDTH - MARGIN - widest(&mut bars().map(|bar| bar.words.as_str())) - 12.0;
        let place = |value: f64| left + (right - left) * (value / longest).max(0.0);
        for (words, y, most, color) in
            [(&self.title, 32.0, 27.0, TEXT_COLOR), (&self.subtitle, 66.0, SMALL, GRAY)]
        {
            let fitting = most * ((WIDTH - 2.0 * MARGIN) / font.width(words, most)).min(1.0);
            surface.write(words, (MARGIN, y), fitting, color, Align::Left);
        }
        let mut y = TOP;
        for group in &self.groups {
            if !group.name.is_empty() {
                let middle = y + row / 2.0;
                surface.write(&group.name, (MARGIN, middle), size, GRAY, Align::Left);
                surface.stroke(&[(MARGIN, y), (WIDTH - MARGIN, y)], 1.0, FAINT, None);
                y += row;
            }
            for (at, bar) in group.bars.iter().enumerate() {
                let middle = y + row / 2.0;
                let (from, to) = (y + row * 0.18, y + row * 0.82);
                let end = place(bar.value);
                let corners: [Point; 4] = [(left, from), (end, from), (end, to), (left, to)];
                surface.fill(&corners, COLORS[at % COLORS.len()]);
                let (low, high) = (place(bar.range.0), place(bar.range.1));
                surface.stroke(&[(low, middle), (high, middle)], 2.0, GRAY, None);
                let fitting =
                    size * ((left - MARGIN - 12.0) / font.width(&bar.name, size)).min(1.0);
                surface.write(&bar.name, (left - 10.0, middle), fitting, TEXT_COLOR, Align::Right);
                let after = (end.max(high) + 8.0, middle);
                surface.write(&bar.words, after, size, TEXT_COLOR, Align::Left);
                y += row;
            }
        }
        surface.stroke(&[(left, TOP), (left, y)], 1.0, GRAY, None);
        let below = ((left + right) / 2.0, SIZE.1 as f64 - 30.0);
        surface.write(&self.label, below, SMALL, TEXT_COLOR, Align::Middle);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_carry_their_names_and_values() {
        let bar = |name: &str, value: f64| RangedBar {
            name: name.to_owned(),
            value,
            range: (value * 0.9, value * 1.1),
            words: format!("{value} images/s"),
        };
        let chart = |bars: Vec<RangedBar>| BarChart {
            title: "Copies & steps".to_owned(),
            subtitle: String::new(),
            label: "images/s".to_owned(),
            groups: vec![BarGroup { name: "16 Gbit/s".to_owned(), bars }],
        };
        let drawn = chart(vec![bar("in line", 100.0), bar("pinned", 160.0)]);
        let svg = drawn.svg().unwrap();
        for part in ["Copies &amp; steps", "in line", "160 images/s", "16 Gbit/s"] {
            assert!(svg.contains(part), "{part}");
        }
        assert!(drawn.png().unwrap().len() > 1000);
        assert!(matches!(chart(vec![bar("nothing", 0.0)]).svg(), Err(PlotError::Empty { .. })));
    }
}
