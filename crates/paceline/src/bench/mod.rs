//! `paceline bench`: how fast the ranks exchange data.
//!
//! What is measured becomes a [`result::BenchReport`]; everything else here says it or reads it:
//!
//! | file | what it does |
//! |---|---|
//! | [`plan`] | from flags to what is to be measured |
//! | [`sizes`] | from flags to the list of message sizes |
//! | [`sweep`] | one configuration after the other, and what is written at the end |
//! | [`rank`] | what each rank does, and how time is taken |
//! | [`exchange`] | the one call that is timed, its buffers, and whether its result is right |
//! | [`pattern`] | inputs whose results are exact |
//! | [`memory`] | what the machine's memory delivers, and what an operation asks of it |
//! | [`screen`] | what is printed while it runs |
//! | [`result`] | the data, and the formulas of all bandwidths |
//! | [`table`] | the live table in the format of nccl-tests, or a wider one |
//! | [`lines`] | two lines per configuration and a closing table (`--style lines`) |
//! | [`json`] | the report as JSON with the keys of nccl-tests |
//! | [`csv`] | the rows as CSV |
//! | [`load`] | reads any of these back, and the JSON lines of other programs |
//! | [`series`] | what is read, as series of sizes and times |
//! | [`compare`] | the report beside such a file |
//! | [`charts`] | time and bandwidth against size, as PNG and SVG |
//!
//! Only `sweep` starts ranks, and only `rank` and `memory` look at a clock; everything else makes text
//! and files of numbers.

pub mod charts;
pub mod compare;
pub mod csv;
pub mod exchange;
pub mod json;
pub mod lines;
pub mod load;
pub mod memory;
pub mod pattern;
pub mod plan;
pub mod rank;
pub mod result;
pub mod screen;
pub mod series;
pub mod sizes;
pub mod sweep;
pub mod table;

mod fitting;
mod number;

#[cfg(test)]
pub(crate) mod samples;
