//! Adds the events of a trace to a [`Timeline`], one by one.
//!
//! Profilers differ in what they write and where. Only broken JSON is an error. Events that are not used and
//! odd events are counted. This module does not know the object around the list of events.

use std::collections::BTreeMap;
use std::io::Read;

use foldhash::HashMap;

use super::args::Args;
use super::code::Places;
use super::event::Event;
use super::flops;
use crate::calls::MODULE;
use crate::json::{JsonError, Pull, lossy};
use crate::timeline::{
    Annotation, Collective, DeviceWork, FinalGradient, GradientMark, Kernel, LaneInfo, Launch,
    Names, Operator, Product, SyncWait, TimeRange, Timeline, TrackId,
};

/// The use of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Device(DeviceWork),
    Launch,
    Operator,
    Annotation,
    DeviceAnnotation,
    /// Not used, only counted.
    Skipped,
}

impl Kind {
    /// The kind of each category. Capitalized categories are those of PyTorch before 1.13.
    fn of(category: &[u8]) -> Self {
        match category {
            b"kernel" | b"Kernel" => Self::Device(DeviceWork::Kernel),
            b"gpu_memcpy" | b"Memcpy" => Self::Device(DeviceWork::Copy),
            b"gpu_memset" | b"Memset" => Self::Device(DeviceWork::Set),
            b"cuda_sync" => Self::Device(DeviceWork::Sync),
            // MTIA, whose waits and copies are events of this category too.
            MTIA => Self::Device(DeviceWork::Kernel),
            b"cuda_runtime" | b"cuda_driver" | b"Runtime" | b"mtia_runtime" => Self::Launch,
            b"cpu_op" | b"Operator" => Self::Operator,
            b"user_annotation" => Self::Annotation,
            b"gpu_user_annotation" => Self::DeviceAnnotation,
            _ => Self::Skipped,
        }
    }
}

/// The oddity of calls whose work cannot be distinguished from that of others.
const REPEATED: &str = "a call with the correlation of a later call, which gets its work";

/// The number of calls that have the correlation of another call, and of work.
fn repeated(timeline: &Timeline) -> u64 {
    let sorted = |numbers: &mut dyn Iterator<Item = Option<u64>>| {
        let mut numbers: Vec<u64> = numbers.flatten().collect();
        numbers.sort_unstable();
        numbers
    };
    let calls = sorted(&mut timeline.launches.iter().map(|of| of.correlation));
    let work = sorted(&mut timeline.kernels.iter().map(|of| of.correlation));
    let is_repeated = |pair: &&[u64]| pair[0] == pair[1] && work.binary_search(&pair[0]).is_ok();
    calls.windows(2).filter(is_repeated).count() as u64
}

/// The category of the work of MTIA's devices.
const MTIA: &[u8] = b"mtia_ccp_events";

/// The category of the calls of Python.
const PYTHON: &[u8] = b"python_function";

/// The function of autograd after which a gradient is final.
const FINAL_GRADIENT: &[u8] = b"torch::autograd::AccumulateGrad";

/// The mark in paceline's own traces of a gradient that is final.
const GRADIENT_MARK: &[u8] = b"gradient_ready";

/// Whether PyTorch uses this name for a collective on the host.
fn is_host_collective(name: &[u8]) -> bool {
    is_transfer(name) || name.starts_with(b"c10d::") || name == b"record_param_comms"
}

/// Whether the `args` of an event are used, judged by the fields before them.
fn wants_args(event: &Event) -> bool {
    match event.phase.as_slice() {
        b"M" => event.name.is_empty() || event.name == b"thread_name",
        b"s" | b"t" | b"f" => false,
        b"i" | b"I" => [b"", &b"[memory]"[..], GRADIENT_MARK].contains(&event.name.as_slice()),
        b"X" if event.category == PYTHON => true,
        _ => event.category.is_empty() || Kind::of(&event.category) != Kind::Skipped,
    }
}

/// Whether this is the name of a transfer by a backend that runs on the host. NCCL runs on the device.
fn is_transfer(name: &[u8]) -> bool {
    [&b"gloo:"[..], b"mpi:", b"ucc:"].iter().any(|backend| name.starts_with(backend))
}

/// A begin event (`B`) whose end event (`E`) has not come yet.
#[derive(Debug)]
struct Open {
    kind: Kind,
    category: Vec<u8>,
    name: Vec<u8>,
    start_ns: i64,
    args: Args,
}

