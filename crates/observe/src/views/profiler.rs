//! The profiler: records a window of steps and writes the trace file of this rank.
//!
//! Right after the last step of the window every rank writes its file, and no rank continues before all have. A file that
//! cannot be written is reported, and the run goes on.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use paceline_analysis::advice::alone::{self, Gradient};
use paceline_analysis::kineto::{self, RanOn};
use paceline_analysis::limit::{self, Operation, Operations, Speeds};
use paceline_collectives::{ClockOffset, Group, measure_clock};
use paceline_failure::Result;
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::resources;
use paceline_host::resources::cpu_times::CpuTimes;
use paceline_kernels::{Compute, peak};
use paceline_memory::{Allocator, DType};
use paceline_settings::profile::ProfileConfig;
use paceline_strategies::ActionTimes;
use paceline_strategies::schedule::Action;
use paceline_trace::{self as trace, Recorder, Span, Track, realtime_at_zero_ns};

use crate::figures::event::{Event, Listener, StepDone};
use crate::record::event_room::{
    COMMUNICATION_EVENTS, COPY_EVENTS, COPY_STREAMS, KERNEL_EVENTS, LOADER_EVENTS, MAIN_EVENTS,
    MAX_EVENTS, MEMORY_EVENTS, THREAD_EVENTS, num_recorded, num_steps_with_room,
};
use crate::record::rank_report::{RankReport, do_without};
use crate::views::card_records::CardRecords;

/// Records the steps of a window and writes them.
pub struct Profiler {
    config: ProfileConfig,
    recorder: Recorder,
    main: Arc<Track>,
    kernels: Arc<Track>,
    communication: Arc<Track>,
    loader: Arc<Track>,
    ran_on: RanOn,
    /// The machine or the card that computes, in words.
    device: String,
    /// The element type of products.
    dtype: DType,
    operations: Operations,
    /// Steps that were recorded.
    steps: Vec<(u64, Span)>,
    clock_at_begin: ClockOffset,
    cpu_at_begin: Option<CpuTimes>,
    /// Threads of a rank.
    num_threads: usize,
    /// The gradients, which marks in the trace name by number.
    gradients: Vec<Gradient>,
    disk: Disk,
    card: Option<CardRecords>,
    /// The file once it is written, or why there is none.
    written: Option<std::result::Result<PathBuf, String>>,
}

impl Listener for Profiler {
    fn on(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Built(model) => {
                let gradients = model.layout.trained().map(|(id, param)| Gradient {
                    param: id.0 as u64,
                    num_elems: param.range().len() as u64,
                    name: param.name.clone(),
                });
                self.gradients = gradients.collect();
                Ok(())
            }
            Event::StepBegun { number, group, compute } => self.begin_step(*number, group, compute),
            Event::Step(step) => self.end_step(step),
            Event::TrainingEnded(group) => self.finish(group),
            _ => Ok(()),
        }
    }

    fn add_to(&self, report: &mut RankReport) {
        report.operations = self.operations.clone();
        report.dropped_spans += self.dropped();
        match self.written.clone() {
            Some(Ok(trace)) => report.trace = Some(trace),
            Some(Err(missing)) => report.missing_files.push(missing),
            None => {}
        }
    }
}

impl Profiler {
    /// A profiler of this rank, and a `Compute` that records its kernels.
    pub fn new(
        disk: &Disk,
        config: &ProfileConfig,
        compute: Compute,
        (allocator, dtype): (&Allocator, DType),
    ) -> (Self, Compute) {
        let num_threads = num_recorded(compute.threads().count());
        let home = compute.allocator.home();
        let accelerator = home.map(|home| home.accelerator());
        let num_steps = num_steps_with_room(config, num_threads, home.is_some());
        let mut recorder = Recorder::new();
        let mut track =
            |name: &str, events: u64| recorder.track(name, (events * num_steps) as usize);
        // The first track becomes the main thread of the trace.
        let main = track("main", MAIN_EVENTS);
        let kernels = track("compute", KERNEL_EVENTS);
        if let Some(home) = home {
            let copies = COPY_STREAMS.map(|name| track(name, COPY_EVENTS));
            home.accelerator().record_on([kernels.clone()].into_iter().chain(copies).collect());
        }
        let communication = track("communication", COMMUNICATION_EVENTS);
        let loader = track("loader", LOADER_EVENTS);
        allocator.record_on(track("memory", MEMORY_EVENTS));
        let names = (0..num_threads).map(|at| format!("compute {at}"));
        let threads = names.map(|name| track(&name, THREAD_EVENTS)).collect();
        let machine = resources::machine();
        let (ran_on, device) = match accelerator {
            None => (RanOn::Host, machine),
            Some(of) if of.is_emulated() => {
                (RanOn::Emulated, format!("an emulated accelerator on {machine}"))
            }
            Some(of) => (RanOn::Card, of.card().map_or(machine, |card| card.name().to_owned())),
        };
        let profiler = Self {
            config: config.clone(),
            ran_on,
            device,
            dtype,
            operations: Operations::default(),
            main,
            kernels: kernels.clone(),
            communication,
            loader,
            recorder,
            steps: Vec::with_capacity(config.active.min(MAX_EVENTS) as usize),
            clock_at_begin: ClockOffset::default(),
            cpu_at_begin: None,
            num_threads: compute.threads().count(),
            gradients: Vec::new(),
            disk: disk.clone(),
            card: accelerator.and_then(|of| of.card()).cloned().map(CardRecords::new),
            written: None,
        };
        (profiler, compute.recorded(kernels, threads))
    }

