//! Charts of a report, as SVG elements for a page with a light and a dark theme.
//!
//! Named values and the meanings of their colors go in. An `<svg>` element comes out. Its colors are variables of the page's
//! style sheet, so the page decides how they look. A chart does not know what was measured.

mod bars;
mod color;
mod donut;
mod labels;
mod lanes;
mod lines;
mod scale;
mod stacked;
mod words;

pub use bars::{Bar, Bars};
pub use color::PageColor;
pub use donut::{Donut, Donuts};
pub use lanes::{Jump, Lane, Lanes, Segment};
pub use lines::{Line, Lines};
pub use stacked::{Part, Stack, Stacked};

/// Width, in pixels, of a chart that fills the page.
pub const FULL: i32 = 1120;
/// Width of a chart that shares a row with another.
pub const HALF: i32 = 540;
/// Width of a chart that shares a row with two others, and of every chart on a phone.
pub const THIRD: i32 = 350;
/// All widths, the largest first. `page.css` shows the drawing that suits the room that a panel has.
pub const WIDTHS: [i32; 3] = [FULL, HALF, THIRD];
