//! The colors of charts, named by their meaning, for light and dark pages and files.
//!
//! [`style`] defines them as variables for a page. A file has the light colors themselves, because only browsers know
//! variables.

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
/// light colors have equal dark ones, so the background's white is a word.
#[rustfmt::skip]
const LOOKS: [(Color, [&str; 3]); 28] = [
    (Color::Card, ["card", "white", "#1a1e25"]),
    (Color::Text, ["text", "#1b1f24", "#e6e9ee"]),
    (Color::Muted, ["muted", "#5c6570", "#9aa4b1"]),
    (Color::Grid, ["grid", "#e3e6ea", "#323943"]),
    (Color::Track, ["track", "#f0f2f5", "#262c35"]),
    (Color::OnFill, ["on-fill", "#ffffff", "#101318"]),
    (Color::Compute, ["compute", "#2b68ad", "#6ba6e8"]),
    (Color::Communication, ["comm", "#b85410", "#ee9a5c"]),
    (Color::Memory, ["memory", "#24785b", "#5cc19b"]),
    (Color::Idle, ["idle", "#d5dae0", "#434b57"]),
    (Color::NonCompute, ["non-compute", "#7b5ea8", "#b096dd"]),
    (Color::Both, ["both", "#4f6580", "#8fa8c8"]),
    (Color::Wait, ["wait", "#ecc069", "#7d5d12"]),
    (Color::Host, ["host", "#7a5a34", "#c9a67a"]),
    (Color::DataWait, ["data-wait", "#8a6a00", "#d9b84a"]),
    (Color::Forward, ["forward", "#4a57b0", "#9aa5f0"]),
    (Color::Backward, ["backward", "#8b3f8f", "#d58ad8"]),
    (Color::Sync, ["sync", "#a8325e", "#ec85aa"]),
    (Color::Optimizer, ["optimizer", "#4d6b1f", "#a3c46a"]),
    (Color::Other, ["other", "#66707c", "#98a3b0"]),
    (Color::Series(0), ["series-0", "#2b68ad", "#6ba6e8"]),
    (Color::Series(1), ["series-1", "#b85410", "#ee9a5c"]),
    (Color::Series(2), ["series-2", "#24785b", "#5cc19b"]),
    (Color::Series(3), ["series-3", "#7b5ea8", "#b096dd"]),
    (Color::Series(4), ["series-4", "#a8325e", "#ec85aa"]),
    (Color::Series(5), ["series-5", "#7a6a13", "#cdb94a"]),
    (Color::Series(6), ["series-6", "#1d7486", "#5dbdd0"]),
    (Color::Series(7), ["series-7", "#66707c", "#98a3b0"]),
];

/// The variables of a page with a light and a dark theme.
pub fn style() -> String {
    let variable = |(_, [name, light, dark]): (Color, [&str; 3])| {
        format!("--{name}:light-dark({light},{dark});")
    };
    format!(":root{{{}}}", LOOKS.map(variable).concat())
}

/// The drawing in light colors, and a style sheet with the dark ones.
pub(super) fn fixed(mut drawing: String) -> (String, String) {
    let mut rules = String::new();
    for (_, [name, light, dark]) in LOOKS {
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
        let own = if let Color::Series(number) = self { Color::Series(number % 8) } else { *self };
        let name = LOOKS.iter().find(|look| look.0 == own).map_or("", |look| look.1[0]);
        *out += &format!("var(--{name})");
    }
}
