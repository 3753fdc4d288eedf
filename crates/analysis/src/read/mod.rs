//! Finds trace files, decompresses them and reads them into [`Timeline`](crate::timeline::Timeline)s.
//! Understands the files of PyTorch's profiler and of paceline's own recorder.
//!
//! Input: paths of `.json` and `.json.gz` files. Output: the rank and the profiling window of each file, and
//! a timeline for each. Files are streamed: only a window on the file and the growing timeline are in memory.
//! This module does not know what is computed from timelines.

mod args;
mod code;
mod event;
mod events;
mod file;
mod find;
mod flops;
mod foreign;
mod memory;
mod names;
mod top;
mod work;

pub(crate) use event::Event;
pub use file::{at_a_time, header, open, open_beginning};
pub(crate) use file::{on_all_cores, with_json};
pub use find::{Select, TraceFile, Window, find, open_all};
pub(crate) use names::MAX_RANKS;
pub use names::stem;
pub use top::{Header, parse, parse_from};
pub(crate) use top::{MERGED_RANKS, each_list};
