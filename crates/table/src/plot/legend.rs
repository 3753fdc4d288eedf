//! The legend of a line chart: a column at its right with a sample of each line and its name.
//!
//! Series go in. A name that is too long for the column is broken into lines, so nothing runs off the picture.
//! This file does not know the axes.

use super::chart::{SIZE, Series};
use super::draw::{SMALL, Surface, TEXT_COLOR};
use super::line::sample;
use crate::canvas::{Align, Point};

/// The distance from the plot area to the samples, their length, and the distance to the names.
const BEFORE: f64 = 22.0;
const SAMPLE: f64 = 48.0;
const AFTER: f64 = 10.0;
/// The largest width of names. The lines of the chart keep half of it.
const MOST: f64 = SIZE.0 as f64 / 2.0 - BEFORE - SAMPLE - AFTER;
/// From the first line of a name to that of the next name, and from line to line within a name.
const ENTRY: f64 = 34.0;
const LINE: f64 = 24.0;

/// The legend of some series, with its names broken into lines.
pub(super) struct Legend<'a> {
    entries: Vec<(&'a Series, Vec<String>)>,
    /// The width of the widest line.
    names: f64,
    /// By how much distances are reduced, so that all entries have room.
    scale: f64,
}

impl<'a> Legend<'a> {
    /// A legend of this height. `width` measures text.
    pub(super) fn new(series: &'a [Series], height: f64, width: impl Fn(&str) -> f64) -> Self {
        let entry = |series: &'a Series| (series, broken(&series.name, MOST, &width));
        let entries: Vec<_> = series.iter().map(entry).collect();
        let names = entries.iter().flat_map(|(_, lines)| lines).map(|line| width(line));
        let names = names.fold(0.0, f64::max).min(MOST);
        let needed: f64 = entries.iter().map(|(_, lines)| height_of(lines)).sum();
        Self { entries, names, scale: (height / needed.max(1.0)).min(1.0) }
    }

    /// The width of the whole column.
    pub(super) fn width(&self) -> f64 {
        BEFORE + SAMPLE + AFTER + self.names
    }

    /// Draws the legend from the corner at its top left. `is_point` says whether a series has a single point: its
    /// sample is its marker, like in the chart.
    pub(super) fn draw(
        &self,
        surface: &mut dyn Surface,
        (left, top): Point,
        is_point: impl Fn(&Series) -> bool,
    ) {
        let size = SMALL.min(LINE * self.scale - 2.0).max(4.0);
        let mut y = top + 14.0;
        for (series, lines) in &self.entries {
            let x = left + BEFORE;
            sample(surface, series, [(x, y), (x + SAMPLE, y)], is_point(series));
            for (at, words) in lines.iter().enumerate() {
                let place = (x + SAMPLE + AFTER, y + at as f64 * LINE * self.scale);
                surface.write(words, place, size, TEXT_COLOR, Align::Left);
            }
            y += height_of(lines) * self.scale;
        }
    }
}

/// The height of a name with its distance to the next one.
fn height_of(lines: &[String]) -> f64 {
    ENTRY + LINE * lines.len().saturating_sub(1) as f64
}

/// Breaks a name into lines of at most `most`, at spaces if that is possible.
fn broken(name: &str, most: f64, width: impl Fn(&str) -> f64) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in name.split_inclusive(' ') {
        let longer = format!("{line}{word}");
        if width(longer.trim_end()) <= most {
            line = longer;
            continue;
        }
        if !line.is_empty() {
            lines.push(std::mem::take(&mut line));
        }
        for letter in word.chars() {
            if !line.is_empty() && width(&format!("{line}{letter}")) > most {
                lines.push(std::mem::take(&mut line));
            }
            line.push(letter);
        }
    }
    lines.push(line);
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_broken_at_spaces_and_long_words_anywhere() {
        let broken = |name| broken(name, 10.0, |words| words.chars().count() as f64);
        assert_eq!(broken("shm, 2 ranks"), ["shm, 2", "ranks"]);
        assert_eq!(broken("short"), ["short"]);
        assert_eq!(broken(""), [""]);
        assert_eq!(broken("a strategy.bucket_cap_mb=1"), ["a", "strategy.b", "ucket_cap_", "mb=1"]);
    }
}
