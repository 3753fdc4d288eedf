//! The command line of paceline: parse, resolve, run, exit.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use paceline::cli::studies::BenchCommand;
use paceline::cli::{Cli, Command};
use paceline::{
    analyze, bench, check, compare, environment, evaluate, experiment, launcher, links, streams,
    sweep, trace,
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let place = || environment::read(|name| std::env::var(name).ok());
    let outcome = match cli.command {
        Command::Train(args) => place().and_then(|place| experiment::train(&args, place)),
        Command::Evaluate(args) => place().and_then(|place| evaluate::evaluate(&args, place)),
        Command::Bench(BenchCommand::Operation(args)) => {
            place().and_then(|place| bench::sweep::bench(&args, place))
        }
        Command::Bench(BenchCommand::Study(study, typed)) => {
            place().and_then(|place| study.make(&typed, place))
        }
        Command::Check(args) => place().and_then(|place| check::check(&args, place)),
        Command::Sweep(args) => place().and_then(|place| sweep::sweep(&args, place)),
        Command::Predict(args) => {
            place().and_then(|place| sweep::presets::predict::predict(&args, place))
        }
        Command::Analyze(args) => analyze::analyze(&args),
        Command::Compare(args) => compare::compare(&args),
        Command::Links(args) => links::links_command(&args),
        Command::Trace(command) => trace::trace(&command),
        Command::Launch(args) => launcher::launch_command(&args),
        Command::Rank { parent, command } => launcher::become_rank(parent, &command),
        Command::Guard => launcher::guard_groups(),
    };
    let code = outcome.unwrap_or_else(|failure| failure.report());
    ExitCode::from(streams::finish(code))
}
