//! Defines the command line for `clap`. How the flags combine is decided in
//! [`resolve`](paceline_run::resolve).

use std::ffi::OsString;

use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use paceline_checkpoint::args::CheckpointCommand;
use paceline_launch::LaunchArgs;
use paceline_run::evaluate::args::EvaluateArgs;
use paceline_run::train::args::TrainCommand;
use paceline_settings::part::add_later;
use paceline_study::lab::args::LabArgs;
use paceline_study::plan::PlanArgs;
use paceline_study::predict::PredictArgs;
use paceline_study::sweep::args::SweepArgs;

use crate::commands::analyze::args::AnalyzeArgs;
use crate::commands::bench::BenchCommand;
use crate::commands::check::args::CheckArgs;
use crate::commands::classify::args::ClassifyArgs;
use crate::commands::compare::args::CompareRunsArgs;
use crate::commands::completions::CompletionsArgs;
use crate::commands::fetch::args::FetchCommand;
use crate::commands::generate::args::GenerateArgs;
use crate::commands::hang::HangArgs;
use crate::commands::new::NewArgs;
use crate::commands::record::args::RecordArgs;
use crate::commands::record::steps::StepsArgs;
use crate::commands::schedule::ScheduleArgs;
use crate::commands::show::ShowArgs;
use crate::commands::tokenizer::args::TokenizerCommand;
use crate::commands::trace::args::TraceCommand;

const EXAMPLES: &str = "\
Examples:
  paceline train                                      2 ranks, a CNN on synthetic images
  paceline train --ddp-choice all                     every strategy, compared in a table
  paceline launch -n 2 -- ./my-program --its-flags    any program, with RANK, WORLD_SIZE, ...
  paceline bench all_reduce -b 1K -e 64M -f 4         how fast ranks exchange data
  paceline bench scaling --nproc 1,2,4                what more ranks bring, and what limits them
  paceline check --nproc 4                            does everything here work?
  paceline predict --nproc 2,8 --links 10gbe          what more ranks on a network would take
  paceline train --profile && paceline analyze profile/ddp    traces, and a report of them
  paceline record -- torchrun --nproc-per-node 2 train.py     why a PyTorch program is slow
  paceline hang /tmp                                  which rank a PyTorch job waits for
  paceline lab async-copy                             one knob of training, where it pays
  paceline sweep --vary nproc=1,2 --output sweeps/a   any settings, in turns, ranked
  paceline show runs/20260131-120000-cnn-ddp          all that a run has reported
  paceline compare runs/*                             runs side by side
  paceline new my-project                             a model, a data set and a strategy of your own
";

/// Distributed training that shows where every millisecond and megabyte goes.
#[derive(Debug, Parser)]
#[command(name = "paceline", version, before_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model on several ranks
    Train(Later<TrainCommand>),
    /// Evaluate a checkpoint on the test set
    Evaluate(Later<EvaluateArgs>),
    /// Generate text with a trained language model
    Generate(GenerateArgs),
    /// Put texts into classes with a trained classifier
    Classify(ClassifyArgs),
    /// Make a tokenizer from texts
    #[command(subcommand)]
    Tokenizer(TokenizerCommand),
    /// Fetch a model or a data set by its name, so that training finds it
    #[command(subcommand)]
    Fetch(FetchCommand),
    /// Show, verify or export checkpoints
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Start N copies of any program as the ranks of a run
    Launch(LaunchArgs),
    /// Measure how fast the ranks exchange data, and how training scales
    Bench(BenchCommand),
    /// Check that ranks can start, see their devices, and reach each other
    Check(CheckArgs),
    /// Turn one knob of training at a time, where it pays and where it does not
    Lab(Later<LabArgs>),
    /// Run training with every combination of some settings, and rank the results
    Sweep(Later<SweepArgs>),
    /// Predict the time of a step on more ranks and other links, from runs without communication
    Predict(Later<PredictArgs>),
    /// Plan a training step before renting anything: every layout on stated cards and links, by predicted time and memory
    Plan(Later<PlanArgs>),
    /// Run a PyTorch program as it is, record some of its steps on each rank, and say what makes them slow
    Record(RecordArgs),
    /// Analyze the traces of a run: where the time went, who waited for whom, and what to do
    Analyze(Box<AnalyzeArgs>),
    /// Say which rank of a PyTorch job holds up the others, from the files of its flight recorder
    Hang(HangArgs),
    /// Compare runs: time, samples/s, the anatomy of the step, memory, accuracy and cost
    Compare(CompareRunsArgs),
    /// Draw what each rank of a pipeline does in a step, and count its idle time
    Schedule(ScheduleArgs),
    /// Show all that a run has reported: where each rank was, operation by operation, and memory by phase
    Show(ShowArgs),
    /// Write a small project with a model, a data set and a strategy of its own
    New(NewArgs),
    /// Print the script with which a shell completes commands and flags
    Completions(CompletionsArgs),
    /// Work with the trace files that --profile writes
    #[command(subcommand)]
    Trace(TraceCommand),
    /// The launcher starts this as each rank: it ties its life to the launcher's, then becomes COMMAND
    #[command(name = "__rank", hide = true)]
    Rank {
        /// Process number of the launcher.
        parent: u32,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// `paceline bench scaling` starts this for each run of a program
    #[command(name = "__steps", hide = true)]
    Steps(StepsArgs),
    /// The process that kills the ranks' process groups when the launcher itself is killed
    #[command(name = "__guard", hide = true)]
    Guard,
}

impl Cli {
    /// The whole program: each command has its flags, without `--help`, which `clap` adds.
    pub fn whole() -> clap::Command {
        let mut program = Self::command().disable_help_flag(true).disable_help_subcommand(true);
        program.build();
        program
    }
}

/// A command whose flags are defined when its name has been read.
#[derive(Debug)]
pub struct Later<T>(pub Box<T>);

impl<T: Args> Args for Later<T> {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.defer(add_later::<T>)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl<T: FromArgMatches> FromArgMatches for Later<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(Box::new(T::from_arg_matches(matches)?)))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}
