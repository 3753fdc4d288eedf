//! Trace files as [`Timeline`](crate::timeline::Timeline)s: finding them, unpacking them, and reading what PyTorch's profiler and
//! our own recorder write.
//!
//! In go paths of `.json` and `.json.gz`; out come which file is which rank's in which profiling window, and a
//! timeline for each. Files are streamed: what is in memory at a time is a window on the file and the timeline
//! that grows. It does not know what is computed from timelines.

mod args;
mod error;
mod event;
mod events;
mod file;
mod find;
mod top;

pub use error::ReadError;
pub(crate) use event::Event;
pub(crate) use file::with_json;
pub use file::{header, open};
pub use find::{Select, TraceFile, Window, find};
pub use top::{Header, parse, parse_from};
