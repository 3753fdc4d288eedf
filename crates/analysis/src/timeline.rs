//! The trace of one rank in memory: the kernels of its device, the calls that launched them, the operators
//! and annotations of its threads, its collectives and its memory samples.
//!
//! A reader fills a [`Timeline`], whichever program wrote the file. The analysis reads it. Times are
//! nanoseconds on the trace's own clock. They are signed, because a trace may begin before its clock's zero.
//! Strings are interned: each distinct string is stored once.

use std::collections::BTreeMap;
use std::sync::Arc;

use foldhash::HashMap;
use paceline_trace::Span;

use crate::json::lossy;
use crate::kineto::CPU_WAIT_PCT;
use crate::limit::Speeds;
use crate::steps::Found;

/// A range of time on a trace's clock, `[start_ns, start_ns + dur_ns)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimeRange {
    /// When it began, in nanoseconds.
    pub start_ns: i64,
    /// How long it took, in nanoseconds; never negative.
    pub dur_ns: i64,
}

impl TimeRange {
    /// The first nanosecond after the range.
    pub fn end_ns(&self) -> i64 {
        self.start_ns.saturating_add(self.dur_ns)
    }

    /// From one moment to another; empty if the second one is not later.
    pub(crate) fn between(start_ns: i64, end_ns: i64) -> Self {
        Self { start_ns, dur_ns: end_ns.saturating_sub(start_ns).max(0) }
    }

    /// The part of it after a moment, counted from there.
    pub(crate) fn since(&self, origin_ns: i64) -> Span {
        let at = |ns: i64| ns.saturating_sub(origin_ns).max(0) as u64;
        Span { start_ns: at(self.start_ns), end_ns: at(self.end_ns()) }
    }
}

/// The number of an interned string, see [`Names`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NameId(pub u32);

/// Interned strings: each distinct string is stored once, under a number.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Keyed by bytes, so that a name need not be checked to be text each time that it comes. The hash has a
    /// random seed, because names come from strangers.
    ids: HashMap<Arc<[u8]>, NameId>,
    texts: Vec<Arc<str>>,
}

impl Names {
    /// The number of a string. A string that was not seen before gets a new number.
    pub fn intern(&mut self, text: &str) -> NameId {
        if let Some(&id) = self.ids.get(text.as_bytes()) {
            return id;
        }
        let (id, text): (_, Arc<str>) = (NameId(self.texts.len() as u32), text.into());
        self.texts.push(text.clone());
        self.ids.insert(text.into(), id);
        id
    }

    /// The number of the string that these bytes become by [`lossy`].
    pub(crate) fn intern_lossy(&mut self, bytes: &[u8]) -> NameId {
        match self.ids.get(bytes) {
            Some(&id) => id,
            None => self.intern(&lossy(bytes)),
        }
    }

    /// The string with a number that [`Names::intern`] returned.
    pub fn text(&self, id: NameId) -> &str {
        &self.texts[id.0 as usize]
    }

    /// How many strings there are.
    pub fn count(&self) -> usize {
        self.texts.len()
    }

    /// All strings, in order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().map(AsRef::as_ref)
    }
}

/// The number of the row to which an event belongs. Each pair of `pid` and `tid` in the file is a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TrackId(pub u32);

/// A row of the file: one pair of `pid` and `tid`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneInfo {
    /// The `pid` as written, a number or a word.
    pub pid: String,
    /// The `tid` as written, a number or a word.
    pub tid: String,
    /// The `thread_name`, if the file gives one.
    pub name: Option<String>,
}

/// Kinds of work that a device executes, with their categories in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceWork {
    /// A kernel (`kernel`).
    Kernel,
    /// A copy (`gpu_memcpy`).
    Copy,
    /// A memory set (`gpu_memset`).
    Set,
    /// A wait for the device or for a stream (`cuda_sync`).
    Sync,
}

