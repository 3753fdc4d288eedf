//! The colors of charts, named by their meaning.
//!
//! A meaning goes in. A variable of the page's style sheet comes out. The page decides how the colors look.

use maud::Render;

/// The meaning of a color. The page's style sheet has a variable for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageColor {
    /// Text.
    Text,
    /// Less prominent text.
    Muted,
    /// Background lines.
    Grid,
    /// The part of a row that a bar could fill.
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
    /// Work other than arithmetic.
    NonCompute,
    /// Computation and communication at the same time.
    Both,
    /// Waiting for another rank.
    Wait,
    /// The host, where it neither computes nor communicates.
    Host,
    /// Part of a step: waiting for a batch.
    DataWait,
    /// Part of a step: the forward pass.
    Forward,
    /// Part of a step: the backward pass.
    Backward,
    /// Part of a step: the time that synchronization adds.
    Sync,
    /// Part of a step: the update.
    Optimizer,
    /// Everything without a category of its own.
    Other,
    /// One of several things of the same kind, by number. Colors repeat after [`PageColor::NUM_SERIES`].
    Series(usize),
    /// Transparent: an invisible shape that reacts to the pointer.
    Clear,
}

impl PageColor {
    /// How many colors there are for things of the same kind.
    pub const NUM_SERIES: usize = 8;

    /// The color of text on a shape filled with this one.
    pub(super) fn on(self) -> PageColor {
        match self {
            PageColor::Idle
            | PageColor::Grid
            | PageColor::Track
            | PageColor::Clear
            | PageColor::Wait => PageColor::Text,
            _ => PageColor::OnFill,
        }
    }
}

impl Render for PageColor {
    /// The value of an attribute: a variable of the style sheet.
    fn render_to(&self, out: &mut String) {
        let name = match self {
            PageColor::Series(number) => &format!("series-{}", number % Self::NUM_SERIES),
            PageColor::Text => "text",
            PageColor::Muted => "muted",
            PageColor::Grid => "grid",
            PageColor::Track => "track",
            PageColor::OnFill => "on-fill",
            PageColor::Compute => "compute",
            PageColor::Communication => "comm",
            PageColor::Memory => "memory",
            PageColor::Idle => "idle",
            PageColor::NonCompute => "non-compute",
            PageColor::Both => "both",
            PageColor::Wait => "wait",
            PageColor::Host => "host",
            PageColor::DataWait => "data-wait",
            PageColor::Forward => "forward",
            PageColor::Backward => "backward",
            PageColor::Sync => "sync",
            PageColor::Optimizer => "optimizer",
            PageColor::Other => "other",
            PageColor::Clear => "clear",
        };
        out.push_str(&format!("var(--{name})"));
    }
}
