//! The options of an analysis.

use crate::timeline::TimeRange;

/// The strategies that a run compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Data parallel: every rank holds the whole model.
    Ddp,
    /// Sharded: optimizer state, gradients or parameters are split over ranks.
    Sharding,
}

/// Whose rules decide which work counts, and how times are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rules {
    /// Work counts if an analyzed step launched it, however late it ran. Waits are no work.
    #[default]
    Steps,
    /// HTA's: work counts if it was launched before the last step began, on the host or in the device's view of the steps.
    /// Waits of a stream count. Times have nanoseconds, as in HTA with `HTA_DISABLE_NS_ROUNDING=1`.
    Hta,
    /// HTA's, with its default rounding: starts are rounded up and ends down to whole microseconds. A kernel becomes 1 us
    /// shorter on average, and a kernel that lies between two whole microseconds lasts -1 us.
    HtaRounded,
}

/// Which steps a comparison of two traces covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StepChoice {
    /// The first step, as in HTA.
    #[default]
    First,
    /// All steps.
    All,
    /// The step with this number.
    One(u64),
}

/// The options of an analysis.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// `None`: derived from the traces.
    pub kind: Option<Kind>,
    /// `false`: the last of two or more steps is left out, because the profiler may have cut it off.
    pub include_last_step: bool,
    /// Whose rules decide.
    pub rules: Rules,
}

/// A time range after rounding. Its duration can be negative with [`Rules::HtaRounded`].
pub(super) fn rounded(time: TimeRange, rules: Rules) -> TimeRange {
    match rules {
        Rules::Steps | Rules::Hta => time,
        Rules::HtaRounded => {
            let start_ns = -(-time.start_ns).div_euclid(1000) * 1000;
            let end_ns = time.end_ns().div_euclid(1000) * 1000;
            TimeRange { start_ns, dur_ns: end_ns - start_ns }
        }
    }
}
