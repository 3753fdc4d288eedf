//! Builds timelines by hand, for the tests of this crate and those in its files. Times are in microseconds.
#![allow(dead_code)]

use std::borrow::BorrowMut;

use paceline_analysis::doctor::{Diagnosis, diagnosis};
use paceline_analysis::hta::{Kind, Options, RankAnalysis, Rules, analyze, columns};
use paceline_analysis::ranks::{AcrossRanks, across_ranks};
use paceline_analysis::timeline::{
    Annotation, Collective, DeviceWork, Kernel, LaneInfo, Launch, MemorySample, Operator, SyncWait,
    TimeRange, Timeline, TrackId,
};

/// The thread that runs the steps.
pub const MAIN: TrackId = TrackId(0);
/// Another thread of the host, and the row of all kernels.
pub const OTHER: TrackId = TrackId(1);

pub const NCCL: &str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)";

/// A time in microseconds.
pub trait Us: Copy {
    fn ns(self) -> i64;
}

impl Us for i64 {
    fn ns(self) -> i64 {
        self * 1000
    }
}

impl Us for f64 {
    fn ns(self) -> i64 {
        (self * 1e3).round() as i64
    }
}

pub fn us(from: impl Us, to: impl Us) -> TimeRange {
    TimeRange { start_ns: from.ns(), dur_ns: to.ns() - from.ns() }
}

/// An empty trace of a rank.
pub fn timeline(rank: usize) -> Timeline {
    let lane = |tid: &str| LaneInfo { pid: "1".into(), tid: tid.into(), name: None };
    Timeline {
        source: format!("rank_{rank}.json"),
        rank: Some(rank),
        lanes: ["1", "2", "3"].map(lane).to_vec(),
        ..Timeline::default()
    }
}

/// Analyzes all ranks together with the default options.
pub fn across(timelines: &[Timeline]) -> AcrossRanks {
    across_ranks(timelines, &Options::default())
}

/// Adds events to a timeline.
pub trait Build: BorrowMut<Timeline> + Sized {
    fn span(mut self, name: &str, from: impl Us, to: impl Us) -> Self {
        let of = self.borrow_mut();
        let (name, time) = (of.names.intern(name), us(from, to));
        of.annotations.push(Annotation { name, time, lane: MAIN, is_device: false });
        self
    }

    fn step(self, number: u64, from: impl Us, to: impl Us) -> Self {
        self.span(&format!("ProfilerStep#{number}"), from, to)
    }

    /// The device's view of a step.
    fn device_step(self, number: u64, from: impl Us, to: impl Us) -> Self {
        let mut this = self.step(number, from, to);
        this.borrow_mut().annotations.last_mut().expect("it was just added").is_device = true;
        this
    }

    fn operator(self, name: &str, from: impl Us, to: impl Us) -> Self {
        self.operator_on(MAIN, name, us(from, to))
    }

    fn operator_on(mut self, lane: TrackId, name: &str, time: TimeRange) -> Self {
        let of = self.borrow_mut();
        let name = of.names.intern(name);
        of.operators.push(Operator { name, time, lane, collective: None });
        self
    }

    /// A call that launches nothing.
    fn call(mut self, name: &str, correlation: u64, from: impl Us, to: impl Us) -> Self {
        let of = self.borrow_mut();
        let (name, time) = (of.names.intern(name), us(from, to));
        of.launches.push(Launch { name, time, lane: MAIN, correlation: Some(correlation) });
        self
    }

    /// A kernel without a call.
    fn stray(mut self, name: &str, stream: i64, from: impl Us, to: impl Us) -> Self {
        let of = self.borrow_mut();
        let work = match name {
            name if name.starts_with("Memcpy") => DeviceWork::Copy,
            name if name.starts_with("Memset") => DeviceWork::Set,
            _ => DeviceWork::Kernel,
        };
        of.kernels.push(Kernel {
            name: of.names.intern(name),
            work,
            time: us(from, to),
            lane: OTHER,
            stream,
            correlation: None,
            bytes: None,
            bandwidth_gb_s: None,
            collective: None,
        });
        self
    }

    /// The same on the stream of computation.
    fn compute(self, name: &str, from: impl Us, to: impl Us) -> Self {
        self.stray(name, 7, from, to)
    }

    /// A kernel whose call began 2 us before it and took 1 us.
    fn kernel(self, name: &str, stream: i64, from: f64, to: f64) -> Self {
        self.launched(name, stream, from - 2.0, from - 1.0, from, to)
    }