    /// Events that were lost.
    fn dropped(&self) -> u64 {
        self.recorder.dropped() + self.card.as_ref().map_or(0, |card| card.lost)
    }

    /// The track for the loader.
    pub fn loader(&self) -> Arc<Track> {
        self.loader.clone()
    }

    /// Starts the window if this is its first step.
    fn begin_step(&mut self, number: u64, group: &Group, compute: &Compute) -> Result<()> {
        if number == self.config.wait + self.config.warmup {
            self.measure(compute, group)?;
            self.clock_at_begin = measure_clock(group)?;
            self.cpu_at_begin = CpuTimes::now();
            if let Some(card) = &mut self.card {
                card.begin();
            }
            self.recorder.set_on(true);
        }
        Ok(())
    }

    /// Writes the trace if this was the last step of the window.
    fn end_step(&mut self, step: &StepDone) -> Result<()> {
        let StepDone { number, asked_ns, whole, .. } = *step;
        self.main.record(trace::Event::Counter {
            name: "loss",
            at_ns: whole.end_ns,
            value: step.loss.loss,
        });
        if !self.main.is_on() {
            return Ok(());
        }
        let wait = Span { start_ns: asked_ns, end_ns: whole.start_ns };
        self.main.record(trace::Event::Span { name: "data wait", span: wait });
        self.steps.push((number, Span { start_ns: asked_ns, ..whole }));
        for (name, span) in step.track.on_host() {
            self.main.record(trace::Event::Span { name, span });
        }
        for (name, span) in step.track.on_device() {
            self.kernels.record(trace::Event::Span { name, span });
        }
        for mark in step.track.marks() {
            self.main.record(trace::Event::Mark {
                name: mark.name,
                at_ns: mark.at_ns,
                id: mark.id,
            });
        }
        for ActionTimes { action, span, .. } in step.actions {
            let (letters, span) = (action.kind.letters(), *span);
            let Action { stage, micro_batch, .. } = *action;
            self.main.record(trace::Event::Pass { stage, letters, micro_batch, span });
        }
        for record in step.records {
            self.communication.record(trace::Event::Operation(record.traced()));
        }
        if self.steps.len() as u64 == self.config.active {
            self.recorder.set_on(false);
            self.measure(step.compute, step.group)?;
            self.write(step.group)?;
        }
        Ok(())
    }

    /// Measures the speeds that limit operations, on all ranks at once. The best count. Those of a card are its data sheet's.
    fn measure(&mut self, compute: &Compute, group: &Group) -> Result<()> {
        let needed = (2 * peak::COPIED_BYTES * group.world_size()) as u64;
        let fits = resources::available_bytes().is_none_or(|available| needed < available / 2);
        group.barrier()?;
        if self.ran_on == RanOn::Card {
            let is_tf32 = self.dtype == DType::F32 && compute.rounds_to_tf32();
            let dtype = if is_tf32 { "tf32" } else { self.dtype.name() };
            self.operations.speeds = Speeds::of_card(&self.device, dtype);
            return Ok(());
        }
        if !fits || self.disk.is_made_to_fail() {
            return Ok(());
        }
        let now = Speeds {
            flop_per_s: peak::of_threads(compute, self.dtype),
            bytes_per_s: peak::memory_bytes_per_s(compute),
        };
        let best = self.operations.speeds.map_or(now, |before| Speeds {
            flop_per_s: now.flop_per_s.max(before.flop_per_s),
            bytes_per_s: now.bytes_per_s.max(before.bytes_per_s),
        });
        self.operations.speeds = Some(best);
        Ok(())
    }

