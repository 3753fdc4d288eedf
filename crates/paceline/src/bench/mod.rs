//! `paceline bench`: how fast ranks exchange data.
//!
//! What is measured becomes a [`result::BenchReport`]; every other file makes one, shows one or reads
//! one:
//!
//! | file | what it does |
//! |---|---|
//! | [`plan`] | from flags to what is to be measured |
//! | [`operation`] | the operations that can be measured, and their parts |
//! | [`sizes`] | from flags to the list of message sizes |
//! | [`sweep`] | one configuration after the other, and what is written at the end |
//! | `configuration` | one transport and number of ranks: its algorithm, and the sizes that fit |
//! | [`processes`] | the ranks of a configuration as processes |
//! | `rank` | what each rank does, and how time is taken |
//! | `reporter` | where a rank reports what it measures |
//! | [`exchange`] | the one call that is timed, its buffers, and whether its result is right |
//! | [`pattern`] | inputs whose results are exact |
//! | [`memory`] | what the machine's memory delivers, and what an operation asks of it |
//! | [`result`] | the data, and the formulas of all bandwidths |
//! | [`figures`] | the figures of a row: their names, columns and values, each defined once |
//! | [`screen`] | what is printed while it runs |
//! | [`table`] | the live table in the format of nccl-tests, or a wider one |
//! | [`lines`] | two lines per configuration and a closing table (`--style lines`) |
//! | [`files`] | the report as JSON with the keys of nccl-tests, and the rows as CSV |
//! | [`load`] | reads these files, and the JSON lines of other programs |
//! | [`series`] | what is read, as series of sizes and times |
//! | [`compare`] | the report beside such series |
//! | [`charts`] | time and bandwidth against size, as PNG and SVG |
//!
//! Only `sweep` and `processes` start ranks, and only `rank` and `memory` take times; everything else
//! turns numbers into text and files.

pub mod charts;
pub mod compare;
pub mod exchange;
pub mod figures;
pub mod files;
pub mod lines;
pub mod load;
pub mod memory;
pub mod operation;
pub mod pattern;
pub mod plan;
pub mod processes;
pub mod result;
pub mod screen;
pub mod series;
pub mod sizes;
pub mod sweep;
pub mod table;

mod configuration;
mod number;
mod rank;
mod reporter;

#[cfg(test)]
pub(crate) mod samples;
