//! When things happened: one clock, spans with set arithmetic, and a recorder of events; and the runtime below
//! threads that wait for each other (`runtime`), which tests replace by a simulation.
//!
//! Input: names and times. Output: the spans and events of each track, and answers to "how long was A running
//! while B was". This crate does not know file formats, layers or ranks, and it uses no other crate of this
//! workspace. `paceline-analysis` writes and reads trace files.
//!
//! All times are nanoseconds of `CLOCK_MONOTONIC`, which every process of a host shares. Spans of different
//! ranks of one host therefore lie on one time line.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod activity;
mod clock;
mod interval;
mod markers;
mod recorder;
pub mod runtime;
#[cfg(feature = "simulation")]
pub mod simulation;
mod span_track;
mod thread;

pub use activity::{ActivityKind, ActivityRecord};
pub use clock::{SUSPENDED, awake, now_ns, realtime_at_zero_ns};
pub use interval::{IntervalSet, Span};
pub use markers::{KernelMarkers, Markers, TRACE_MARKERS};
pub use recorder::{Event, Operation, OperationTimes, Place, Recorder, Shapes, Track};
pub use runtime::{STACK_BYTES, lock, thread_builder};
pub use span_track::{Mark, SpanTrack};
pub use thread::{beside, pin};
