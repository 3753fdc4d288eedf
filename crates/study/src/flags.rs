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
            CONFIGURATION.contains(&key)
                || why_not_swept(key).is_none() && !NOT_PASSED_ON.contains(&key)
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
const NOT_SWEPT: [(&str, &str); 9] = [
    ("config recipe", "all runs start from one configuration"),
    ("json", "each run's summary goes into the folder of the sweep"),
    ("quiet verbose log-every sample-every", "the runs of a sweep print nothing"),
    ("name", "each run's folder has a name of its own"),
    ("run-dir", "run folders go into the folder of the sweep"),
    (
        "save save-best save-every save-keep save-budget-mb save-sync",
        "runs of several rounds would write the same checkpoint",
    ),
    ("resume", "runs of several rounds would not begin alike"),
    ("ddp-choice shard-choice", "vary strategy"),
    ("price-per-hour", "it is about comparisons such as --ddp-choice all"),
];

/// Why a sweep does not vary the flag of this name, if it does not.
pub fn why_not_swept(key: &str) -> Option<&'static str> {
    let is_in = |keys: &str| keys.split(' ').any(|other| other == key);
    NOT_SWEPT.iter().find(|(keys, _)| is_in(keys)).map(|(_, why)| *why)
}

/// The flags of a run, except those that a sweep sets itself.
#[derive(Clone, Copy, Debug)]
pub struct Swept;

impl Selection for Swept {
    fn flags() -> Vec<Arg> {
        flags::all()
            .iter()
            .filter(|flag| why_not_swept(flags::key(flag)).is_none())
            .cloned()
            .collect()
    }
}