/// One piece of work that a device has executed.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// Its name.
    pub name: NameId,
    /// The kind of work.
    pub work: DeviceWork,
    /// When it ran.
    pub time: TimeRange,
    /// Its row.
    pub lane: TrackId,
    /// Its stream; -1 where the file gives no stream.
    pub stream: i64,
    /// The number that it shares with the call that launched it.
    pub correlation: Option<u64>,
    /// For copies and memory sets: the number of bytes.
    pub bytes: Option<u64>,
    /// For copies and memory sets: the bandwidth in GB/s, as the file gives it.
    pub bandwidth_gb_s: Option<f32>,
    /// Index into [`Timeline::collectives`].
    pub collective: Option<u32>,
}

/// The calls that put work into a queue, by HTA's list.
pub(crate) const LAUNCHES: [&str; 11] = [
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipMemcpyAsync",
    "hipMemsetAsync",
    "hipMemcpyWithStream",
    "runFunction - job_prep_and_submit_for_execution",
];

/// A call to the device's runtime library (`cuda_runtime`, `cuda_driver`).
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Its name, for example `cudaLaunchKernel`.
    pub name: NameId,
    /// When the call ran.
    pub time: TimeRange,
    /// Its row.
    pub lane: TrackId,
    /// The number that it shares with the work that it launched.
    pub correlation: Option<u64>,
}

/// The object of a wait on the device (`cuda_sync`): a CUDA event that was recorded on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncWait {
    /// The wait, as an index into [`Timeline::kernels`].
    pub kernel: u32,
    /// The stream on which the event was recorded.
    pub stream: i64,
    /// The correlation of the call that recorded it (`cudaEventRecord`).
    pub record: u64,
}

/// An operator on a thread of the host (`cpu_op`), or a transfer by a backend that runs on the host: PyTorch
/// writes `gloo:all_reduce` as a `user_annotation` on a thread of its own.
#[derive(Clone, Copy, Debug)]
pub struct Operator {
    /// Its name, for example `aten::addmm`.
    pub name: NameId,
    /// When it ran.
    pub time: TimeRange,
    /// Its row.
    pub lane: TrackId,
    /// Index into [`Timeline::collectives`].
    pub collective: Option<u32>,
}

/// An operator whose arithmetic or bytes are known, from the shapes of its inputs or because our recorder has written them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Its name, for example `aten::addmm`.
    pub name: NameId,
    /// When the operator ran on the host.
    pub time: TimeRange,
    /// Its row.
    pub lane: TrackId,
    /// Its floating-point operations: a multiplication and an addition count as one each. 0 for operators of PyTorch whose
    /// arithmetic is not known.
    pub flops: u64,
    /// The bytes that it reads and writes.
    pub bytes: u64,
    /// The element type of its first input, as written; empty if the file does not give it.
    pub dtype: NameId,
    /// The shapes of its inputs, in words.
    pub shape: NameId,
    /// Whether it is a convolution of images that lie in memory as NCHW.
    pub is_nchw: bool,
}

/// A gradient of PyTorch's autograd that is final.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FinalGradient {
    /// When autograd had added it up.
    pub at_ns: i64,
    /// Its elements.
    pub num_elems: u64,
}

/// A gradient of one of paceline's own runs that is final. Its size is among [`Timeline::run_facts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GradientMark {
    /// When the rank had computed it.
    pub at_ns: i64,
    /// The number of its parameter in the model.
    pub param: u64,
}

/// A span that the program named (`user_annotation`, or `gpu_user_annotation`).
#[derive(Clone, Copy, Debug)]
pub struct Annotation {
    /// Its name, for example `ProfilerStep#3`.
    pub name: NameId,
    /// Its start and duration.
    pub time: TimeRange,
    /// Its row.
    pub lane: TrackId,
    /// Whether this is the device's view of the span (`gpu_user_annotation`).
    pub is_device: bool,
}

