//! The profile of a run: which steps are recorded, and the trace file of this rank.
//!
//! The window is counted in steps of this run: so many are left out, then so many are recorded. Right after the
//! last one every rank writes its file, and no rank goes on before all have. In go what the recorder's
//! tracks hold, the spans of each step and the records of its operations; what is done with the files is
//! not known here.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_analysis::kineto;
use paceline_collectives::{ClockOffset, Group, OpRecord, measure_clock};
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_trace::{Event, Lane, Recorder, Span, Track, realtime_at_zero_ns};
use serde::Serialize;

use crate::cli::ProfileArgs;
use crate::outputs::check_folder;
use crate::{Failure, Result, resources};

/// Which steps are recorded, and where traces go.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfileConfig {
    /// First steps that are left out.
    pub wait: u64,
    /// Steps left out after those.
    pub warmup: u64,
    /// Steps that are recorded then.
    pub active: u64,
    /// The folder of the ranks' folders.
    pub folder: PathBuf,
}

/// Traces with fewer steps than this lose their last one in Holistic Trace Analysis, and are left with
/// one or none.
const FEW_STEPS: u64 = 3;

/// Checks the flags for a run of so many steps with the strategy of this name.
pub fn resolve(
    args: &ProfileArgs,
    strategy: &str,
    total_steps: u64,
    warnings: &mut Vec<String>,
) -> Result<Option<ProfileConfig>> {
    let given = [
        ("--profile-wait", args.profile_wait.is_some()),
        ("--profile-warmup", args.profile_warmup.is_some()),
        ("--profile-active", args.profile_active.is_some()),
        ("--profile-dir", args.profile_dir.is_some()),
    ];
    if !args.profile {
        return match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                Err(Failure::Usage(format!("{flag} is about --profile; pass that too")))
            }
            None => Ok(None),
        };
    }
    let (wait, warmup) = (args.profile_wait.unwrap_or(1), args.profile_warmup.unwrap_or(2));
    let active = args.profile_active.unwrap_or(10);
    if active == 0 {
        return Err(Failure::Usage("--profile-active 0 records nothing; pass 1 or more".into()));
    }
    let needed = wait.saturating_add(warmup).saturating_add(active);
    if needed > total_steps {
        return Err(Failure::Usage(format!(
            "--profile: {wait} + {warmup} + {active} steps are to be left out and recorded, but the run \
             has {total_steps}; lower --profile-active, --profile-wait or --profile-warmup, or pass \
             more --epochs or --steps"
        )));
    }
    if active < FEW_STEPS {
        warnings.push(format!(
            "--profile-active {active}: Holistic Trace Analysis leaves the last step out where there are two \
             or more; record {FEW_STEPS} at least for it"
        ));
    }
    let folder = args.profile_dir.clone().unwrap_or_else(|| "profile".into()).join(strategy);
    Ok(Some(ProfileConfig { wait, warmup, active, folder }))
}

impl ProfileConfig {
    /// Whether traces can be written.
    pub fn check(&self) -> Result<()> {
        check_folder("--profile-dir", &self.folder, "pass a folder that you can write to")
    }
}

/// Events per recorded step that find room, by track: several times what a step of the largest model here
/// records.
const MAIN_EVENTS: u64 = 1 << 11;
const KERNEL_EVENTS: u64 = 1 << 12;
const COMMUNICATION_EVENTS: u64 = 1 << 10;
const LOADER_EVENTS: u64 = 1 << 6;
const MEMORY_EVENTS: u64 = 1 << 13;
const THREAD_EVENTS: u64 = 1 << 13;

/// However many steps are recorded, all tracks together hold no more than this: about 130 MB.
const MAX_EVENTS: u64 = 1 << 20;

/// Records the steps of a window and writes them.
pub struct Profiler {
    config: ProfileConfig,
    recorder: Recorder,
    main: Arc<Track>,
    communication: Arc<Track>,
    loader: Arc<Track>,
    /// Steps that were recorded.
    steps: Vec<(u64, Span)>,
    clock_at_begin: ClockOffset,
    /// The file, once it is written.
    trace: Option<PathBuf>,
}

impl Profiler {
    /// A profiler of this rank, and the means of computation that record for it.
    pub fn new(config: &ProfileConfig, compute: Compute, allocator: &Allocator) -> (Self, Compute) {
        // A single thread is the main one.
        let num_threads = Some(compute.threads.count()).filter(|count| *count > 1).unwrap_or(0);
        let per_step = MAIN_EVENTS + KERNEL_EVENTS + COMMUNICATION_EVENTS + LOADER_EVENTS;
        let per_step = per_step + MEMORY_EVENTS + THREAD_EVENTS * num_threads as u64;
        let num_steps = config.active.min(MAX_EVENTS / per_step);
        let mut recorder = Recorder::new();
        let mut track =
            |name: &str, events: u64| recorder.track(name, (events * num_steps) as usize);
        // The first track's thread is the main one of the file.
        let main = track("main", MAIN_EVENTS);
        let kernels = track("kernels", KERNEL_EVENTS);
        let communication = track("communication", COMMUNICATION_EVENTS);
        let loader = track("loader", LOADER_EVENTS);
        allocator.record_on(track("memory", MEMORY_EVENTS));
        let names = (0..num_threads).map(|at| format!("compute {at}"));
        let threads = names.map(|name| track(&name, THREAD_EVENTS)).collect();
        let profiler = Self {
            config: config.clone(),
            main,
            communication,
            loader,
            recorder,
            steps: Vec::with_capacity(config.active.min(MAX_EVENTS) as usize),
            clock_at_begin: ClockOffset::default(),
            trace: None,
        };
        (profiler, compute.recorded(kernels, threads))
    }

