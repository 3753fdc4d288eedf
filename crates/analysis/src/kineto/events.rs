//! Writes the events of a track as events of a trace file.

use std::io::{self, Write};

use super::activities::{busiest_stream, on_card};
use super::text::Text;
use super::{Header, RanOn};
use paceline_trace::{Event, Operation, OperationTimes, Place, Shapes, Span, Track};

/// The stream on which compute kernels are written. Further streams of a device follow.
const COMPUTE_STREAM: u32 = 7;

/// The stream on which communication is written.
const COMMUNICATION_STREAM: u32 = 20;

/// The process number of the device.
pub(super) const DEVICE: u32 = 0;

/// Explains the rows of the file to its reader if the host computed.
const ON_HOST: &str = "this rank computed on the host: a kernel of stream 7 is a compute kernel that the main \
                     thread ran, launched when it began; a kernel of stream 20 is a collective operation \
                     of the transport named here, launched when it was submitted, and named as NCCL would \
                     name it";

/// The same for an emulated device.
const EMULATED: &str = "this rank computed on an emulated accelerator, whose work ran on threads of the processor: \
                        streams other than 20, launches and copies are those of the emulated device; a kernel of \
                        stream 20 is a collective operation of the transport named here, between the hosts, launched \
                        when it was submitted, and named as NCCL would name it";

/// Writes one event after the other.
pub(super) struct Events<'a, W> {
    out: &'a mut W,
    pub(super) header: &'a Header,
    pub(super) text: Text,
    count: u64,
    correlation: u64,
    /// The stream of each track that belongs to the device. The main thread has no stream, even if it computes.
    streams: Vec<Option<u32>>,
    /// `[0, 1, ...]`, the ranks of the group.
    ranks: String,
    /// When the host submitted each operator, and its number.
    pub(super) operators: Vec<(Span, u64)>,
}

impl<'a, W: Write> Events<'a, W> {
    /// Writes the part before the events.
    pub(super) fn begin(out: &'a mut W, header: &'a Header, tracks: &[&Track]) -> io::Result<Self> {
        let Header { rank, world_size, run_id, transport, device, base_ns, run_facts, .. } = header;
        let ranks: Vec<String> = (0..*world_size).map(|rank| rank.to_string()).collect();
        let ranks = format!("[{}]", ranks.join(", "));
        let mut text = Text::default();
        // Holistic Trace Analysis finds the rank by a pattern that asks for a space after the colon.
        text.raw("{\n\"distributedInfo\": {\"backend\": ").string(transport);
        text.raw(", \"rank\": ").int(*rank).raw(", \"world_size\": ").int(*world_size);
        text.raw(", \"run_id\": ").string(run_id).raw(", \"pg_count\": 1, \"pg_config\": ");
        text.raw("[{\"pg_name\": \"0\", \"pg_desc\": \"world\", ");
        text.raw("\"backend_config\": ").string(transport);
        text.raw(", \"ranks\": ").raw(&ranks).raw("}]},\n");
        text.raw("\"schemaVersion\": 1,\n\"deviceProperties\": [{\"id\": 0, \"name\": ");
        text.string(device).raw("}],\n\"displayTimeUnit\": \"ms\",\n\"baseTimeNanoseconds\": ");
        text.int(*base_ns).raw(",\n\"paceline\": {\"version\": ");
        text.string(env!("CARGO_PKG_VERSION")).raw(", \"transport\": ").string(transport);
        match header.ran_on {
            RanOn::Host => _ = text.raw(", \"lanes\": ").string(ON_HOST),
            RanOn::Emulated => _ = text.raw(", \"emulated_device\": ").string(EMULATED),
            RanOn::Card => {}
        }
        for (key, value) in run_facts {
            text.raw(", ").string(key).raw(": ").string(value);
        }
        text.raw("},\n\"traceEvents\": [\n");
        // The compute stream has most work. Its number and those of calls are the vendor's profiler's, if that has recorded.
        let first = busiest_stream(&header.activities).unwrap_or(COMPUTE_STREAM);
        let correlation = header.activities.iter().map(|of| u64::from(of.correlation)).max();
        let mut free = first..;
        let streams = tracks.iter().enumerate().map(|(thread, track)| {
            let is_stream = thread > 0 && track.events().any(|event| is_of_stream(event, header));
            is_stream.then(|| free.next()).flatten()
        });
        let streams = streams.collect();
        Ok(Self {
            out,
            header,
            text,
            count: 0,
            correlation: correlation.unwrap_or(0),
            streams,
            ranks,
            operators: Vec::new(),
        })
    }

