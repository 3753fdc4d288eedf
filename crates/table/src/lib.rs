//! Tables and charts: rows of cells under columns, text that fits a width, statistics, charts as SVG.
//!
//! Numbers and words go in; lines for a console, CSV, Markdown, JSON and SVG come out. Nothing here knows what was
//! measured, or where a file goes.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

#[cfg(feature = "charts")]
pub mod chart;
pub mod compact;
pub mod fitted;
pub mod stats;
pub mod table;
pub mod width;
