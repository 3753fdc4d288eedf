//! The flags of `paceline train` that sweeps and studies pass on to their runs.

use clap::Arg;
use paceline_settings::flags::{self, Scope};
use paceline_settings::part::{Part, Selection};

/// Places that a sweep decides about: the summaries and the folders of its runs go into its own folder.
const OF_SWEEP: [&str; 2] = ["json", "run-dir"];

/// Whether a sweep varies the flag, and passes it on.
pub fn is_swept(flag: &Arg) -> bool {
    Scope::of(flag).is_swept() && !OF_SWEEP.contains(&flags::key(flag))
}

/// Flags that sweeps have and studies do not pass on: the studies set them, or they make no sense in a run that only
/// measures.
const NOT_PASSED_ON: [&str; 10] = [
    "nproc",
    // It depends on the number of ranks.
    "mesh",
    "schedule",
    "stages",
    // Measurements count --steps-per-epoch and --epochs.
    "steps",
    "evaluate",
    "eval-every",
    "early-stop",
    "sample-every",
    "tensorboard",
];

/// The flags of a run, except those that the study sets itself.
pub type TrainFlags = Part<PassedOn>;

/// The flags that a study passes on.
#[derive(Clone, Copy, Debug)]
pub struct PassedOn;

impl Selection for PassedOn {
    fn flags() -> Vec<Arg> {
        let is_passed_on = |flag: &&Arg| {
            let key = flags::key(flag);
            is_swept(flag) && !NOT_PASSED_ON.contains(&key)
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

/// The same flags, and those that state a part of the layout, for a plan.
#[derive(Clone, Copy, Debug)]
pub struct Planned;

impl Selection for Planned {
    fn flags() -> Vec<Arg> {
        let all = flags::all();
        let of_layout = all.iter().filter(|flag| ["mesh", "schedule"].contains(&flags::key(flag)));
        PassedOn::flags().into_iter().chain(of_layout.cloned()).collect()
    }
}

/// The flags of a run, except those that a sweep sets itself.
#[derive(Clone, Copy, Debug)]
pub struct Swept;

impl Selection for Swept {
    fn flags() -> Vec<Arg> {
        flags::all().iter().filter(|flag| is_swept(flag)).cloned().collect()
    }
}
