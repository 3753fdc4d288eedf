//! The flags of `paceline train` that studies pass on to their runs.

use clap::Arg;
use paceline_settings::flags;
use paceline_settings::part::{Part, Selection};

/// Flags that studies do not pass on: the studies set them, or they make no sense
/// in a run that only measures.
const NOT_PASSED_ON: [&str; 22] = [
    "nproc",
    // It depends on the number of ranks.
    "mesh",
    // Measurements count --steps-per-epoch and --epochs.
    "steps",
    "json",
    "quiet",
    "log-every",
    "name",
    "run-dir",
    "save",
    "save-every",
    "save-keep",
    "save-budget-mb",
    "save-sync",
    "tensorboard",
    "resume",
    "evaluate",
    "eval-every",
    "ddp-choice",
    "shard-choice",
    "like-for-like",
    "as-published",
    "price-per-hour",
];

/// The flags of a run, except those that the study sets itself.
pub type TrainFlags = Part<PassedOn>;

/// The flags that a study passes on.
#[derive(Clone, Copy, Debug)]
pub struct PassedOn;

impl Selection for PassedOn {
    fn flags() -> Vec<Arg> {
        let passed_on = |flag: &Arg| !NOT_PASSED_ON.contains(&flags::key(flag));
        let all = flags::all().into_iter().filter(passed_on);
        all.map(|flag| match flags::key(&flag) {
            "epochs" => flag.help("Passes over the data [default: enough for the steps]"),
            "steps-per-epoch" => {
                flag.help("Batches of a run [default: for 30 steps, with those of warm-up]")
            }
            _ => flag,
        })
        .collect()
    }
}
