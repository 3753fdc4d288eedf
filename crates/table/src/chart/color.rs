//! The colors of charts, named by their meaning, for light and dark pages and files.
//!
//! A meaning goes in; a variable of a style sheet comes out. [`style`] defines these variables for a page. A file is drawn with
//! the light colors themselves, because only browsers know variables.

use maud::Render;

/// The meaning of a color.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Color {
    /// The background.
    Card,
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
    /// One of several things of the same kind, by number. Colors repeat after eight.
    Series(usize),
}

/// The names of the variables, with the light and the dark color. Text on a filled shape has a contrast of 4.5 or more. Equal
/// light colors have equal dark colors; so the white of the background is a word.
#[rustfmt::skip]
const LOOKS: [[&str; 3]; 28] = [
    ["card", "white", "#1a1e25"],
    ["text", "#1b1f24", "#e6e9ee"],
    ["muted", "#5c6570", "#9aa4b1"],
    ["grid", "#e3e6ea", "#323943"],
    ["track", "#f0f2f5", "#262c35"],
    ["on-fill", "#ffffff", "#101318"],
    ["compute", "#2b68ad", "#6ba6e8"],
    ["comm", "#b85410", "#ee9a5c"],
    ["memory", "#24785b", "#5cc19b"],
    ["idle", "#d5dae0", "#434b57"],
    ["non-compute", "#7b5ea8", "#b096dd"],
    ["both", "#4f6580", "#8fa8c8"],
    ["wait", "#ecc069", "#7d5d12"],
    ["host", "#7a5a34", "#c9a67a"],
    ["data-wait", "#8a6a00", "#d9b84a"],
    ["forward", "#4a57b0", "#9aa5f0"],
    ["backward", "#8b3f8f", "#d58ad8"],
    ["sync", "#a8325e", "#ec85aa"],
    ["optimizer", "#4d6b1f", "#a3c46a"],
    ["other", "#66707c", "#98a3b0"],
    ["series-0", "#2b68ad", "#6ba6e8"],
    ["series-1", "#b85410", "#ee9a5c"],
    ["series-2", "#24785b", "#5cc19b"],
    ["series-3", "#7b5ea8", "#b096dd"],
    ["series-4", "#a8325e", "#ec85aa"],
    ["series-5", "#7a6a13", "#cdb94a"],
    ["series-6", "#1d7486", "#5dbdd0"],
    ["series-7", "#66707c", "#98a3b0"],
];

/// The variables of a page with a light and a dark theme.
pub fn style() -> String {
    let variable = |[name, light, dark]: [&str; 3]| format!("--{name}:light-dark({light},{dark});");
    format!(":root{{{}}}", LOOKS.map(variable).concat())
}

/// The drawing with its light colors, and a style sheet with the dark ones.
pub(super) fn fixed(mut drawing: String) -> (String, String) {
    let mut rules = String::new();
    for [name, light, dark] in LOOKS {
        let variable = format!("\"var(--{name})\"");
        if drawing.contains(&variable) {
            drawing = drawing.replace(&variable, &format!("\"{light}\""));
            for part in ["fill", "stroke"] {
                rules += &format!("[{part}=\"{light}\"]{{{part}:{dark}}}");
            }
        }
    }
    (drawing, format!("@media(prefers-color-scheme:dark){{{rules}}}"))
}

impl Color {
    /// The color of text on a shape that is filled with this one.
    pub(super) fn on(self) -> Color {
        match self {
            Color::Idle | Color::Grid | Color::Track | Color::Wait => Color::Text,
            _ => Color::OnFill,
        }
    }
}

impl Render for Color {
    /// The value of an attribute: a variable of the style sheet.
    fn render_to(&self, out: &mut String) {
        let name = match *self {
            Color::Card => "card",
            Color::Text => "text",
            Color::Muted => "muted",
            Color::Grid => "grid",
            Color::Track => "track",
            Color::OnFill => "on-fill",
            Color::Compute => "compute",
            Color::Communication => "comm",
            Color::Memory => "memory",
            Color::Idle => "idle",
            Color::NonCompute => "non-compute",
            Color::Both => "both",
            Color::Wait => "wait",
            Color::Host => "host",
            Color::DataWait => "data-wait",
            Color::Forward => "forward",
            Color::Backward => "backward",
            Color::Sync => "sync",
            Color::Optimizer => "optimizer",
            Color::Other => "other",
            Color::Series(number) => &format!("series-{}", number % 8),
        };
        *out += &format!("var(--{name})");
    }
}
