//! What a trace file says of one rank, in memory: the kernels of its device, the calls that launched
//! them, the operators and annotations of its threads, collectives and memory.
//!
//! A reader fills it, whoever wrote the file; the analysis reads it. Times are nanoseconds of the
//! trace's own clock, as signed numbers: a trace may begin before its zero. Strings are interned once.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A range of time on a trace's clock, `[start_ns, start_ns + dur_ns)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimeRange {
    /// When it began, in nanoseconds.
    pub start_ns: i64,
    /// How long it took, in nanoseconds; never negative.
    pub dur_ns: i64,
}

impl TimeRange {
    /// The first nanosecond after it.
    pub fn end_ns(&self) -> i64 {
        self.start_ns.saturating_add(self.dur_ns)
    }
}

/// An interned string, see [`Names`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NameId(pub u32);

/// Strings that occur over and over, each kept once.
#[derive(Clone, Debug, Default)]
pub struct Names {
    ids: HashMap<Arc<str>, NameId>,
    texts: Vec<Arc<str>>,
}

impl Names {
    /// The number of a string, which is new if it was never seen.
    pub fn intern(&mut self, text: &str) -> NameId {
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let (id, text): (_, Arc<str>) = (NameId(self.texts.len() as u32), text.into());
        self.texts.push(text.clone());
        self.ids.insert(text, id);
        id
    }

    /// The string of a number that [`Names::intern`] gave.
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

/// Which row of the file an event stood in: `pid` and `tid`, whatever they were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(pub u32);

/// A row of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneInfo {
    /// As written, a number or a word.
    pub pid: String,
    /// As written, a number or a word.
    pub tid: String,
    /// `thread_name`, where the file gives one.
    pub name: Option<String>,
}

/// What a device executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceWork {
    /// `kernel`.
    Kernel,
    /// `gpu_memcpy`.
    Copy,
    /// `gpu_memset`.
    Set,
    /// `cuda_sync`: the device or a stream was waited for.
    Sync,
}

/// One thing that a device has executed.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// Its name.
    pub name: NameId,
    /// What it is.
    pub work: DeviceWork,
    /// When it ran.
    pub time: TimeRange,
    /// Its row.
    pub lane: LaneId,
    /// Its stream; -1 where the file gives none.
    pub stream: i64,
    /// The number that it shares with the call that launched it.
    pub correlation: Option<u64>,
    /// For copies and sets: bytes.
    pub bytes: Option<u64>,
    /// For copies and sets: GB/s, as the file gives it.
    pub bandwidth_gb_s: Option<f64>,
    /// Index into [`Timeline::collectives`].
    pub collective: Option<u32>,
}

/// A call of the device's run-time library (`cuda_runtime`, `cuda_driver`).
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Its name, as `cudaLaunchKernel`.
    pub name: NameId,
    /// When the call ran.
    pub time: TimeRange,
    /// Its row.
    pub lane: LaneId,
    /// The number that it shares with what it launched.
    pub correlation: Option<u64>,
}

/// What a wait of the device (`cuda_sync`) waits for: a moment that was marked on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncWait {
    /// The wait: index into [`Timeline::kernels`].
    pub kernel: u32,
    /// The stream on which the moment was marked.
    pub stream: i64,
    /// The correlation of the call that marked it (`cudaEventRecord`).
    pub record: u64,
}

/// An operator on a thread of the host (`cpu_op`), or a transfer by a backend of the host: PyTorch writes
/// `gloo:all_reduce` as a `user_annotation` on a thread of its own.
#[derive(Clone, Copy, Debug)]
pub struct Operator {
    /// Its name, as `aten::addmm`.
    pub name: NameId,
    /// When it ran.
    pub time: TimeRange,
    /// Its row.
    pub lane: LaneId,
    /// Index into [`Timeline::collectives`].
    pub collective: Option<u32>,
}

/// A span that the program named (`user_annotation`, or `gpu_user_annotation`).
#[derive(Clone, Copy, Debug)]
pub struct Annotation {
    /// Its name, as `ProfilerStep#3`.
    pub name: NameId,
    /// When it lasted.
    pub time: TimeRange,
    /// Its row.
    pub lane: LaneId,
    /// Whether it is the device's view of it.
    pub is_device: bool,
}

/// What a trace says of a collective operation. Fields that the file does not give are `None`. Of operators of
/// the host, PyTorch writes only the shapes and types of what went in, under the names of its own types.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Collective {
    /// As written: `all_reduce`, `allreduce`, `_allgather_base`, ...; of operators without such a word, their own
    /// name without its family: `allreduce` of `c10d::allreduce_`.
    pub name: String,
    /// Elements that went in.
    pub in_elems: Option<u64>,
    /// Elements that came out.
    pub out_elems: Option<u64>,
    /// Element type.
    pub dtype: Option<String>,
    /// Ranks that took part.
    pub group_size: Option<u64>,
    /// The name of the group.
    pub group: Option<String>,
    /// The ranks of the group, as written.
    pub group_ranks: Option<String>,
    /// Its place in the group's sequence, the same on every rank.
    pub seq: Option<u64>,
    /// Ours: part of its time during which it waited for the slowest rank, in nanoseconds.
    pub wait_ns: Option<i64>,
    /// Ours: time in the queue behind earlier operations, in nanoseconds.
    pub queue_ns: Option<i64>,
}

/// A sample of memory in use (`[memory]`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemorySample {
    /// When.
    pub at_ns: i64,
    /// Bytes alive after it.
    pub allocated_bytes: u64,
    /// Bytes taken from the system.
    pub reserved_bytes: u64,
    /// PyTorch's number of the kind of device: 0 is the host, 1 is CUDA.
    pub device_type: i64,
    /// What was taken, or, if negative, given back.
    pub delta_bytes: i64,
}

/// A trace of one rank.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Where it was read from.
    pub source: String,
    /// From `distributedInfo`, else from the path.
    pub rank: Option<usize>,
    /// From `distributedInfo`.
    pub world_size: Option<usize>,
    /// From `distributedInfo`.
    pub backend: Option<String>,
    /// Absolute time of the clock's zero, where the file gives it.
    pub base_ns: Option<i64>,
    /// `deviceProperties[].name`.
    pub devices: Vec<String>,
    /// What our own recorder says of the run, `paceline` in the file: keys and values in words.
    pub run_facts: BTreeMap<String, String>,
    /// All strings of the vectors below.
    pub names: Names,
    /// Rows, by [`LaneId`].
    pub lanes: Vec<LaneInfo>,
    /// In the order of the file, pairs of begin and end by their ends.
    pub kernels: Vec<Kernel>,
    /// What waits among the kernels wait for, where the file says so; in their order.
    pub sync_waits: Vec<SyncWait>,
    /// In the order of the file.
    pub launches: Vec<Launch>,
    /// In the order of the file.
    pub operators: Vec<Operator>,
    /// In the order of the file.
    pub annotations: Vec<Annotation>,
    /// What kernels and operators refer to.
    pub collectives: Vec<Collective>,
    /// In the order of the file.
    pub memory: Vec<MemorySample>,
    /// Events that the analysis does not use, by category, or by phase (`ph C`) where they have none.
    pub skipped: BTreeMap<String, u64>,
    /// What was odd but not wrong enough to stop, each kind once with its count: negative durations,
    /// ends without begin, ...
    pub oddities: BTreeMap<String, u64>,
}

impl Timeline {
    /// The first begin and the last end of kernels, operators and annotations; `None` if there are none.
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
