//! Flags of `paceline evaluate`: a checkpoint, and those flags of `paceline train` that concern the model, the
//! data, the ranks and how they talk to each other.

use std::path::PathBuf;

use clap::{Arg, Args};
use paceline_choices::data::DATA_SETS;
use paceline_choices::models::MODELS;
use paceline_failure::Result;
use paceline_settings::flags;
use paceline_settings::part::{Part, Selection};
use paceline_settings::recipes::BeginFlags;
use paceline_settings::spec::RunSpec;

const EXAMPLES: &str = "\
Examples:
  paceline evaluate --checkpoint ckpt                 the CNN on the test part of synthetic images
  paceline evaluate --checkpoint ckpt --data mnist --data-dir ~/mnist --nproc 4
";

/// The groups of flags that an evaluation takes from `paceline train`, by their headings in the help.
const HEADINGS: [&str; 6] = ["Model", "Precision", "Ranks", "Communication", "Host", "Data"];
/// Other flags that it takes.
const ALSO: [&str; 5] = ["batch-size", "global-batch-size", "seed", "host", "init-method"];
/// Flags in these groups that are of use in training only. An evaluation of a checkpoint computes on the processor, and each rank
/// has the whole model.
const ONLY_TRAINING: [&str; 14] = [
    "head-at-once",
    "pipeline-memory",
    "cuda-graph",
    "tf32",
    "nccl-order",
    "rank-samples",
    "device",
    "pin-memory",
    "non-blocking",
    "copy-stream",
    "generate-on-host",
    "load-ahead",
    "decode-us",
    "mark-ranges",
];

/// Flags of `paceline evaluate`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct EvaluateArgs {
    /// Folder of the checkpoint, as --save names it
    #[arg(long, value_name = "DIR", help_heading = "Evaluation")]
    pub checkpoint: PathBuf,
    /// The configuration that the flags are added to.
    #[command(flatten)]
    pub begin: BeginFlags,
    /// Write loss, accuracy and the number of samples to this file too
    #[arg(long, value_name = "FILE", help_heading = "Evaluation")]
    pub json: Option<PathBuf>,
    /// Write the class that is predicted for each test sample to this CSV file, with its label and its probability, and print how
    /// often each class is taken for each
    #[arg(long, value_name = "FILE", help_heading = "Evaluation")]
    pub predictions: Option<PathBuf>,
    /// Flags of `paceline train`.
    #[command(flatten)]
    pub flags: Part<Taken>,
}

/// The flags of a run that an evaluation takes.
#[derive(Clone, Copy, Debug)]
pub struct Taken;

impl Selection for Taken {
    fn flags() -> Vec<Arg> {
        let of_choices = [MODELS.flags(), DATA_SETS.flags()].concat();
        let is_taken = |flag: &Arg| {
            let key = flags::key(flag);
            let of_heading = flag.get_help_heading().is_some_and(|text| HEADINGS.contains(&text));
            let is_meant = of_heading || of_choices.iter().any(|own| own.get_id() == flag.get_id());
            (is_meant && !ONLY_TRAINING.contains(&key)) || ALSO.contains(&key)
        };
        let all = flags::all();
        let taken = all.iter().filter(|flag| is_taken(flag)).cloned();
        taken
            .map(|flag| match flags::key(&flag) {
                "seed" => flag
                    .help("Decides synthetic data; the seed that the checkpoint was trained with"),
                _ => flag,
            })
            .collect()
    }
}

/// Whether an evaluation takes the flag of this name.
pub(crate) fn is_taken(key: &str) -> bool {
    Taken::flags().iter().any(|flag| flags::key(flag) == key)
}

impl EvaluateArgs {
    /// The settings of model, data and ranks. Flags win over the file or the recipe. Also returns notes about
    /// settings of the file that flags replaced.
    pub fn spec(&self) -> Result<(RunSpec, Vec<String>)> {
        self.begin.overlaid(&self.flags.0, is_taken)
    }
}