    /// Writes the names of processes and threads, which viewers show.
    pub(super) fn names_of_lanes(&mut self, tracks: &[&Track]) -> io::Result<()> {
        let pid = self.header.pid;
        self.process(pid, &format!("rank {}", self.header.rank), "threads")?;
        self.process(DEVICE, &format!("rank {}", self.header.rank), "compute and communication")?;
        for (thread, track) in tracks.iter().enumerate() {
            let has_spans = track.events().any(|event| matches!(event, Event::Span { .. }));
            if (has_spans && self.streams[thread].is_none()) || thread == 0 {
                self.thread(pid, self.tid(thread), track.name())?;
            }
        }
        for (track, stream) in tracks.iter().zip(self.streams.clone()) {
            if let Some(stream) = stream {
                self.thread(DEVICE, stream, &format!("stream {stream}: {}", track.name()))?;
            }
        }
        self.thread(DEVICE, COMMUNICATION_STREAM, "stream 20: communication")
    }

    fn process(&mut self, pid: u32, name: &str, label: &str) -> io::Result<()> {
        for (what, key, value) in
            [("process_name", "name", name), ("process_labels", "labels", label)]
        {
            self.open("M", what, pid, 0).raw(",\"args\":{\"").raw(key).raw("\":").string(value);
            self.text.raw("}");
            self.close()?;
        }
        Ok(())
    }

    fn thread(&mut self, pid: u32, tid: u32, name: &str) -> io::Result<()> {
        self.open("M", "thread_name", pid, tid).raw(",\"args\":{\"name\":").string(name).raw("}");
        self.close()
    }

    /// The stream of the kernels and copies of a track.
    fn stream(&self, thread: usize) -> u32 {
        self.streams[thread].unwrap_or(COMPUTE_STREAM)
    }

    /// The number of a thread in the file. The first track is the main thread.
    fn tid(&self, thread: usize) -> u32 {
        self.header.pid + thread as u32
    }

    /// Writes a step of the training loop.
    pub(super) fn step(&mut self, number: u64, span: Span) -> io::Result<()> {
        let name = format!("ProfilerStep#{number}");
        self.complete("user_annotation", &name, self.header.pid, self.tid(0), span);
        self.close()
    }

