//! Builds timelines by hand. Times are in microseconds.
#![allow(dead_code)]

use paceline_analysis::hta::{Kind, RankAnalysis, columns};
use paceline_analysis::timeline::{
    Annotation, Collective, DeviceWork, Kernel, LaneInfo, Launch, MemorySample, NameId, Operator,
    SyncWait, TimeRange, Timeline, TrackId,
};

/// The thread that runs the steps.
pub const MAIN: u32 = 0;
/// Another thread of the host.
pub const OTHER: u32 = 1;

pub const NCCL: &str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)";

/// A timeline under construction.
pub struct Build {
    pub timeline: Timeline,
    correlation: u64,
}

pub fn us(from: f64, to: f64) -> TimeRange {
    let ns = |us: f64| (us * 1e3).round() as i64;
    TimeRange { start_ns: ns(from), dur_ns: ns(to) - ns(from) }
}

/// An empty trace of a rank.
pub fn rank(rank: usize) -> Build {
    let lane = |tid: &str| LaneInfo { pid: "1".into(), tid: tid.into(), name: None };
    let timeline = Timeline {
        source: format!("rank_{rank}.json"),
        rank: Some(rank),
        lanes: vec![lane("1"), lane("2")],
        ..Timeline::default()
    };
    Build { timeline, correlation: 0 }
}

impl Build {
    pub fn name(&mut self, name: &str) -> NameId {
        self.timeline.names.intern(name)
    }

    pub fn span(mut self, name: &str, from: f64, to: f64) -> Self {
        let name = self.name(name);
        let (time, lane) = (us(from, to), TrackId(MAIN));
        self.timeline.annotations.push(Annotation { name, time, lane, is_device: false });
        self
    }

    pub fn step(self, number: u64, from: f64, to: f64) -> Self {
        self.span(&format!("ProfilerStep#{number}"), from, to)
    }

    pub fn operator(mut self, name: &str, lane: u32, from: f64, to: f64) -> Self {
        let name = self.name(name);
        let (time, lane) = (us(from, to), TrackId(lane));
        self.timeline.operators.push(Operator { name, time, lane, collective: None });
        self
    }

    /// A call that launches nothing.
    pub fn call(mut self, name: &str, correlation: u64, from: f64, to: f64) -> Self {
        let (name, time) = (self.name(name), us(from, to));
        let correlation = Some(correlation);
        self.timeline.launches.push(Launch { name, time, lane: TrackId(MAIN), correlation });
        self
    }

    /// A kernel without a call.
    pub fn stray(mut self, name: &str, stream: i64, from: f64, to: f64) -> Self {
        self.push_kernel(name, stream, us(from, to), None);
        self
    }

    /// A kernel whose call began 2 us before it and took 1 us.
    pub fn kernel(self, name: &str, stream: i64, from: f64, to: f64) -> Self {
        self.launched(name, stream, from - 2.0, from - 1.0, from, to)
    }

    /// A kernel with the call that launched it.
    pub fn launched(
        mut self,
        name: &str,
        stream: i64,
        call: f64,
        returned: f64,
        from: f64,
        to: f64,
    ) -> Self {
        self.correlation += 1;
        let correlation = self.correlation;
        self.push_kernel(name, stream, us(from, to), Some(correlation));
        let call_name = match self.timeline.kernels.last().map(|kernel| kernel.work) {
            Some(DeviceWork::Copy) => "cudaMemcpyAsync",
            Some(DeviceWork::Set) => "cudaMemsetAsync",
            _ => "cudaLaunchKernel",
        };
        self.call(call_name, correlation, call, returned)
    }

    /// A copy or a memory set with its call: `bytes` bytes at `gb_s` GB/s.
    pub fn copy(self, name: &str, from: f64, to: f64, bytes: u64, gb_s: f64) -> Self {
        let mut this = self.kernel(name, 22, from, to);
        let copy = this.timeline.kernels.last_mut().expect("it was just added");
        (copy.bytes, copy.bandwidth_gb_s) = (Some(bytes), Some(gb_s as f32));
        this
    }

    /// A wait on the device, caused by a call.
    pub fn wait(mut self, name: &str, stream: i64, correlation: u64, from: f64, to: f64) -> Self {
        self.push_kernel(name, stream, us(from, to), Some(correlation));
        let wait = self.timeline.kernels.last_mut().expect("it was just added");
        wait.work = DeviceWork::Sync;
        self
    }

    /// Says what the last wait waits for.
    pub fn waits_for(mut self, stream: i64, record: u64) -> Self {
        let kernel = self.timeline.kernels.len() as u32 - 1;
        self.timeline.sync_waits.push(SyncWait { kernel, stream, record });
        self
    }

    /// Marks the last kernel as a collective, as its arguments in a file would.
    pub fn told(mut self, collective: &str, wait_us: Option<i64>) -> Self {
        let collectives = &mut self.timeline.collectives;
        let wait_ns = wait_us.map(|us| us * 1000);
        collectives.push(Collective { name: collective.into(), wait_ns, ..Collective::default() });
        let place = collectives.len() as u32 - 1;
        self.timeline.kernels.last_mut().expect("a kernel").collective = Some(place);
        self
    }

    pub fn memory(mut self, at: f64, device_type: i64, allocated: u64, reserved: u64) -> Self {
        self.timeline.memory.push(MemorySample {
            at_ns: us(at, at).start_ns,
            allocated_bytes: allocated,
            reserved_bytes: reserved,
            device_type,
            delta_bytes: 0,
        });
        self
    }

    fn push_kernel(&mut self, name: &str, stream: i64, time: TimeRange, correlation: Option<u64>) {
        let work = match name {
            name if name.starts_with("Memcpy") => DeviceWork::Copy,
            name if name.starts_with("Memset") => DeviceWork::Set,
            _ => DeviceWork::Kernel,
        };
        let name = self.name(name);
        let lane = TrackId(1);
        let (bytes, bandwidth_gb_s, collective) = (None, None, None);
        self.timeline.kernels.push(Kernel {
            name,
            work,
            time,
            lane,
            stream,
            correlation,
            bytes,
            bandwidth_gb_s,
            collective,
        });
    }
}

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
