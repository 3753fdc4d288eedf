//! Where the time went: spans on one clock, arithmetic on sets of time intervals, trace files, and the
//! charts that show measurements.
//!
//! In go names and moments; out come spans per lane, and answers to "how long was A running while
//! B was". Charts take named series of points and become PNG and SVG files. Ranks and devices are for it
//! what trace files say of them; it knows nothing of layers, and no other crate of this workspace.
//!
//! All moments are nanoseconds of `CLOCK_MONOTONIC`, which every process of a host shares, so
//! spans of different ranks of one host lie on one time line.
#![forbid(unsafe_code)]

pub mod analysis;
pub mod json;
pub mod kineto;
pub mod plot;
pub mod ranks;
pub mod read;
pub mod report;
pub mod timeline;

mod clock;
mod interval;
mod lane;
mod recorder;
mod steps;

pub use clock::{now_ns, realtime_at_zero_ns};
pub use interval::{IntervalSet, Span};
pub use lane::{Lane, Mark};
pub use recorder::{Event, Operation, Recorder, Shapes, Track};