    /// Writes an event of a thread. `thread` is the index of its track.
    pub(super) fn add(&mut self, thread: usize, event: &Event) -> io::Result<()> {
        let (pid, tid) = (self.header.pid, self.tid(thread));
        match *event {
            Event::Span { name, span } => {
                match self.streams[thread] {
                    Some(stream) => {
                        self.complete("gpu_user_annotation", name, DEVICE, stream, span)
                    }
                    None => self.complete("user_annotation", name, pid, tid, span),
                }
                self.close()
            }
            Event::Pass { stage, letters, micro_batch, span } => {
                let name = format!("{stage}{letters}{micro_batch}");
                self.complete("user_annotation", &name, pid, tid, span);
                self.close()
            }
            Event::Kernel { name, launched, span, shapes } => {
                self.kernel(self.stream(thread), name, (launched, span), &shapes)
            }
            Event::Copy { .. } | Event::Synchronized { .. }
                if !self.header.activities.is_empty() =>
            {
                Ok(())
            }
            Event::Copy { launched, span, bytes, places } => {
                self.copy(self.stream(thread), (launched, span), bytes, places)
            }
            Event::Synchronized { span } => self.call("cudaDeviceSynchronize", span),
            Event::Operation(operation) => self.operation(&operation),
            Event::Memory {
                at_ns,
                category,
                delta_bytes,
                allocated_bytes,
                reserved_bytes,
                address,
            } => {
                self.instant("[memory]", self.tid(0), at_ns);
                self.text.raw(",\"args\":{\"Total Reserved\":").int(reserved_bytes);
                self.text.raw(",\"Total Allocated\":").int(allocated_bytes);
                self.text.raw(",\"Bytes\":").int(delta_bytes).raw(",\"Addr\":").int(address);
                self.text.raw(",\"Device Id\":-1,\"Device Type\":0,\"Category\":");
                self.text.string(category).raw("}");
                self.close()
            }
            Event::Counter { name, at_ns, value } => {
                let tid = self.tid(0);
                self.open("C", name, pid, tid).raw(",\"ts\":").us(at_ns);
                self.text.raw(",\"args\":{").string(name).raw(":").float(value).raw("}");
                self.close()
            }
            Event::Mark { name, at_ns, id } => {
                self.instant(name, tid, at_ns).raw(",\"args\":{\"id\":").int(id).raw("}");
                self.close()
            }
        }
    }

    /// Writes a compute kernel: the operator on the main thread, its launch, and the kernel itself.
    fn kernel(
        &mut self,
        stream: u32,
        name: &str,
        (launched, span): (Span, Span),
        shapes: &Shapes,
    ) -> io::Result<()> {
        let (pid, tid) = (self.header.pid, self.tid(0));
        let id = self.correlation + 1;
        // The host that computes is in the operator until the end of the kernel.
        let end_ns = if launched.len_ns() == 0 { span.end_ns } else { launched.end_ns };
        let call = Span { start_ns: before(launched.start_ns), end_ns };
        self.open_complete("cpu_op", pid, tid, call).raw("\"paceline::").raw(name);
        self.text.raw("\",\"args\":{\"External id\":").int(id).raw(",\"Input Dims\":[");
        for (at, dims) in shapes.iter().enumerate() {
            self.text.raw(if at == 0 { "[" } else { ",[" });
            for (at, dim) in dims.iter().enumerate() {
                self.text.raw(if at == 0 { "" } else { "," }).int(*dim);
            }
            self.text.raw("]");
        }
        self.text.raw("],\"FLOP\":").int(shapes.flop).raw(",\"bytes\":").int(shapes.bytes).raw("}");
        self.close()?;
        if !self.header.activities.is_empty() {
            self.operators.push((launched, id));
            self.correlation = id;
            return Ok(());
        }
        self.launch("cudaLaunchKernel", launched)?;
        self.complete("kernel", name, DEVICE, stream, span);
        self.last_device_args(stream).raw("}");
        self.close()?;
        self.arrive(stream, span.start_ns)
    }

    /// Writes the bytes of a copy.
    pub(super) fn bytes(&mut self, bytes: u64, span: Span) {
        // Bytes per nanosecond are gigabytes per second.
        let bandwidth = bytes as f64 / span.len_ns().max(1) as f64;
        self.text.raw(",\"bytes\":").int(bytes);
        self.text.raw(",\"memory bandwidth (GB/s)\":").float(bandwidth);
    }

    fn copy(
        &mut self,
        stream: u32,
        (launched, span): (Span, Span),
        bytes: u64,
        places: (Place, Place),
    ) -> io::Result<()> {
        let has_device = places.0 == Place::Device || places.1 == Place::Device;
        self.launch(if has_device { "cudaMemcpyAsync" } else { "cudaLaunchKernel" }, launched)?;
        self.complete("gpu_memcpy", &name_of_copy(places), DEVICE, stream, span);
        self.last_device_args(stream);
        self.bytes(bytes, span);
        self.text.raw("}");
        self.close()?;
        self.arrive(stream, span.start_ns)
    }

