//! The flags of `paceline train` that sweeps and studies pass on to their runs.

use clap::Arg;
use paceline_settings::flags;
use paceline_settings::part::{Part, Selection};

/// Flags that sweeps have and studies do not pass on: the studies set them, or they make no sense in a run that only
/// measures.
const NOT_PASSED_ON: [&str; 9] = [
    "nproc",
    // It depends on the number of ranks.
    "mesh",
    "schedule",
    "stages",
    // Measurements count --steps-per-epoch and --epochs.
    "steps",
    "tensorboard",
    "evaluate",
    "eval-every",
    "early-stop",
];

/// Flags that studies pass on, although sweeps do not have them.
const CONFIGURATION: [&str; 2] = ["config", "recipe"];

/// The flags of a run, except those that the study sets itself.
pub type TrainFlags = Part<PassedOn>;

/// The flags that a study passes on.
#[derive(Clone, Copy, Debug)]
pub struct PassedOn;

impl Selection for PassedOn {
    fn flags() -> Vec<Arg> {
        let is_passed_on = |flag: &&Arg| {
            let key = flags::key(flag);
            CONFIGURATION.contains(&key) || is_swept(key) && !NOT_PASSED_ON.contains(&key)
        };
        let all = flags::all();
        let passed_on = all.iter().filter(is_passed_on).cloned();
        passed_on
            .map(|flag| match flags::key(&flag) {
                "epochs" => flag.help("Passes over the data [default: enough for the steps]"),
                "steps-per-epoch" => {
                    flag.help("Batches of a run [default: for 30 steps, with those of warm-up]")
                }
                _ => flag,
            })
            .collect()
    }
}

/// Flags of `paceline train` that a sweep neither varies nor passes on, and why.
pub const NOT_SWEPT: [(&str, &str); 19] = [
    ("config", "all runs start from one configuration"),
    ("recipe", "all runs start from one configuration"),
    ("json", "each run's summary goes into the folder of the sweep"),
    ("quiet", "the runs of a sweep print nothing"),
    ("verbose", "the runs of a sweep print nothing"),
    ("log-every", "the runs of a sweep print nothing"),
    ("sample-every", "the runs of a sweep print nothing"),
    ("name", "each run's folder has a name of its own"),
    ("run-dir", "run folders go into the folder of the sweep"),
    ("save", "runs of several rounds would write the same checkpoint"),
    ("save-best", "runs of several rounds would write the same checkpoint"),
    ("save-every", "runs of several rounds would write the same checkpoint"),
    ("save-keep", "runs of several rounds would write the same checkpoint"),
    ("save-budget-mb", "runs of several rounds would write the same checkpoint"),
    ("save-sync", "runs of several rounds would write the same checkpoint"),
    ("resume", "runs of several rounds would not begin alike"),
    ("ddp-choice", "vary strategy"),
    ("shard-choice", "vary strategy"),
    ("price-per-hour", "it is about comparisons such as --ddp-choice all"),
];

/// The flags of a run, except those that a sweep sets itself.
#[derive(Clone, Copy, Debug)]
pub struct Swept;

impl Selection for Swept {
    fn flags() -> Vec<Arg> {
        flags::all().iter().filter(|flag| is_swept(flags::key(flag))).cloned().collect()
    }
}

fn is_swept(key: &str) -> bool {
    NOT_SWEPT.iter().all(|(left_out, _)| *left_out != key)
}
