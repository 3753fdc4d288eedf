//! Idle time of streams, and its causes.

use super::Source;
use super::work::{Item, Work};

/// A gap between kernels that is shorter than this is the cost of launching them back to back.
const KERNEL_GAP_NS: i64 = 30_000;

/// The cause of a gap between two kernels of a stream, by HTA's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleCategory {
    /// The later kernel was launched only after the earlier one had ended: the host was too slow.
    HostWait,
    /// Not a host wait, and the gap is shorter than 30 us: the cost of
    /// running kernels back to back.
    KernelWait,
    /// Neither: the stream waited for another stream, or for memory.
    Other,
}

impl IdleCategory {
    /// HTA's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::HostWait => "host_wait",
            Self::KernelWait => "kernel_wait",
            Self::Other => "other",
        }
    }
}

/// Gaps of one category.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IdleTime {
    /// The cause.
    pub category: IdleCategory,
    /// Number of gaps.
    pub gaps: u64,
    /// Sum of their lengths.
    pub time_ns: i64,
    /// Share of the stream's idle time, 0 to 1; `None` if the stream was never idle.
    pub ratio: Option<f64>,
}

/// The gaps of one stream between its first and its last kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamIdle {
    /// The number of the stream in the file.
    pub stream: i64,
    /// Host wait, kernel wait, other.
    pub by_category: [IdleTime; 3],
}

/// The gaps of every stream, in order of streams. Where kernels of one stream overlap, the gap is negative.
/// It is added up like any other, as in HTA.
pub(super) fn of_streams(work: &Work) -> Vec<StreamIdle> {
    if work.source == Source::Operators {
        return Vec::new();
    }
    let mut items: Vec<&Item> =
        work.items.iter().filter(|item| !item.is_wait(work.timeline)).collect();
    // A stable sort, so the items of a stream stay in order of their starts.
    items.sort_by_key(|item| item.stream);
    items.chunk_by(|a, b| a.stream == b.stream).map(|stream| of_stream(work, stream)).collect()
}

fn of_stream(work: &Work, items: &[&Item]) -> StreamIdle {
    let mut sums = [(0u64, 0i64); 3];
    for pair in items.windows(2) {
        let (before_ns, gap_ns) = (pair[0].end_ns, pair[1].start_ns - pair[0].end_ns);
        let launched_ns = pair[1].launch.map(|launch| work.call(launch).start_ns);
        let category = if launched_ns.is_some_and(|launched_ns| launched_ns > before_ns) {
            IdleCategory::HostWait
        } else if gap_ns < KERNEL_GAP_NS {
            IdleCategory::KernelWait
        } else {
            IdleCategory::Other
        };
        let sum = &mut sums[category as usize];
        *sum = (sum.0 + 1, sum.1 + gap_ns);
    }
    let total: i64 = sums.iter().map(|sum| sum.1).sum();
    let categories = [IdleCategory::HostWait, IdleCategory::KernelWait, IdleCategory::Other];
    let by_category = categories.map(|category| {
        let (gaps, time_ns) = sums[category as usize];
        let ratio = (total != 0).then(|| time_ns as f64 / total as f64);
        IdleTime { category, gaps, time_ns, ratio }
    });
    StreamIdle { stream: items[0].stream, by_category }
}
