//! When things happened: one clock, spans and arithmetic on sets of them, and a recorder of events.
//!
//! Names and moments go in. Spans per track and the events of each track come out, and answers to "how long
//! was A running while B was". This crate knows no file format, no layers and no ranks, and no other crate
//! of this workspace: `paceline-analysis` writes and reads trace files.
//!
//! All moments are nanoseconds of `CLOCK_MONOTONIC`, which every process of a host shares, so
//! spans of different ranks of one host lie on one time line.
#![forbid(unsafe_code)]

mod clock;
mod interval;
mod recorder;
mod span_track;

pub use clock::{now_ns, realtime_at_zero_ns};
pub use interval::{IntervalSet, Span};
pub use recorder::{Event, Operation, Recorder, Shapes, Track};
pub use span_track::{Mark, SpanTrack};
