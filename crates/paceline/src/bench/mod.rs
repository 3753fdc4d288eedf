//! `paceline bench`: how fast the ranks exchange data.
//!
//! What is measured becomes a [`result::BenchReport`]; everything else here says it or reads it:
//!
//! | file | what it does |
//! |---|---|
//! | [`sizes`] | from flags to the list of message sizes |
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
//! Nothing named here starts a rank or looks at a clock: numbers go in, text and files come out.

pub mod charts;
pub mod compare;
pub mod csv;
pub mod json;
pub mod lines;
pub mod load;
pub mod result;
pub mod series;
pub mod sizes;
pub mod table;

mod number;

#[cfg(test)]
pub(crate) mod samples;