/// Builds a timeline.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) timeline: Timeline,
    pub(super) event: Event,
    /// The arguments of the current event.
    pub(super) args: Args,
    /// The key of the event's row, see [`Event::row`].
    row: Vec<u8>,
    /// Rows by key, and the last row that was looked up.
    lanes: HashMap<Vec<u8>, TrackId>,
    last_lane: Option<(Vec<u8>, TrackId)>,
    open: BTreeMap<TrackId, Vec<Open>>,
    places: Places,
    /// Counts of skipped events, by category as numbered by [`Names`].
    skipped: (Names, Vec<u64>),
    oddities: BTreeMap<&'static str, u64>,
    /// Changes of memory without totals: when, the kind of device, and the bytes.
    pub(super) changes: Vec<(i64, i64, i64)>,
    /// The latest time in any event so far.
    pub(super) last_end_ns: Option<i64>,
}

impl Reader {
    /// Reads a list of events, to its end or until `num_work` of them are work. Returns whether there were that many.
    pub(super) fn events<R: Read>(
        &mut self,
        pull: &mut Pull<R>,
        num_work: usize,
    ) -> Result<bool, JsonError> {
        pull.begin_array()?;
        while pull.next_item()? {
            if !pull.at_object()? {
                pull.skip()?;
                self.odd("not an object among the events");
                continue;
            }
            self.take(pull)?;
            self.sort_in();
            if self.timeline.operators.len() + self.timeline.kernels.len() >= num_work {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads the next event from the file.
    fn take<R: Read>(&mut self, pull: &mut Pull<R>) -> Result<(), JsonError> {
        self.args = Args::default();
        self.event.take(pull, |event, pull| {
            if !wants_args(event) {
                return pull.skip();
            }
            // Writers that sort keys put `args` before the name.
            let name = &event.name;
            let wants_inputs = name.is_empty()
                || name == FINAL_GRADIENT
                || flops::has_work(name)
                || is_host_collective(name);
            self.args.take(pull, wants_inputs)
        })
    }

    /// Adds the event to the timeline, by its phase.
    fn sort_in(&mut self) {
        let start_ns = self.event.ts_ns.filter(|_| self.event.phase != b"M");
        self.timeline.begun_ns = self.timeline.begun_ns.into_iter().chain(start_ns).min();
        match self.event.phase.as_slice() {
            b"X" => self.complete(),
            b"B" => self.begin(),
            b"E" => self.end(),
            b"i" | b"I" | b"R" if self.event.name == b"[memory]" => self.memory(),
            b"i" if self.event.name == GRADIENT_MARK => {
                if let (Some(at_ns), Some(param)) = (self.event.ts_ns, self.args.id) {
                    self.timeline.gradient_marks.push(GradientMark { at_ns, param });
                }
                self.skip();
            }
            b"M" => self.row_name(),
            _ => self.skip(),
        }
    }

    fn complete(&mut self) {
        let Some(start_ns) = self.event.ts_ns else {
            return self.odd("an X without a ts");
        };
        let dur_ns = match self.event.dur_ns {
            None => {
                self.odd("an X without a dur");
                0
            }
            Some(dur_ns) if dur_ns < 0 => {
                self.odd("negative duration");
                0
            }
            Some(dur_ns) => dur_ns,
        };
        let time = TimeRange { start_ns, dur_ns };
        self.last_end_ns = self.last_end_ns.max(Some(time.end_ns()));
        let kind = Kind::of(&self.event.category);
        // HTA counts only those events of MTIA that have a stream.
        let is_of_no_stream = self.event.category == MTIA && self.args.stream.is_none();
        if kind == Kind::Skipped || is_of_no_stream {
            if self.event.category == PYTHON {
                self.python(time);
            }
            return self.skip();
        }
        let lane = self.lane();
        let name = std::mem::take(&mut self.event.name);
        let args = std::mem::take(&mut self.args);
        self.put(kind, &name, lane, time, args);
        self.event.name = name;
    }

    /// Keeps a call of a module, or of Python that the program made.
    fn python(&mut self, time: TimeRange) {
        let lane = self.lane();
        let (timeline, text) = (&mut self.timeline, &self.event.name);
        let called = |name| Annotation { name, time, lane, is_device: false };
        if text.starts_with(MODULE.as_bytes()) {
            timeline.modules.push(called(timeline.names.intern_lossy(text)));
        }
        let of_function = self.places.of(text, &mut timeline.names);
        let caller = self.args.caller.as_deref().map(str::as_bytes);
        let place = of_function.or_else(|| self.places.of(caller?, &mut timeline.names));
        timeline.code.extend(place.map(called));
    }

    fn begin(&mut self) {
        let Some(start_ns) = self.event.ts_ns else {
            return self.odd("a B without a ts");
        };
        self.last_end_ns = self.last_end_ns.max(Some(start_ns));
        let lane = self.lane();
        let event = &mut self.event;
        let open = Open {
            kind: Kind::of(&event.category),
            category: event.category.clone(),
            name: event.name.clone(),
            start_ns,
            args: std::mem::take(&mut self.args),
        };
        self.open.entry(lane).or_default().push(open);
    }

    fn end(&mut self) {
        let Some(end_ns) = self.event.ts_ns else {
            return self.odd("an E without a ts");
        };
        self.last_end_ns = self.last_end_ns.max(Some(end_ns));
        let lane = self.lane();
        match self.open.get_mut(&lane).and_then(Vec::pop) {
            Some(open) => self.close(open, lane, end_ns),
            None => self.odd("an E without its B"),
        }
    }

    fn close(&mut self, open: Open, lane: TrackId, end_ns: i64) {
        let mut dur_ns = end_ns.saturating_sub(open.start_ns);
        if dur_ns < 0 {
            self.odd("negative duration");
            dur_ns = 0;
        }
        if open.kind == Kind::Skipped {
            return self.count_skipped(&open.category, b"B");
        }
        self.put(
            open.kind,
            &open.name,
            lane,
            TimeRange { start_ns: open.start_ns, dur_ns },
            open.args,
        );
    }

    /// Adds a complete event.
    fn put(&mut self, kind: Kind, name: &[u8], lane: TrackId, time: TimeRange, mut args: Args) {
        let collective = self.collective(kind, name, &mut args);
        let timeline = &mut self.timeline;
        let id = timeline.names.intern_lossy(name);
        if let (Kind::Device(DeviceWork::Sync), Some(stream), Some(record)) =
            (kind, args.wait_stream, args.wait_record)
        {
            let kernel = timeline.kernels.len() as u32;
            timeline.sync_waits.push(SyncWait { kernel, stream, record });
        }
        match kind {
            Kind::Device(work) => timeline.kernels.push(Kernel {
                name: id,
                work,
                time,
                lane,
                stream: args.stream.unwrap_or(-1),
                correlation: args.correlation,
                bytes: args.bytes,
                bandwidth_gb_s: args.bandwidth_gb_s.map(|gb_s| gb_s as f32),
                collective,
            }),
            Kind::Launch => {
                let correlation = args.correlation;
                timeline.launches.push(Launch { name: id, time, lane, correlation });
            }
            Kind::Annotation | Kind::DeviceAnnotation if !is_transfer(name) => {
                let is_device = kind == Kind::DeviceAnnotation;
                timeline.annotations.push(Annotation { name: id, time, lane, is_device });
            }
            // PyTorch writes transfers of the host as annotations, although the program did not name them.
            Kind::Operator | Kind::Annotation | Kind::DeviceAnnotation => {
                if let (FINAL_GRADIENT, Some(num_elems)) = (name, args.input_elems) {
                    let at_ns = time.end_ns();
                    timeline.gradients.push(FinalGradient { at_ns, num_elems });
                }
                if let Some((flops, bytes)) = flops::work(name, &args) {
                    let dtype = timeline.names.intern(args.input_type.as_deref().unwrap_or(""));
                    let shape = timeline.names.intern(&flops::shape(&args.shapes));
                    let is_nchw = flops::is_nchw(name, &args.shapes, &args.strides);
                    let of = Product { name: id, time, lane, flops, bytes, dtype, shape, is_nchw };
                    timeline.products.push(of);
                }
                timeline.operators.push(Operator { name: id, time, lane, collective });
            }
            Kind::Skipped => {}
        }
    }

    /// Adds the collective that a device event or an operator belongs to, and returns its index; `None` if
    /// the event names no collective.
    fn collective(&mut self, kind: Kind, name: &[u8], args: &mut Args) -> Option<u32> {
        let of_host = match kind {
            Kind::Device(_) => None,
            Kind::Operator | Kind::Annotation if is_transfer(name) => {
                name.splitn(2, |&b| b == b':').nth(1)
            }
            Kind::Operator => {
                name.strip_prefix(b"c10d::").map(|name| name.strip_suffix(b"_").unwrap_or(name))
            }
            _ => return None,
        };
        let mut collective = match (args.collective.take(), of_host) {
            (None, None) => return None,
            (given, _) => given.map_or_else(Collective::default, |given| *given),
        };
        if let Some(of_host) = of_host {
            if collective.name.is_empty() {
                collective.name = lossy(of_host).into_owned();
            }
            collective.in_elems = collective.in_elems.or(args.input_elems);
            collective.dtype = collective.dtype.or_else(|| args.input_type.take());
        }
        self.timeline.collectives.push(collective);
        Some((self.timeline.collectives.len() - 1) as u32)
    }

    /// Handles `M` events. Only the names of threads are used. The others are not counted.
    fn row_name(&mut self) {
        if self.event.name == b"thread_name" && self.args.name.is_some() {
            let lane = self.lane();
            self.timeline.lanes[lane.0 as usize].name = self.args.name.take();
        }
    }

    /// The row of the event.
    pub(super) fn lane(&mut self) -> TrackId {
        self.event.row(&mut self.row);
        if let Some((row, lane)) = &self.last_lane
            && *row == self.row
        {
            return *lane;
        }
        let lane = match self.lanes.get(&self.row) {
            Some(&lane) => lane,
            None => {
                let lanes = &mut self.timeline.lanes;
                let lane = TrackId(lanes.len() as u32);
                let words = |bytes: &[u8]| lossy(bytes).into_owned();
                let (pid, tid) = (words(&self.event.pid), words(&self.event.tid));
                lanes.push(LaneInfo { pid, tid, name: None });
                self.lanes.insert(self.row.clone(), lane);
                lane
            }
        };
        self.last_lane = Some((self.row.clone(), lane));
        lane
    }

    fn skip(&mut self) {
        if let Some(ts_ns) = self.event.ts_ns {
            self.last_end_ns = self.last_end_ns.max(Some(ts_ns));
        }
        let category = std::mem::take(&mut self.event.category);
        let phase = std::mem::take(&mut self.event.phase);
        self.count_skipped(&category, &phase);
        (self.event.category, self.event.phase) = (category, phase);
    }

    /// Counts an event that is not used, by its category, or by its phase if it has no category.
    fn count_skipped(&mut self, category: &[u8], phase: &[u8]) {
        let (names, counts) = &mut self.skipped;
        let id = match category {
            [] => names.intern(&format!("ph {}", lossy(phase))),
            category => names.intern_lossy(category),
        };
        counts.resize(counts.len().max(id.0 as usize + 1), 0);
        counts[id.0 as usize] += 1;
    }

    /// Whether an event was kept.
    pub(super) fn has_events(&self) -> bool {
        let of = &self.timeline;
        !(of.kernels.is_empty() && of.operators.is_empty() && of.annotations.is_empty())
    }

    pub(super) fn odd(&mut self, what: &'static str) {
        *self.oddities.entry(what).or_default() += 1;
    }

    /// Closes the events that are still open, and returns the timeline.
    pub(super) fn finish(mut self) -> Timeline {
        for (lane, rows) in std::mem::take(&mut self.open) {
            // The innermost event began last and ends first.
            for open in rows.into_iter().rev() {
                self.odd("a B without its E");
                let end_ns = self.last_end_ns.unwrap_or(open.start_ns).max(open.start_ns);
                self.close(open, lane, end_ns);
            }
        }
        self.add_up_changes();
        if let repeated @ 1.. = repeated(&self.timeline) {
            self.oddities.insert(REPEATED, repeated);
        }
        let (names, counts) = self.skipped;
        self.timeline.skipped = names.iter().map(str::to_owned).zip(counts).collect();
        let odd = self.oddities.into_iter().map(|(what, count)| (what.to_owned(), count));
        self.timeline.oddities.extend(odd);
        // Traces of hundreds of ranks are in memory together.
        let Timeline { kernels, launches, operators, memory, .. } = &mut self.timeline;
        kernels.shrink_to_fit();
        launches.shrink_to_fit();
        operators.shrink_to_fit();
        memory.shrink_to_fit();
        self.timeline
    }
}