    fn operation(&mut self, operation: &Operation) -> io::Result<()> {
        let Operation { group, name, dtype, seq, in_elems, out_elems, times, .. } = *operation;
        let OperationTimes { submitted_ns, started_ns, present_ns, finished_ns } = times;
        self.launch("cudaLaunchKernel", Span::at(submitted_ns))?;
        let span = Span { start_ns: started_ns, end_ns: finished_ns };
        let span = on_card(&self.header.activities, span).unwrap_or(span);
        let kernel = nccl_name(operation, &self.header.transport);
        self.complete("kernel", &kernel, DEVICE, COMMUNICATION_STREAM, span);
        self.last_device_args(COMMUNICATION_STREAM).raw(",\"Collective name\":").string(name);
        self.text.raw(",\"In msg nelems\":").int(in_elems);
        self.text.raw(",\"Out msg nelems\":").int(out_elems);
        // The header knows the members of the group of all ranks only.
        let is_world = group == 0;
        if is_world {
            self.text.raw(",\"Group size\":").int(self.header.world_size);
        }
        self.text.raw(",\"dtype\":").string(dtype);
        self.text.raw(",\"Process Group Name\":\"").int(group).raw("\"");
        if is_world {
            self.text.raw(",\"Process Group Description\":\"world\",\"Process Group Ranks\":");
            self.text.string(&self.ranks);
        }
        self.text.raw(",\"Seq\":").int(seq);
        self.text.raw(",\"queue (us)\":").us(started_ns.saturating_sub(submitted_ns));
        self.text.raw(",\"wait (us)\":").us(present_ns.saturating_sub(started_ns)).raw("}");
        self.close()?;
        self.arrive(COMMUNICATION_STREAM, span.start_ns)
    }

    /// Writes the call that launches the next kernel, and the start of the arrow to that kernel. A call without a length
    /// lasts for the nanosecond before it, because readers leave out calls that take no time. A kernel that starts at the
    /// time of its launch would also be a problem: readers could count its start before or after its entry into the queue.
    fn launch(&mut self, name: &str, launched: Span) -> io::Result<()> {
        let start_ns = match launched.len_ns() {
            0 => before(launched.start_ns),
            _ => launched.start_ns,
        };
        self.call(name, Span { start_ns, ..launched })?;
        self.arrow("s", self.header.pid, self.tid(0), start_ns, self.correlation);
        self.close()
    }

    /// Writes a call of the device's library, which gets the next number.
    fn call(&mut self, name: &str, span: Span) -> io::Result<()> {
        self.correlation += 1;
        let (pid, tid, id) = (self.header.pid, self.tid(0), self.correlation);
        self.complete("cuda_runtime", name, pid, tid, span);
        self.numbers(id, Some(id)).raw("}");
        self.close()
    }

    /// Writes the end of the arrow.
    fn arrive(&mut self, stream: u32, at_ns: u64) -> io::Result<()> {
        self.arrow("f", DEVICE, stream, at_ns, self.correlation).raw(",\"bp\":\"e\"");
        self.close()
    }

    /// Begins one end of the arrow from the call of this number to its work.
    pub(super) fn arrow(
        &mut self,
        phase: &str,
        pid: u32,
        tid: u32,
        at_ns: u64,
        id: u64,
    ) -> &mut Text {
        self.open(phase, "ac2g", pid, tid).raw(",\"cat\":\"ac2g\",\"id\":").int(id);
        self.text.raw(",\"ts\":").us(at_ns)
    }

    /// Begins an event without a length on a thread.
    fn instant(&mut self, name: &str, tid: u32, at_ns: u64) -> &mut Text {
        self.open("i", name, self.header.pid, tid);
        self.text.raw(",\"cat\":\"cpu_instant_event\",\"s\":\"t\",\"ts\":").us(at_ns)
    }

