//! The flags of a run: those that every run has, and those of every choice.
//!
//! Each flag is defined once, here or in the file of the choice that reads it. Its definition has the
//! name (which is also the key in a configuration file and in a sweep), the help, the accepted values,
//! and the default. How flags combine is defined in `paceline_run::resolve`.

mod compare;
mod profile;
mod sections;

use std::sync::{Arc, Mutex, PoisonError};

use clap::{Arg, ArgAction, Args, Command};
use paceline_choices::data::DATA_SETS;
use paceline_choices::models::MODELS;
use paceline_choices::optimizers::OPTIMIZERS;
use paceline_choices::registry::{self, flags_of};
use paceline_choices::strategies::STRATEGIES;

use super::schedule::Schedule;
pub use compare::{BASELINE, CompareFlags, Comparison, MAX_PRICE, Several};
pub use paceline_launch::CommArgs;
pub use profile::ProfileArgs;
pub use sections::{
    CheckpointFlags, CopyFlags, DataFlags, EvaluationFlags, HostFlags, LossScaleFlags, OutputFlags,
    PipelineFlags, PrecisionFlags, RankFlags, StrategyFlags, TrainingFlags,
};

/// The flags that every run has.
#[derive(Clone, Debug, Args)]
pub struct RunFlags {
    /// Model
    #[arg(long, value_parser = MODELS.parser(), default_value = MODELS.default_name(), help_heading = "Model")]
    pub model: String,
    /// Do not train these layers: conv0, fc0, ...
    #[arg(long, num_args = 1.., value_name = "LAYER", help_heading = "Model")]
    pub freeze: Vec<String>,
    /// The data.
    #[command(flatten)]
    pub data: DataFlags,
    /// How the ranks keep their models equal.
    #[command(flatten)]
    pub strategy: StrategyFlags,
    /// Stages of a pipeline.
    #[command(flatten)]
    pub pipeline: PipelineFlags,
    /// Whether to compare strategies.
    #[command(flatten)]
    pub compare: CompareFlags,
    /// Steps, and the samples of each.
    #[command(flatten)]
    pub training: TrainingFlags,
    /// How the learning rate changes.
    #[command(flatten)]
    pub schedule: Schedule,
    /// How the loss is scaled.
    #[command(flatten)]
    pub loss_scale: LossScaleFlags,
    /// When the model is evaluated.
    #[command(flatten)]
    pub evaluation: EvaluationFlags,
    /// How products are computed.
    #[command(flatten)]
    pub precision: PrecisionFlags,
    /// Ranks, and where they compute.
    #[command(flatten)]
    pub ranks: RankFlags,
    /// How the ranks talk to each other.
    #[command(flatten)]
    pub comm: CommArgs,
    /// How a host computes and loads its part.
    #[command(flatten)]
    pub host: HostFlags,
    /// How batches come to a device.
    #[command(flatten)]
    pub copies: CopyFlags,
    /// Whether to write traces.
    #[command(flatten)]
    pub profile: ProfileArgs,
    /// Checkpoints that a run writes, and the one where it begins.
    #[command(flatten)]
    pub checkpoints: CheckpointFlags,
    /// Files and lines that a run writes.
    #[command(flatten)]
    pub output: OutputFlags,
}

/// Who may state a flag, and which runs it goes to. It follows from the heading under which the help prints the flag.
///
/// | scope | headings | a checkpoint records it | a run folder repeats it | all ranks agree on it | a sweep varies it |
/// |---|---|---|---|---|---|
/// | `Result` | Model, Data, Strategy, Pipeline, Training, Evaluation, Precision, and those of a user's own choices | yes | yes | yes | yes |
/// | `Ranks` | Ranks, Communication, Observation | no | yes | yes | yes |
/// | `Host` | Host | no | yes | no | yes |
/// | `Places` | Files and addresses | no | no | no | yes |
/// | `Checkpoints` | Checkpoints | no | no | yes | no |
/// | `Output` | Output, Comparison | no | yes | no | no |
///
/// A checkpoint or a run folder may come from a stranger. So neither decides where this program writes, which server it asks,
/// or which other file it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The model, the samples and the weights.
    Result,
    /// How the ranks together carry a run out.
    Ranks,
    /// How one host carries it out.
    Host,
    /// Where a host finds files, and where its processes meet others.
    Places,
    /// Checkpoints, which all ranks write and read together.
    Checkpoints,
    /// Output for people.
    Output,
}

/// The heading of [`Scope::Places`].
pub const PLACES: &str = "Files and addresses";

impl Scope {
    /// The scope of a flag.
    pub fn of(flag: &Arg) -> Self {
        match flag.get_help_heading().unwrap_or_default() {
            "Ranks" | "Communication" | "Observation" => Self::Ranks,
            // They change no bit of the weights.
            "Pipeline" if ["head-at-once", "pipeline-memory"].contains(&key(flag)) => Self::Ranks,
            "Host" => Self::Host,
            PLACES => Self::Places,
            "Checkpoints" => Self::Checkpoints,
            "Output" | "Comparison" => Self::Output,
            _ => Self::Result,
        }
    }

    /// The scope of the flag of this name; `None` if there is no such flag.
    pub fn of_key(name: &str) -> Option<Self> {
        all().iter().find(|flag| key(flag) == name).map(Self::of)
    }

