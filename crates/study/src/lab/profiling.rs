//! `profiling`: the cost of recording, per event and per step, and the operations of the recorded steps against their limit.

use std::path::Path;
use std::time::Instant;

use paceline_analysis::limit::{DEFINITION, FEW, Operations};
use paceline_failure::Result;
use paceline_files::Printable;
use paceline_trace::{Recorder, SpanTrack, now_ns};

use super::args::LabArgs;
use super::{Experiment, Made, runs};
use crate::report::{Found, tabled};
use crate::scene::Scene;
use crate::usage;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "profiling",
    about: "traces, curves and their cost",
    question: "What does it cost to watch a run, per event and per step?",
    set_here: &[
        ("profile", "the experiment varies it"),
        ("profile-dir", "traces go into the folder of the experiment"),
        ("tensorboard", "the experiment varies it"),
    ],
    figures: &["dropped_spans"],
    scenes,
    found,
};

/// Steps of a run, and those of its window.
const STEPS: usize = 30;

fn scenes(args: &LabArgs, folder: &Path) -> Result<Vec<Scene>> {
    let base = runs(args, &[("steps", "30"), ("warmup-steps", "3")]);
    let steps = base.number("steps").unwrap_or(STEPS);
    let Some(folder) = folder.to_str() else {
        return usage(format!("--output {}: pass a path that is valid UTF-8", folder.printable()));
    };
    let profile = |name: &str, wait: usize, active: usize| {
        base.with("profile", "true")
            .with("profile-dir", format!("{folder}/traces/{name}"))
            .with("profile-wait", wait)
            .with("profile-warmup", 0)
            .with("profile-active", active)
    };
    Ok(vec![
        Scene::new("")
            .with("nothing recorded", base.clone())
            .with("a trace of 5 steps", profile("window", steps.saturating_sub(5), 5.min(steps)))
            .with("a trace of all steps", profile("all", 0, steps))
            .with("TensorBoard", base.with("tensorboard", "true")),
    ])
}

/// How often each is recorded, and how often that is repeated. The least of the repetitions counts.
const TIMES: usize = 20_000;
const REPETITIONS: usize = 15;

/// The nanoseconds that each of [`TIMES`] calls takes.
fn each(mut prepare: impl FnMut() -> Box<dyn FnMut()>) -> f64 {
    let repetition = |_| {
        let mut run = prepare();
        let begin = Instant::now();
        for _ in 0..TIMES {
            run();
        }
        begin.elapsed().as_nanos() as f64 / TIMES as f64
    };
    (0..REPETITIONS).map(repetition).fold(f64::INFINITY, f64::min)
}

/// The nanoseconds of recording each of these things.
fn costs() -> [(&'static str, f64); 4] {
    let track = |is_on: bool| {
        move || -> Box<dyn FnMut()> {
            let mut recorder = Recorder::new();
            let track = recorder.track("lab", TIMES);
            recorder.set_on(is_on);
            Box::new(move || {
                track.span("nothing", || std::hint::black_box(()));
                let _ = &recorder;
            })
        }
    };
    let clock = || -> Box<dyn FnMut()> {
        Box::new(|| {
            std::hint::black_box(now_ns());
        })
    };
    let part = || -> Box<dyn FnMut()> {
        let mut track = SpanTrack::with_capacity(TIMES);
        Box::new(move || track.record("nothing", || std::hint::black_box(())))
    };
    [
        ("reading the clock", each(clock)),
        ("a span of a trace, while traces are off", each(track(false))),
        ("a span of a trace, while they are on", each(track(true))),
        ("a part of a step, which every run measures", each(part)),
    ]
}

fn found(made: &Made) -> Result<Vec<Found>> {
    let heads = [("what", "recording", ("", 0)), ("ns", "each takes", ("ns", 1))];
    let rows = costs().map(|(what, ns)| [what.to_owned().into(), ns.into()]);
    let mut lines = Vec::new();
    if let Some(trace) = trace_of(made) {
        let trace = trace.printable();
        lines.push(format!("A trace to look at: {trace}"));
        lines.push("  in ui.perfetto.dev: each rank is a process; forward, backward and optimizer_step are spans of its main thread".to_owned());
        lines.push("  below them its kernels, and the operations of its communication thread: what lies under backward is hidden".to_owned());
        lines.push(format!("  paceline analyze {trace} says the same in figures, and what to do"));
    }
    let definition = "Recorded in a loop on one thread, into memory that is there already; a span reads the clock twice. The least \
                      of 15 repetitions of 20,000.";
    let of_run = made.outcome.runs[1].first().map(|run| run.part::<Operations>("operations"));
    let operations = of_run.unwrap_or_default();
    let limits = Found {
        lines: vec![operations.sentence()],
        ..Found::new("operations", "Operations and their limit", DEFINITION, operations.table(FEW))
    };
    let events = Found {
        lines,
        ..Found::new("events", "What an event costs", definition, tabled(heads, rows))
    };
    Ok(vec![limits, events])
}

/// The folder of the traces of the run that recorded a few steps.
fn trace_of(made: &Made) -> Option<std::path::PathBuf> {
    let traces: Vec<String> = made.outcome.runs[1].first()?.part("traces");
    let file = std::path::PathBuf::from(traces.first()?);
    file.parent().and_then(|rank| rank.parent()).map(std::path::Path::to_path_buf)
}
