//! Handmade timelines for tests. Times are in microseconds.

use super::{AcrossRanks, across_ranks};
use crate::hta::Options;
use crate::timeline::{
    Annotation, Collective, DeviceWork, Kernel, LaneInfo, Operator, TimeRange, Timeline, TrackId,
};

/// Analyzes all ranks together with the default options.
pub(crate) fn across(timelines: &[Timeline]) -> AcrossRanks {
    across_ranks(timelines, &Options::default())
}

/// The time range from a start to an end.
pub(crate) fn time_range(start_us: i64, end_us: i64) -> TimeRange {
    TimeRange { start_ns: start_us * 1000, dur_ns: (end_us - start_us) * 1000 }
}

/// A timeline with three rows of events: the host, the computation and the communication.
pub(crate) fn timeline(rank: usize) -> Timeline {
    let lane = |tid: &str| LaneInfo { pid: "1".into(), tid: tid.into(), name: None };
    let lanes = ["1", "7", "20"].map(lane).to_vec();
    Timeline { rank: Some(rank), lanes, ..Timeline::default() }
}

impl Timeline {
    pub(crate) fn step(self, number: u64, start_us: i64, end_us: i64) -> Self {
        self.phase(&format!("ProfilerStep#{number}"), start_us, end_us)
    }

    pub(crate) fn phase(mut self, name: &str, start_us: i64, end_us: i64) -> Self {
        let (name, time) = (self.names.intern(name), time_range(start_us, end_us));
        self.annotations.push(Annotation { name, time, lane: TrackId(0), is_device: false });
        self
    }

    pub(crate) fn operator(mut self, name: &str, start_us: i64, end_us: i64) -> Self {
        let (name, time) = (self.names.intern(name), time_range(start_us, end_us));
        self.operators.push(Operator { name, time, lane: TrackId(0), collective: None });
        self
    }

    pub(crate) fn compute(mut self, name: &str, start_us: i64, end_us: i64) -> Self {
        self.kernel(name, time_range(start_us, end_us), TrackId(1), None);
        self
    }

    /// A collective without a sequence number.
    pub(crate) fn call(self, start_us: i64, end_us: i64) -> Self {
        self.said(start_us, end_us, Collective::default())
    }

    /// A collective with a sequence number.
    pub(crate) fn all_reduce(self, seq: u64, start_us: i64, end_us: i64) -> Self {
        self.said(start_us, end_us, Collective { seq: Some(seq), ..Collective::default() })
    }

    pub(crate) fn said(mut self, start_us: i64, end_us: i64, said: Collective) -> Self {
        let collective = self.collectives.len() as u32;
        let (name, group) = ("all_reduce".into(), Some("world".into()));
        self.collectives.push(Collective { name, group, ..said });
        let time = time_range(start_us, end_us);
        self.kernel("ncclDevKernel_AllReduce_Sum_f32_Shm", time, TrackId(2), Some(collective));
        self
    }

    fn kernel(&mut self, name: &str, time: TimeRange, lane: TrackId, collective: Option<u32>) {
        self.kernels.push(Kernel {
            name: self.names.intern(name),
            work: DeviceWork::Kernel,
            time,
            lane,
            stream: 7,
            correlation: None,
            bytes: None,
            bandwidth_gb_s: None,
            collective,
        });
    }

    /// The same trace on a clock that is `ahead_us` ahead at zero and gains `drift_ppm` microseconds per
    /// second.
    pub(crate) fn by_clock(mut self, ahead_us: i64, drift_ppm: i64) -> Self {
        let read = |at_ns: i64| at_ns + ahead_us * 1000 + at_ns * drift_ppm / 1_000_000;
        let shift = |time: &mut TimeRange| {
            let end_ns = read(time.end_ns());
            time.start_ns = read(time.start_ns);
            time.dur_ns = end_ns - time.start_ns;
        };
        self.kernels.iter_mut().for_each(|kernel| shift(&mut kernel.time));
        self.operators.iter_mut().for_each(|operator| shift(&mut operator.time));
        self.annotations.iter_mut().for_each(|annotation| shift(&mut annotation.time));
        self
    }
}