    /// A kernel with the call that launched it.
    fn launched(
        self,
        name: &str,
        stream: i64,
        call: f64,
        returned: f64,
        from: f64,
        to: f64,
    ) -> Self {
        let mut this = self.stray(name, stream, from, to);
        let kernels = &mut this.borrow_mut().kernels;
        let is_launched = |of: &&Kernel| of.correlation.is_some() && of.work != DeviceWork::Sync;
        let correlation = 1 + kernels.iter().filter(is_launched).count() as u64;
        let kernel = kernels.last_mut().expect("it was just added");
        kernel.correlation = Some(correlation);
        let call_name = match kernel.work {
            DeviceWork::Copy => "cudaMemcpyAsync",
            DeviceWork::Set => "cudaMemsetAsync",
            _ => "cudaLaunchKernel",
        };
        this.call(call_name, correlation, call, returned)
    }

    /// A copy or a memory set with its call: `bytes` bytes at `gb_s` GB/s.
    fn copy(self, name: &str, from: f64, to: f64, bytes: u64, gb_s: f64) -> Self {
        let mut this = self.kernel(name, 22, from, to);
        let copy = this.borrow_mut().kernels.last_mut().expect("it was just added");
        (copy.bytes, copy.bandwidth_gb_s) = (Some(bytes), Some(gb_s as f32));
        this
    }

    /// A wait on the device, caused by a call.
    fn wait(self, name: &str, stream: i64, correlation: u64, from: f64, to: f64) -> Self {
        let mut this = self.stray(name, stream, from, to);
        let wait = this.borrow_mut().kernels.last_mut().expect("it was just added");
        (wait.work, wait.correlation) = (DeviceWork::Sync, Some(correlation));
        this
    }

    /// Says what the last wait waits for.
    fn waits_for(mut self, stream: i64, record: u64) -> Self {
        let of = self.borrow_mut();
        let kernel = of.kernels.len() as u32 - 1;
        of.sync_waits.push(SyncWait { kernel, stream, record });
        self
    }

    /// Marks the last kernel as this collective, as its arguments in a file would.
    fn described(mut self, collective: Collective) -> Self {
        let of = self.borrow_mut();
        of.collectives.push(collective);
        let place = of.collectives.len() as u32 - 1;
        of.kernels.last_mut().expect("a kernel").collective = Some(place);
        self
    }

    fn told(self, collective: &str, wait_us: Option<i64>) -> Self {
        let wait_ns = wait_us.map(|us| us * 1000);
        self.described(Collective { name: collective.into(), wait_ns, ..Collective::default() })
    }

    /// An all-reduce of all ranks with these further arguments.
    fn said(self, from: impl Us, to: impl Us, said: Collective) -> Self {
        let (name, group) = ("all_reduce".into(), Some("world".into()));
        self.stray(NCCL, 7, from, to).described(Collective { name, group, ..said })
    }

    /// An all-reduce of all ranks with a sequence number.
    fn all_reduce(self, seq: u64, from: impl Us, to: impl Us) -> Self {
        self.said(from, to, Collective { seq: Some(seq), ..Collective::default() })
    }

    fn memory(mut self, at: f64, device_type: i64, allocated: u64, reserved: u64) -> Self {
        self.borrow_mut().memory.push(MemorySample {
            at_ns: at.ns(),
            allocated_bytes: allocated,
            reserved_bytes: reserved,
            device_type,
        });
        self
    }

    /// The same trace on a clock that is `ahead_us` ahead at zero and gains `drift_ppm` microseconds per second.
    fn by_clock(mut self, ahead_us: i64, drift_ppm: i64) -> Self {
        let read = |at_ns: i64| at_ns + ahead_us * 1000 + at_ns * drift_ppm / 1_000_000;
        let shift = |time: &mut TimeRange| {
            let end_ns = read(time.end_ns());
            time.start_ns = read(time.start_ns);
            time.dur_ns = end_ns - time.start_ns;
        };
        let of = self.borrow_mut();
        of.kernels.iter_mut().for_each(|kernel| shift(&mut kernel.time));
        of.operators.iter_mut().for_each(|operator| shift(&mut operator.time));
        of.annotations.iter_mut().for_each(|annotation| shift(&mut annotation.time));
        self
    }
}

impl Build for Timeline {}

/// A figure of the summary, by the name of its column; `None` if the rank has none.
pub fn figure(of: &RankAnalysis, name: &str) -> Option<f64> {
    let all = [Kind::Ddp, Kind::Sharding].into_iter().flat_map(columns);
    let mut named = all.filter(|column| column.head.key == name);
    named.next().expect("a column").cell(of).number()
}

/// The same for a figure that every rank has.
pub fn value(of: &RankAnalysis, name: &str) -> f64 {
    figure(of, name).expect("every rank has it")
}

pub fn analyzed(timeline: &Timeline, rules: Rules) -> RankAnalysis {
    let options = Options { rules, ..Options::default() };
    analyze(std::slice::from_ref(timeline), &options).unwrap().ranks.remove(0)
}

pub fn diagnosed(timeline: &Timeline) -> Diagnosis {
    diagnosis(std::slice::from_ref(timeline), &Options::default())
}
