//! The legend of a chart: a sample and a name for each kind of mark, in lines above the chart.
//!
//! Names and samples go in. A name that is longer than a line has lines of its own, so nothing runs off the picture. This file
//! does not know the marks.

use super::canvas::{Align, Canvas, Font, Point};
use super::color::Color;
use super::words::{SMALL, broken, width_of};

const LINE: f64 = 18.0;
const GAP: f64 = 16.0;

/// Draws the legend, whose samples take `room` pixels each, from `top` on. Returns its lower edge. A single entry needs no legend.
pub(super) fn legend<T>(
    canvas: &mut Canvas,
    entries: &[(&str, T)],
    (top, room): (f64, f64),
    sample: impl Fn(&mut Canvas, Point, &T),
) -> f64 {
    if entries.len() < 2 {
        return top;
    }
    let whole = canvas.width;
    let mut pieces = Vec::new();
    for (name, of) in entries {
        let lines = broken(name, SMALL, whole - room);
        let length = if lines.len() > 1 { whole } else { room + width_of(&lines[0], SMALL) };
        let samples = std::iter::once(Some(of)).chain(std::iter::repeat(None));
        pieces.extend(lines.into_iter().zip(samples).map(|(words, of)| (words, length, of, name)));
    }
    let places = flowed(pieces.iter().map(|piece| piece.1), whole);
    for ((words, _, of, name), (x, line)) in pieces.iter().zip(&places) {
        let y = top + LINE * (*line as f64 + 0.5);
        if let Some(of) = of {
            sample(canvas, (*x, y), of);
        }
        canvas.text(words, (x + room, y), Font(SMALL, Color::Muted, Align::Left), name);
    }
    top + LINE * (places.last().map_or(0, |last| last.1) + 1) as f64 + 4.0
}

/// Where pieces of these lengths stand, one after the other, in as many lines as they need: the distance from the left edge,
/// and the number of the line.
pub(super) fn flowed(lengths: impl Iterator<Item = f64>, room: f64) -> Vec<(f64, usize)> {
    let (mut x, mut line) = (0.0, 0);
    let place = |length: f64| {
        if x > 0.0 && x + length > room {
            (x, line) = (0.0, line + 1);
        }
        let at = (x, line);
        x += length + GAP;
        at
    };
    lengths.map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_filled_one_after_the_other() {
        let lines = |lengths: &[f64], room| {
            let places = flowed(lengths.iter().copied(), room);
            places.into_iter().map(|(_, line)| line).collect::<Vec<_>>()
        };
        assert_eq!(lines(&[20.0; 7], 3.0 * (20.0 + GAP)), [0, 0, 0, 1, 1, 1, 2]);
        assert_eq!(lines(&[20.0, 90.0], 1.0), [0, 1], "one that is wider has a line of its own");
    }
}
