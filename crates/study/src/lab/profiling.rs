//! `profiling`: the cost of recording, per event and per step.

use std::path::Path;
use std::time::Instant;

use paceline_failure::Result;
use paceline_files::Printable;
use paceline_table::table::Columns;
use paceline_trace::{Recorder, SpanTrack, now_ns};

use super::args::LabArgs;
use super::outcome::Beside;
use super::scene::Scene;
use super::{Experiment, Made, runs};
use crate::usage;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "profiling",
    about: "traces, curves and their cost",
    question: "What does it cost to watch a run, per event and per step?",
    set_here: &[
        ("profile", "it is what the experiment turns"),
        ("profile-dir", "traces go into the folder of the experiment"),
        ("tensorboard", "it is what the experiment turns"),
    ],
    figures: &["dropped_spans"],
    scene_label: None,
    scenes,
    beside,
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

/// The cost of recording one thing.
struct Cost {
    what: &'static str,
    ns: f64,
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

fn costs() -> Vec<Cost> {
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
    vec![
        Cost {
            what: "reading the clock",
            ns: each(|| {
                Box::new(|| {
                    std::hint::black_box(now_ns());
                })
            }),
        },
        Cost { what: "a span of a trace, while traces are off", ns: each(track(false)) },
        Cost { what: "a span of a trace, while they are on", ns: each(track(true)) },
        Cost {
            what: "a part of a step, which every run measures",
            ns: each(|| {
                let mut track = SpanTrack::with_capacity(TIMES);
                Box::new(move || track.record("nothing", || std::hint::black_box(())))
            }),
        },
    ]
}

fn beside(made: &Made) -> Result<Vec<Beside>> {
    let costs = costs();
    let table = Columns::new()
        .add("what", "recording", ("", 0), "", |row: &Cost| row.what)
        .add("ns", "each takes", ("ns", 1), "The least of 15 repetitions of 20,000.", |row| row.ns)
        .table(&costs);
    let mut lines = Vec::new();
    if let Some(trace) = trace_of(made) {
        lines.push(format!("A trace to look at: {}", trace.printable()));
        lines.push("  in ui.perfetto.dev: each rank is a process; forward, backward and optimizer_step are spans of its main thread".to_owned());
        lines.push("  below them its kernels, and the operations of its communication thread: what lies under backward is hidden".to_owned());
        lines.push(format!(
            "  paceline analyze {} says the same in figures, and what to do",
            trace.printable()
        ));
    }
    Ok(vec![Beside {
        id: "events",
        title: "What an event costs",
        definition: "Recorded in a loop on one thread, into memory that is there already; a span reads the clock twice.".to_owned(),
        table,
        lines,
        chart: None,
    }])
}

/// The folder of the traces of the run that recorded a few steps.
fn trace_of(made: &Made) -> Option<std::path::PathBuf> {
    let (runs, _) = made.ledger.of_case(1);
    let traces: Vec<String> = runs.first()?.part("traces");
    let file = std::path::PathBuf::from(traces.first()?);
    file.parent().and_then(|rank| rank.parent()).map(std::path::Path::to_path_buf)
}
