//! Memory in use, from the samples of a trace.

use super::Point;
use super::counters::thinned;
use crate::alive::HOST;
use crate::stats::quantile;
use crate::timeline::{MemorySample, Timeline};

/// Memory of one rank: of its device if the trace has samples of one, otherwise of the host. Sizes are in
/// bytes. Reports show MiB, as PyTorch's own tools do.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryUse {
    /// Number of samples.
    pub samples: u64,
    /// The largest number of allocated bytes.
    pub peak_allocated: u64,
    /// The largest number of bytes reserved from the system.
    pub peak_reserved: u64,
    /// Median over samples of the allocated bytes.
    pub p50_allocated: f64,
    /// 95th percentile over samples of the allocated bytes.
    pub p95_allocated: f64,
    /// Allocated bytes at the last sample.
    pub final_allocated: u64,
    /// Reserved bytes at the last sample.
    pub final_reserved: u64,
    /// Allocated bytes over time. Of each of many equal time ranges, only the highest and the last point are kept, at most 1000 in all.
    pub series: Vec<Point>,
}

impl MemoryUse {
    /// Computed from all samples of a trace, including those outside of its steps.
    pub(super) fn of(timeline: &Timeline) -> Option<Self> {
        let devices = timeline.memory.iter().map(|sample| sample.device_type);
        let device_type = devices.clone().find(|&device| device != HOST).or(devices.min())?;
        let of_device = timeline.memory.iter().filter(|sample| sample.device_type == device_type);
        let mut samples: Vec<&MemorySample> = of_device.collect();
        samples.sort_by_key(|sample| sample.at_ns);
        let mut sizes: Vec<f64> =
            samples.iter().map(|sample| sample.allocated_bytes as f64).collect();
        sizes.sort_unstable_by(f64::total_cmp);
        let last = samples.last()?;
        let points = samples
            .iter()
            .map(|sample| Point { at_ns: sample.at_ns, value: sample.allocated_bytes as f64 });
        let points: Vec<Point> = points.collect();
        Some(Self {
            samples: samples.len() as u64,
            peak_allocated: samples.iter().map(|sample| sample.allocated_bytes).max()?,
            peak_reserved: samples.iter().map(|sample| sample.reserved_bytes).max()?,
            p50_allocated: quantile(&sizes, 0.5)?,
            p95_allocated: quantile(&sizes, 0.95)?,
            final_allocated: last.allocated_bytes,
            final_reserved: last.reserved_bytes,
            series: thinned(&points),
        })
    }
}
