//! Where the time of each rank went, by the formulas of Holistic Trace Analysis (HTA 0.5.0).
//!
//! Input: the timelines of all ranks, and [`Options`]. Output: an [`Analysis`] with all of HTA's figures for
//! each rank. The summary's [`columns`] give each figure of a rank's line in the summary its
//! name, unit and definition; every report that shows the figure takes them from there. This module reads no
//! files and draws nothing.
//!
//! Times are nanoseconds (`_ns`) on the clock of the rank's own trace. PyTorch's profiler writes no kernel
//! events on a CPU. Such a trace is analyzed from its operators; see [`Source`].

mod analyze;
mod anatomy;
mod checks;
mod chosen;
mod collectives;
mod columns;
mod counters;
mod critical;
mod diff;
mod idle;
mod kernels;
mod launches;
mod memory;
mod nesting;
mod notes;
mod options;
mod steps;
mod temporal;
mod work;

pub use crate::stats::Summary;
pub use crate::steps::{Found, Step};
pub use analyze::{Analysis, RankAnalysis, analyze};
pub use anatomy::{Anatomy, Part, StepAnatomy, StepLine};
pub(crate) use checks::{LIMIT_NS, check_times};
pub(crate) use chosen::Chosen;
pub(crate) use collectives::backend_of;
pub use collectives::{CollectiveKind, CollectiveTimes, kind_of as collective_kind};
pub use columns::columns;
pub use counters::{CopyBandwidth, Point, StreamQueue};
pub use critical::{BoundBy, CriticalPath, PathEdge, PathName};
pub use diff::{Diff, DiffRow, Shift, Side, diff};
pub use idle::{IdleCategory, IdleTime, StreamIdle};
pub use kernels::{KernelKind, KernelStats, top as top_kernels};
pub use launches::{LaunchStats, NameLaunches};
pub use memory::MemoryUse;
pub(crate) use nesting::{Nested, innermost};
pub use options::{Kind, Options, Rules, StepChoice};
pub use steps::Steps;
pub use temporal::{Overlap, Temporal};
pub use work::Source;
pub(crate) use work::launched;