/// The description of a collective operation in a trace. Fields that the file does not give are `None`. For
/// operators of the host, PyTorch writes only the shapes and types of the inputs, with its own names for the
/// types.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Collective {
    /// Its name as written: `all_reduce`, `allreduce`, `_allgather_base`, ... An operator without such a
    /// field gives its own name, without the library's name: `allreduce` for `c10d::allreduce_`.
    pub name: String,
    /// How many elements went in.
    pub in_elems: Option<u64>,
    /// How many elements came out.
    pub out_elems: Option<u64>,
    /// Element type.
    pub dtype: Option<String>,
    /// How many ranks are in the group.
    pub group_size: Option<u64>,
    /// The name of the group.
    pub group: Option<String>,
    /// The ranks of the group, as written.
    pub group_ranks: Option<String>,
    /// Its sequence number in the group, the same on every rank.
    pub seq: Option<u64>,
    /// Only our recorder writes this: how long it waited for the slowest rank, as part of its time, in
    /// nanoseconds.
    pub wait_ns: Option<i64>,
    /// Only our recorder writes this: time in the queue until earlier operations were done, in nanoseconds.
    pub queue_ns: Option<i64>,
}

/// A sample of memory in use (`[memory]`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemorySample {
    /// When it was taken, in nanoseconds.
    pub at_ns: i64,
    /// Bytes in use after this change.
    pub allocated_bytes: u64,
    /// Bytes reserved from the system.
    pub reserved_bytes: u64,
    /// PyTorch's number for the kind of device: 0 is the host, 1 is CUDA.
    pub device_type: i64,
}

/// A block of memory that was given out, or given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryChange {
    /// When, in nanoseconds.
    pub at_ns: i64,
    /// The row of the thread.
    pub lane: TrackId,
    /// PyTorch's number for the kind of device: 0 is the host, 1 is CUDA.
    pub device_type: i64,
    /// Its address.
    pub addr: u64,
    /// Its bytes, below zero if it was given back.
    pub bytes: i64,
}

/// The oddity of a file that ends in the middle.
pub(crate) const CUT_OFF: &str = "the file is cut off, and what came after is missing";

/// The percentage of its steps in which a rank had no core, as traces of paceline say it: the most of any rank.
pub fn cpu_wait_pct(timelines: &[Timeline]) -> Option<f64> {
    let said = timelines.iter().filter_map(|of| of.run_facts.get(CPU_WAIT_PCT)?.parse().ok());
    said.filter(|pct: &f64| (0.0..=100.0).contains(pct)).reduce(f64::max)
}

