//! Trace files as [`Timeline`](crate::timeline::Timeline)s: finding them, unpacking them, and reading what PyTorch's profiler and
//! our own recorder write.
//!
//! Paths of `.json` and `.json.gz` files go in. The rank and the profiling window of each file come out, and a
//! timeline for each. Files are streamed: only a window on the file and the growing timeline are in memory. This
//! module does not know what is computed from timelines.

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