    /// Adds up the kernels of the recorded steps.
    fn add_up(&mut self) {
        let (speeds, spans) =
            (self.operations.speeds, self.steps.iter().map(|step| step.1.len_ns()));
        (self.operations.steps, self.operations.steps_ns) = (self.steps.len() as u64, spans.sum());
        self.operations.add(self.kernels.events().filter_map(|event| match event {
            trace::Event::Kernel { name, span, shapes, .. } => {
                Some(Operation::of_kernel(name, shapes, *span, speeds))
            }
            _ => None,
        }));
    }

    /// Writes the recorded steps if the run ends before the window does.
    fn finish(&mut self, group: &Group) -> Result<()> {
        let is_over = self.steps.is_empty() || self.written.is_some();
        if is_over { Ok(()) } else { self.write(group) }
    }

    fn write(&mut self, group: &Group) -> Result<()> {
        self.recorder.set_on(false);
        let activities = self.card.as_mut().map(CardRecords::end).unwrap_or_default();
        self.add_up();
        let threads = group.world_size() * self.num_threads;
        let waited_pct = CpuTimes::waited_pct(self.cpu_at_begin, threads);
        let clock_at_end = measure_clock(group)?;
        let folder = self.config.folder.join(format!("rank_{}", group.rank()));
        // Named as by PyTorch: the worker, and nanoseconds since 1970.
        let now_ns = realtime_at_zero_ns() + paceline_trace::now_ns();
        // All runs with a strategy write to the same folder; the run ID tells them apart.
        let mut run_id = [now_ns as i64];
        group.broadcast_slice(&mut run_id, 0)?;
        let path = folder.join(format!("worker_{}.{now_ns}.pt.trace.json.gz", group.rank()));
        let header = kineto::Header {
            activities,
            ..self.header(group, run_id[0], clock_at_end, waited_pct)
        };
        let tracks: Vec<&Track> = self.recorder.tracks().iter().map(AsRef::as_ref).collect();
        let write = |out: &mut (dyn Write + Send)| kineto::write_compressed(out, &header, &tracks);
        let written = self.disk.create_folder(&folder);
        let written = written.and_then(|()| self.disk.replace(&path, None, write));
        self.written = Some(match written {
            Ok(_) => Ok(path),
            Err(error) => Err(do_without(&format!("the trace {}", path.printable()), &error)),
        });
        // A rank that continued earlier would measure how long the others write.
        group.barrier()?;
        Ok(())
    }

    fn header(
        &self,
        group: &Group,
        run_id: i64,
        clock_at_end: ClockOffset,
        waited_pct: Option<f64>,
    ) -> kineto::Header {
        let clock_at_begin = self.clock_at_begin;
        let error = clock_at_begin.error_ns.max(clock_at_end.error_ns);
        let run_facts = [
            ("dropped_events", Some(self.dropped().to_string())),
            (limit::SPEEDS, self.operations.speeds.map(|of| of.words())),
            (alone::GRADIENTS, Some(Gradient::fact(self.gradients.iter()))),
            ("emulated_link", group.link().map(|link| link.to_string())),
            ("clock_offset_begin_ns", Some(clock_at_begin.offset_ns.to_string())),
            ("clock_offset_end_ns", Some(clock_at_end.offset_ns.to_string())),
            ("clock_offset_error_ns", Some(error.to_string())),
            (kineto::CPU_WAIT_PCT, waited_pct.map(|pct| format!("{pct:.2}"))),
            ("without_cupti", self.card.as_ref().and_then(CardRecords::missing)),
        ];
        let run_facts = run_facts.into_iter().filter_map(|(key, of)| Some((key.to_owned(), of?)));
        kineto::Header {
            rank: group.rank(),
            world_size: group.world_size(),
            run_id: run_id.to_string(),
            transport: group.transport().name().into(),
            device: self.device.clone(),
            ran_on: self.ran_on,
            pid: std::process::id(),
            base_ns: realtime_at_zero_ns(),
            run_facts: run_facts.collect(),
            steps: self.steps.clone(),
            activities: Vec::new(),
        }
    }
}