    /// Whether a checkpoint records the flag, and states it when a run goes on from there.
    pub fn is_recorded(self) -> bool {
        self == Self::Result
    }

    /// Whether the configuration of a run folder states the flag when the run is repeated.
    pub fn is_repeated(self) -> bool {
        !matches!(self, Self::Places | Self::Checkpoints)
    }

    /// Whether all ranks must be started with the same value.
    pub fn is_of_all_ranks(self) -> bool {
        matches!(self, Self::Result | Self::Ranks | Self::Checkpoints)
    }

    /// Whether a sweep can vary the flag, and passes it on to its runs.
    pub fn is_swept(self) -> bool {
        !matches!(self, Self::Checkpoints | Self::Output)
    }
}

/// The most ranks for each core that a checkpoint or a run folder may ask for.
pub const RANKS_PER_CORE: usize = 8;

/// Every flag of a run, in the order of the help. The flags of choices follow the flag that names one.
///
/// A command asks for them a dozen times, and they take thousands of allocations, so they are made once, and again when the
/// program has added a choice.
pub fn all() -> Arc<[Arg]> {
    /// The flags, and of how many choices they are. Choices are only ever added.
    type Made = ([usize; 4], Arc<[Arg]>);
    static MADE: Mutex<Option<Made>> = Mutex::new(None);
    let num_choices = [
        MODELS.num_choices(),
        DATA_SETS.num_choices(),
        OPTIMIZERS.num_choices(),
        STRATEGIES.num_choices(),
    ];
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, flags) = match made.take().filter(|(of, _)| *of == num_choices) {
        Some(known) => made.insert(known),
        None => made.insert((num_choices, make())),
    };
    flags.clone()
}

fn make() -> Arc<[Arg]> {
    let mut flags: Vec<Arg> = Vec::new();
    for flag in flags_of::<RunFlags>() {
        let of_choices = match key(&flag) {
            key if key == MODELS.key => MODELS.flags(),
            key if key == DATA_SETS.key => DATA_SETS.flags(),
            key if key == OPTIMIZERS.key => OPTIMIZERS.flags(),
            key if key == STRATEGIES.key => STRATEGIES.flags(),
            _ => Vec::new(),
        };
        flags.push(flag);
        flags.extend(of_choices);
    }
    let ordered = flags.into_iter().enumerate();
    ordered.map(|(place, flag)| switch(flag).display_order(place)).collect()
}

/// The name of a flag, without dashes.
pub fn key(flag: &Arg) -> &str {
    flag.get_long().unwrap_or(flag.get_id().as_str())
}

/// Whether the flag of this name takes several values.
pub fn takes_list(name: &str) -> bool {
    all().iter().any(|flag| key(flag) == name && registry::takes_list(flag))
}

/// The `clap` command that parses the flags of a run.
pub fn command() -> Command {
    // With negative numbers allowed, "--lr -1" is rejected as a value, not as an unknown flag.
    Command::new("paceline train").allow_negative_numbers(true).args(all().iter().cloned())
}

/// Lets a switch take a value, as in `--batch-norm=false`, so that a flag can turn off what a file turns
/// on.
fn switch(flag: Arg) -> Arg {
    if !matches!(flag.get_action(), ArgAction::SetTrue) {
        return flag;
    }
    flag.action(ArgAction::Set)
        .value_parser(clap::value_parser!(bool))
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .default_value("false")
        .value_name("BOOL")
        .hide_default_value(true)
        .hide_possible_values(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A heading that nobody knows would let a checkpoint of a stranger state the flag.
    #[test]
    fn each_flag_has_a_known_heading() {
        let known = [
            "Model",
            "Data",
            "Strategy",
            "Pipeline",
            "Training",
            "Evaluation",
            "Precision",
            "Ranks",
            "Communication",
            "Observation",
            "Host",
            PLACES,
            "Checkpoints",
            "Output",
            "Comparison",
        ];
        for flag in all().iter() {
            let heading = flag.get_help_heading().unwrap_or_default();
            assert!(known.contains(&heading), "--{} has the heading {heading:?}", key(flag));
        }
        // A checkpoint states the schedule, and not how much a rank may keep.
        let of_pipeline = ["schedule", "pipeline-memory"].map(Scope::of_key);
        assert_eq!(of_pipeline, [Some(Scope::Result), Some(Scope::Ranks)]);
    }

    /// Whoever adds a flag that names a file, a folder or an address decides here who may state it.
    #[test]
    fn places_are_for_the_user_to_state() {
        let of = |scope| -> Vec<String> {
            let all = all();
            let mut keys: Vec<String> = all
                .iter()
                .filter(|flag| Scope::of(flag) == scope)
                .map(|flag| key(flag).to_owned())
                .collect();
            keys.sort();
            keys
        };
        let places = [
            "download",
            "host",
            "init-method",
            "json",
            "mirror",
            "profile-dir",
            "run-dir",
            "token-cache",
        ];
        assert_eq!(of(Scope::Places), places);
        let checkpoints = [
            "resume",
            "save",
            "save-best",
            "save-budget-mb",
            "save-every",
            "save-keep",
            "save-sync",
        ];
        assert_eq!(of(Scope::Checkpoints), checkpoints);
    }
}
