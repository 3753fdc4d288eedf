//! The colours of charts, by what they stand for.
//!
//! A meaning goes in; a variable of the page's style sheet comes out, and the fixed colour that stands in for it
//! while a chart is drawn. What the colours look like is decided by the page.

use plotters::prelude::RGBColor;

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
    pub(crate) fn variable(self) -> String {
        match self {
            PageColor::Series(number) => format!("--series-{}", number % Self::NUM_SERIES),
            named => format!("--{}", Self::NAMED[named.index()].1),
        }
    }

    /// The colour of text on a shape filled with this one.
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

    fn index(self) -> usize {
        match self {
            PageColor::Series(number) => Self::NAMED.len() + number % Self::NUM_SERIES,
            named => Self::NAMED.iter().position(|(color, _)| *color == named).unwrap_or(0),
        }
    }

    /// The colour that stands for it until the drawing is done; no drawing has others.
    pub(super) fn stand_in(self) -> RGBColor {
        RGBColor(1, 0, self.index() as u8)
    }

    pub(super) fn all() -> impl Iterator<Item = PageColor> {
        let series = (0..Self::NUM_SERIES).map(PageColor::Series);
        Self::NAMED.iter().map(|(color, _)| *color).chain(series)
    }
}
