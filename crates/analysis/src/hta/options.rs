//! What an analysis is asked for.

use crate::timeline::TimeRange;

/// Which strategies a run compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Data parallel: every rank holds the whole model.
    Ddp,
    /// Sharded: optimizer state, gradients or parameters are split over ranks.
    Sharding,
}

/// To what times are rounded before anything is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Not at all: nanoseconds, as far as the file gives them. HTA computes so with
    /// `HTA_DISABLE_NS_ROUNDING=1`.
    #[default]
    Exact,
    /// As HTA does where not told otherwise: begins up and ends down to whole microseconds. A kernel
    /// loses 1 us on average, and one that crosses no whole microsecond lasts -1 us.
    Hta,
}

/// Which steps a trace difference compares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StepChoice {
    /// The first one, as HTA does.
    #[default]
    First,
    /// All of them.
    All,
    /// Those with these numbers.
    These(Vec<u64>),
}

/// What to analyse, and the thresholds of the figures. The defaults are HTA's.
#[derive(Clone, Debug)]
pub struct Options {
    /// Chosen from the traces where `None`.
    pub kind: Option<Kind>,
    /// The last of two or more steps is left out where `false`, as it may not have ended.
    pub include_last_step: bool,
    /// See [`Rounding`].
    pub rounding: Rounding,
    /// Gaps between kernels shorter than this are the price of launching them back to back.
    pub kernel_gap_ns: i64,
    /// Launch calls that took longer than this are outliers.
    pub slow_call_ns: i64,
    /// Launch delays longer than this are outliers.
    pub long_delay_ns: i64,
    /// A queue that is this long holds back the thread that launches.
    pub full_queue: u64,
    /// For which step the critical path is computed, counted from 0 among those in the trace.
    pub critical_step: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            kind: None,
            include_last_step: false,
            rounding: Rounding::default(),
            kernel_gap_ns: 30_000,
            slow_call_ns: 50_000,
            long_delay_ns: 100_000,
            full_queue: 1024,
            critical_step: 0,
        }
    }
}

/// A range of time after rounding; its duration may be negative then.
pub(super) fn rounded(time: TimeRange, rounding: Rounding) -> TimeRange {
    match rounding {
        Rounding::Exact => time,
        Rounding::Hta => {
            let start_ns = -(-time.start_ns).div_euclid(1000) * 1000;
            let end_ns = time.end_ns().div_euclid(1000) * 1000;
            TimeRange { start_ns, dur_ns: end_ns - start_ns }
        }
    }
}
