//! The command line of paceline: parse, resolve, run, exit.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use paceline::cli::{Cli, Command};
use paceline::{environment, experiment, launcher};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Train(args) => environment::read(|name| std::env::var(name).ok())
            .and_then(|placement| experiment::train(&args, placement)),
        Command::Launch(args) => launcher::launch_command(&args),
        Command::Rank { parent, command } => launcher::become_rank(parent, &command),
        Command::Guard => launcher::guard_groups(),
    };
    outcome.map_or_else(|failure| failure.report(), ExitCode::from)
}