    /// Where the loader records.
    pub fn loader(&self) -> Arc<Track> {
        self.loader.clone()
    }

    /// Called before each step, of which so many were made: the window may begin here.
    pub fn begin_step(&mut self, steps_made: u64, group: &Group) -> Result<()> {
        if steps_made == self.config.wait + self.config.warmup {
            self.clock_at_begin = measure_clock(group)?;
            self.recorder.set_on(true);
        }
        Ok(())
    }

    /// Called after each step, with its number, when its batches were asked for, its span, what the main
    /// thread recorded and the operations: the window may end here, and then the trace is written.
    pub fn end_step(
        &mut self,
        number: u64,
        asked_ns: u64,
        span: Span,
        lane: &Lane,
        records: &[OpRecord],
        group: &Group,
    ) -> Result<()> {
        if !self.main.is_on() {
            return Ok(());
        }
        let wait = Span { start_ns: asked_ns, end_ns: span.start_ns };
        self.main.record(Event::Span { name: "data wait", span: wait });
        self.steps.push((number, Span { start_ns: asked_ns, ..span }));
        for (name, span) in lane.spans() {
            self.main.record(Event::Span { name, span });
        }
        for mark in lane.marks() {
            self.main.record(Event::Mark { name: mark.name, at_ns: mark.at_ns, id: mark.id });
        }
        for record in records {
            self.communication.record(Event::Operation(record.traced()));
        }
        if self.steps.len() as u64 == self.config.active {
            self.write(group)?;
        }
        Ok(())
    }

    /// A quantity's value from now on.
    pub fn count(&self, name: &'static str, at_ns: u64, value: f64) {
        self.main.record(Event::Counter { name, at_ns, value });
    }

    /// Writes what was recorded where the run ends before the window does.
    pub fn finish(&mut self, group: &Group) -> Result<()> {
        if self.steps.is_empty() || self.trace.is_some() { Ok(()) } else { self.write(group) }
    }

    /// The trace, once it is written.
    pub fn trace(&self) -> Option<&Path> {
        self.trace.as_deref()
    }

    /// Events that found no room.
    pub fn dropped(&self) -> u64 {
        self.recorder.dropped()
    }

    fn write(&mut self, group: &Group) -> Result<()> {
        self.recorder.set_on(false);
        let clock_at_end = measure_clock(group)?;
        let folder = self.config.folder.join(format!("rank_{}", group.rank()));
        // The name that PyTorch gives: the worker, and when, in nanoseconds since 1970.
        let now_ns = realtime_at_zero_ns() + paceline_trace::now_ns();
        // Folders of traces are shared by all runs of a strategy; this tells which belong together.
        let mut run_id = [now_ns as i64];
        group.broadcast_slice(&mut run_id, 0)?;
        let path = folder.join(format!("worker_{}.{now_ns}.pt.trace.json.gz", group.rank()));
        let header = self.header(group, run_id[0], clock_at_end);
        let tracks: Vec<&Track> = self.recorder.tracks().iter().map(AsRef::as_ref).collect();
        std::fs::create_dir_all(&folder)
            .and_then(|()| kineto::write_file(&path, &header, &tracks))
            .map_err(|e| Failure::io(format!("cannot write the trace {}", path.display()), e))?;
        self.trace = Some(path);
        // A rank that goes on alone would measure how long the others write.
        group.barrier()?;
        Ok(())
    }

    fn header(&self, group: &Group, run_id: i64, clock_at_end: ClockOffset) -> kineto::Header {
        let mut truth = vec![("dropped_events".to_owned(), self.dropped().to_string())];
        if let Some(link) = group.link() {
            truth.push(("emulated_link".into(), link.to_string()));
        }
        for (when, clock) in [("begin", self.clock_at_begin), ("end", clock_at_end)] {
            truth.push((format!("clock_offset_{when}_ns"), clock.offset_ns.to_string()));
        }
        let error = self.clock_at_begin.error_ns.max(clock_at_end.error_ns);
        truth.push(("clock_offset_error_ns".into(), error.to_string()));
        kineto::Header {
            rank: group.rank(),
            world_size: group.world_size(),
            run_id: run_id.to_string(),
            transport: group.transport().name().into(),
            device: resources::machine(),
            pid: std::process::id(),
            base_ns: realtime_at_zero_ns(),
            truth,
            steps: self.steps.clone(),
        }
    }
}

/// The folder of the traces, in words for the end of a run.
pub fn advice(folder: &Path) -> String {
    let folder = folder.display();
    format!("Traces: {folder} (paceline analyze {folder}; or open a file in ui.perfetto.dev)")
}
