//! Where the names of rows go: into a column at the left, or, on a narrow chart with long names, above their
//! rows. Draws the scale below the rows too.
//!
//! Names and the width of a chart go in. This file does not know what a row shows.

use super::THIRD;
use super::color::PageColor;
use super::scale::{tick_count, tick_labels, ticks};
use super::words::{SIZE, SMALL, fitted, width_of};
use crate::canvas::{Align, Canvas};

/// The height of a line of text above a row.
const LINE: f64 = 17.0;
/// Where rows without a column begin: half of the first label of a scale lies to the left of it.
const EDGE: f64 = 4.0;

/// The place of the names of all rows of a chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RowLabels {
    /// In a column of this width.
    Left(f64),
    /// Above the rows, which begin at the left edge. The width of the chart.
    Above(f64),
}

impl RowLabels {
    /// The place for these names. A column takes at most 40 % of `width`, so a longer name loses its middle. On a
    /// chart for a phone little would be left of it, so it goes above its row.
    pub(super) fn new<'a>(names: impl Iterator<Item = &'a str>, width: i32) -> Self {
        let widest = names.map(|name| width_of(name, SIZE)).fold(0.0, f64::max) + 10.0;
        let most = f64::from(width) * 0.4;
        if widest > most && width <= THIRD {
            RowLabels::Above(f64::from(width))
        } else {
            RowLabels::Left(widest.min(most))
        }
    }

    /// Where the rows begin.
    pub(super) fn left(self) -> f64 {
        match self {
            RowLabels::Left(column) => column,
            RowLabels::Above(_) => EDGE,
        }
    }

    /// The height that a name adds above its row.
    pub(super) fn above(self) -> f64 {
        match self {
            RowLabels::Left(_) => 0.0,
            RowLabels::Above(_) => LINE,
        }
    }

    /// Draws the name of the row whose top, without the name, is `top` and whose middle is `middle`.
    pub(super) fn draw(self, canvas: &mut Canvas, name: &str, top: f64, middle: f64) {
        let (room, at, align) = match self {
            RowLabels::Left(column) => (column - 10.0, (column - 8.0, middle), Align::Right),
            RowLabels::Above(width) => (width - EDGE, (EDGE, top - LINE / 2.0 + 2.0), Align::Left),
        };
        let words = fitted(name, SIZE, room);
        canvas.hover_text(&words, at, SIZE, PageColor::Text, align, name);
    }
}

/// Draws a scale from zero to `end` below the rows. Each tick has a line from `top` to `bottom`.
pub(super) fn scale_below(
    canvas: &mut Canvas,
    end: f64,
    unit: &str,
    (top, bottom): (f64, f64),
    x: impl Fn(f64) -> f64,
) {
    let ticks = ticks(end, tick_count(x(end) - x(0.0)));
    for (&tick, label) in ticks.iter().zip(tick_labels(&ticks, unit)) {
        canvas.line(&[(x(tick), top), (x(tick), bottom)], 1.0, PageColor::Grid, "");
        canvas.text(&label, (x(tick), bottom + 12.0), SMALL, PageColor::Muted, Align::Middle);
    }
}

#[cfg(test)]
mod tests {
    use super::super::HALF;
    use super::*;

    #[test]
    fn only_long_names_on_a_narrow_chart_go_above_their_rows() {
        let long = "paceline_conv_relu_pool_backward_input";
        assert_eq!(RowLabels::new(["rank 0"].into_iter(), THIRD).above(), 0.0);
        assert_eq!(RowLabels::new([long].into_iter(), HALF), RowLabels::Left(0.4 * 540.0));
        let above = RowLabels::new(["rank 0", long].into_iter(), THIRD);
        assert_eq!((above.left(), above.above()), (EDGE, LINE));
        let mut canvas = Canvas::new(350.0, 40.0);
        above.draw(&mut canvas, long, 20.0, 30.0);
        assert!(canvas.file().contains(&format!(">{long}<")), "the whole name");
    }
}