/// A trace of one rank.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Where it was read from.
    pub source: String,
    /// The rank, from `distributedInfo` or, without it, from the path.
    pub rank: Option<usize>,
    /// The number of ranks, from `distributedInfo`.
    pub world_size: Option<usize>,
    /// The communication backend, from `distributedInfo`.
    pub backend: Option<String>,
    /// The host, from the file's name, if PyTorch has named the file.
    pub host: Option<String>,
    /// Absolute time of the clock's zero in nanoseconds, if the file gives it.
    pub base_ns: Option<i64>,
    /// The names of the devices, `deviceProperties[].name`.
    pub devices: Vec<String>,
    /// The memory of a device in bytes, `deviceProperties[].totalGlobalMem`.
    pub device_bytes: Option<u64>,
    /// The lengths of the steps just before the recording, in milliseconds, if `paceline record` has made it.
    pub unrecorded_ms: Vec<f64>,
    /// The cores that the threads of this rank's steps leave free, if `paceline record` has made it.
    pub free_cores: Option<u64>,
    /// The speeds of the rank, as measured beside the recording by paceline.
    pub speeds: Option<Speeds>,
    /// The first number of its compute capability, `deviceProperties[].computeMajor`.
    pub compute_major: Option<u64>,
    /// The start of the first event of any kind, in nanoseconds.
    pub begun_ns: Option<i64>,
    /// Facts about the run from our own recorder (`paceline` in the file), as keys and values in text.
    pub run_facts: BTreeMap<String, String>,
    /// All strings that the vectors below refer to.
    pub names: Names,
    /// The rows, by [`TrackId`].
    pub lanes: Vec<LaneInfo>,
    /// Work of the device, in the order of the file. A pair of begin and end events stands where its end
    /// stands.
    pub kernels: Vec<Kernel>,
    /// The objects of the waits among `kernels`, where the file gives them, in the order of `kernels`.
    pub sync_waits: Vec<SyncWait>,
    /// Launch calls, in the order of the file.
    pub launches: Vec<Launch>,
    /// Operators, in the order of the file.
    pub operators: Vec<Operator>,
    /// Operators whose arithmetic or bytes are known, in the order of the file.
    pub products: Vec<Product>,
    /// Whether the file says that operators have the shapes of their inputs (`record_shapes`).
    pub has_shapes: bool,
    /// Gradients whose size the file gives, in the order of the file.
    pub gradients: Vec<FinalGradient>,
    /// Gradients of paceline's own runs, in the order of the file.
    pub gradient_marks: Vec<GradientMark>,
    /// Annotations, in the order of the file.
    pub annotations: Vec<Annotation>,
    /// Calls of modules (`nn.Module: Linear_0`), in the order of the file, if the trace has stacks.
    pub modules: Vec<Annotation>,
    /// Calls of Python that the program itself made, named by their place in it.
    pub code: Vec<Annotation>,
    /// The collectives that kernels and operators refer to.
    pub collectives: Vec<Collective>,
    /// Memory samples, in the order of the file.
    pub memory: Vec<MemorySample>,
    /// Memory that was given out and back, in the order of the file.
    pub allocations: Vec<MemoryChange>,
    /// Whether `memory` has sums of changes since the recording began, because the file gives no totals.
    pub has_summed_memory: bool,
    /// The steps, if the program does not mark them, and they were found.
    pub found: Option<Found>,
    /// How many events the analysis does not use, by category, or by phase (`ph C`) where they have no
    /// category.
    pub skipped: BTreeMap<String, u64>,
    /// Oddities that were not wrong enough to stop the reader: counts by kind, such as negative durations and
    /// end events without a begin event.
    pub oddities: BTreeMap<String, u64>,
}

impl Timeline {
    /// Whether a device has worked. Waits are no work.
    pub fn has_device_work(&self) -> bool {
        self.kernels.iter().any(|kernel| kernel.work != DeviceWork::Sync)
    }

    /// Whether the host has launched work, and the profiler has recorded none of it.
    pub fn lost_kernels(&self) -> bool {
        // HTA's list of names has not those of Triton, of graphs and of cooperative kernels.
        let is_name = |name: &str| name.contains("Launch") || LAUNCHES.contains(&name);
        let is_launch = |call: &Launch| is_name(self.names.text(call.name));
        !self.has_device_work() && self.launches.iter().any(is_launch)
    }

    /// Whether the file ends in the middle of its events.
    pub fn is_cut_off(&self) -> bool {
        self.oddities.contains_key(CUT_OFF)
    }

    /// Whether the file names a card, or NCCL, which works with cards only.
    pub(crate) fn names_a_card(&self) -> bool {
        !self.devices.is_empty() || self.backend.as_deref() == Some("nccl")
    }

    /// The earliest start and the latest end of kernels, operators and annotations; `None` without such events.
    pub(crate) fn extent(&self) -> Option<(i64, i64)> {
        let kernels = self.kernels.iter().map(|kernel| kernel.time);
        let operators = self.operators.iter().map(|operator| operator.time);
        let annotations = self.annotations.iter().map(|annotation| annotation.time);
        let times = kernels.chain(operators).chain(annotations);
        times
            .map(|time| (time.start_ns, time.end_ns()))
            .reduce(|(begin, end), (start, stop)| (begin.min(start), end.max(stop)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_kept_once() {
        let mut names = Names::default();
        let (a, b) = (names.intern("a"), names.intern("b"));
        assert_ne!(a, b);
        assert_eq!((names.intern("a"), names.text(b)), (a, "b"));
        assert_eq!(names.iter().collect::<Vec<_>>(), ["a", "b"]);
    }
}
