//! `paceline bench`: how fast ranks exchange data.
//!
//! All measurements end up in a [`result::BenchReport`]. Every other file makes, shows or reads reports:
//!
//! | file | purpose |
//! |---|---|
//! | [`plan`] | turns flags into the plan of the measurements |
//! | [`operation`] | the operations that can be measured, and their properties |
//! | [`sizes`] | turns flags into the list of message sizes |
//! | [`sweep`] | runs one configuration after the other, and writes the files at the end |
//! | `configuration` | one transport and number of ranks: its algorithm, and the sizes that fit |
//! | [`processes`] | the ranks of a configuration as processes |
//! | `rank` | the work of each rank, and how times are taken |
//! | `reporter` | where a rank reports its measurements |
//! | [`exchange`] | the call that is timed, its buffers, and the check of its result |
//! | [`pattern`] | inputs whose results are exact in every element type |
//! | [`memory`] | the machine's memory bandwidth, and the bytes that an operation reads and writes |
//! | [`result`] | the data, and the formulas of all bandwidths |
//! | [`screen`] | the output while it runs |
//! | [`table`] | the live table in the format of nccl-tests, or a wider one |
//! | [`lines`] | two lines per configuration and a closing table (`--style lines`) |
//! | [`files`] | the report as JSON with the keys of nccl-tests, and the rows as CSV |
//! | [`load`] | reads these files, and the JSON lines of other programs |
//! | `log` | reads the table that nccl-tests prints |
//! | [`series`] | groups the measurements into series of sizes and times |
//! | [`compare`] | the table that compares the report with such series |
//! | `against` | measures PyTorch's collectives, in turns with ours |
//! | `expect` | compares bus bandwidths with those of the link or of an earlier file |
//! | [`charts`] | time and bandwidth against size, as SVG |
//!
//! Only `sweep` and `processes` start ranks, and only `rank` and `memory` take times.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod args;
pub mod charts;
pub mod compare;
pub mod exchange;
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

mod against;
mod configuration;
mod expect;
mod log;
mod named;
mod number;
mod rank;
mod reporter;

#[cfg(test)]
mod samples;
