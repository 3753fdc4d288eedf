//! How long a device computed, did other work, or was idle, and how much of its communication overlapped with
//! its computation.

use super::kernels::KernelKind::{Communication, Computation};
use super::work::Work;

/// The time of a device from its first to its last kernel: HTA's temporal breakdown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Temporal {
    /// From the start of the first kernel to the end of the last, of any kind.
    pub kernel_time_ns: i64,
    /// The part of it in which no kernel ran.
    pub idle_ns: i64,
    /// The part of it in which at least one compute kernel ran.
    pub compute_ns: i64,
    /// The rest: kernels ran, but none of them computed.
    pub non_compute_ns: i64,
}

impl Temporal {
    pub(super) fn of(work: &Work) -> Self {
        let kernel_time_ns = work.extent_ns;
        let idle_ns = kernel_time_ns - work.busy_ns;
        let compute_ns = work.merged_ns(Computation);
        let non_compute_ns = kernel_time_ns - idle_ns - compute_ns;
        Self { kernel_time_ns, idle_ns, compute_ns, non_compute_ns }
    }

    /// 100 * `part_ns` / kernel time; `None` if the kernel time is not above zero.
    pub fn pctg(&self, part_ns: i64) -> Option<f64> {
        (self.kernel_time_ns > 0).then(|| 100.0 * part_ns as f64 / self.kernel_time_ns as f64)
    }
}

/// How much of a device's communication was hidden by its computation, by HTA's formula.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlap {
    /// Time in which at least one communication kernel ran.
    pub communication_ns: i64,
    /// The part of it in which a compute kernel ran too.
    pub both_ns: i64,
}

impl Overlap {
    pub(super) fn of(work: &Work) -> Self {
        let both_ns =
            work.times(Communication).intersection(work.times(Computation)).len_ns() as i64;
        Self { communication_ns: work.merged_ns(Communication), both_ns }
    }

    /// 100 * both / communication; `None` if nothing was communicated.
    pub fn pctg(&self) -> Option<f64> {
        (self.communication_ns > 0)
            .then(|| 100.0 * self.both_ns as f64 / self.communication_ns as f64)
    }
}