    /// Begins the arguments of an event: the number of its operator, if there is one, and of its call.
    pub(super) fn numbers(&mut self, call: u64, operator: Option<u64>) -> &mut Text {
        self.text.raw(",\"args\":{");
        if let Some(operator) = operator {
            self.text.raw("\"External id\":").int(operator).raw(",");
        }
        self.text.raw("\"correlation\":").int(call)
    }

    /// Begins the arguments of a device event.
    pub(super) fn device_args(
        &mut self,
        stream: u32,
        call: u64,
        operator: Option<u64>,
    ) -> &mut Text {
        self.numbers(call, operator).raw(",\"device\":0,\"context\":1");
        self.text.raw(",\"stream\":").int(stream)
    }

    /// The same for the kernel that was launched last.
    fn last_device_args(&mut self, stream: u32) -> &mut Text {
        self.device_args(stream, self.correlation, Some(self.correlation))
    }

    pub(super) fn complete(&mut self, cat: &str, name: &str, pid: u32, tid: u32, span: Span) {
        self.open_complete(cat, pid, tid, span).string(name);
    }

    /// Writes an event with a duration, up to its name.
    fn open_complete(&mut self, cat: &str, pid: u32, tid: u32, span: Span) -> &mut Text {
        self.separate().raw("{\"ph\":\"X\",\"cat\":\"").raw(cat).raw("\",\"pid\":").int(pid);
        self.text.raw(",\"tid\":").int(tid).raw(",\"ts\":").us(span.start_ns);
        self.text.raw(",\"dur\":").us(span.len_ns()).raw(",\"name\":")
    }

    fn open(&mut self, phase: &str, name: &str, pid: u32, tid: u32) -> &mut Text {
        self.separate().raw("{\"ph\":\"").raw(phase).raw("\",\"name\":").string(name);
        self.text.raw(",\"pid\":").int(pid).raw(",\"tid\":").int(tid)
    }

    fn separate(&mut self) -> &mut Text {
        self.text.raw(if self.count == 0 { "" } else { ",\n" })
    }

    pub(super) fn close(&mut self) -> io::Result<()> {
        self.text.raw("}");
        self.count += 1;
        self.hand_over()
    }

    fn hand_over(&mut self) -> io::Result<()> {
        self.out.write_all(&self.text.bytes)?;
        self.text.bytes.clear();
        Ok(())
    }

    /// Writes the part after the events. Returns how many events there were.
    pub(super) fn end(mut self) -> io::Result<u64> {
        self.text.raw("\n],\n\"traceName\": ");
        self.text.string(&format!("paceline rank {}", self.header.rank)).raw("\n}\n");
        self.hand_over()?;
        Ok(self.count)
    }
}

/// Whether it happened on a stream of a device, and is written as that.
fn is_of_stream(event: &Event, header: &Header) -> bool {
    let is_copy = matches!(event, Event::Copy { .. });
    matches!(event, Event::Kernel { .. }) || (is_copy && header.activities.is_empty())
}

/// The name of a copy from one kind of memory to another.
pub(super) fn name_of_copy((from, to): (Place, Place)) -> String {
    let letter = |place| if place == Place::Device { 'D' } else { 'H' };
    format!("Memcpy {}to{} ({from:?} -> {to:?})", letter(from), letter(to))
}

/// One nanosecond earlier.
fn before(at_ns: u64) -> u64 {
    at_ns.saturating_sub(1)
}

/// The name that NCCL would use. For example, `all_reduce` of f32 over shm is
/// `ncclDevKernel_AllReduce_Sum_f32_Shm`.
fn nccl_name(operation: &Operation, transport: &str) -> String {
    let mut name = String::from("ncclDevKernel_");
    name.extend(operation.name.split('_').map(capitalized));
    for part in [operation.reduction, operation.dtype, transport] {
        if !part.is_empty() {
            name.push('_');
            name.push_str(&if part == operation.dtype {
                part.to_owned()
            } else {
                capitalized(part)
            });
        }
    }
    name
}

fn capitalized(word: &str) -> String {
    let mut chars = word.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
