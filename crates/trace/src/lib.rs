//! Where the time went: spans on one clock, arithmetic on sets of time intervals, and the charts
//! that show measurements.
//!
//! In go names and moments; out come spans per lane, and answers to "how long was A running while
//! B was". Charts take named series of points and become PNG and SVG files. It knows nothing of
//! ranks, layers or devices, and no other crate of this workspace.
//!
//! All moments are nanoseconds of `CLOCK_MONOTONIC`, which every process of a host shares, so
//! spans of different ranks of one host lie on one time line.
#![forbid(unsafe_code)]

pub mod plot;

mod clock;
mod interval;
mod lane;

pub use clock::now_ns;
pub use interval::{IntervalSet, Span};
pub use lane::{Lane, Mark};
