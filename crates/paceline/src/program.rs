//! The whole program: parse, resolve, run, exit. Its choices are those of paceline and those that its user adds.
//!
//! The launcher starts ranks with the executable of this process, so a program with choices of its own is started again as
//! each of its ranks.

use std::any::TypeId;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{Arg, Command as Parser};
use paceline_choices::data::{DATA_SETS, DataSettings};
use paceline_choices::models::{MODELS, ModelSettings};
use paceline_choices::own::{self, Own, OwnStrategy};
use paceline_choices::registry::{Choice, Registry};
use paceline_choices::strategies::STRATEGIES;
use paceline_failure::{Failure, Result};
use paceline_host::streams;
use paceline_launch::{environment, launcher};
use paceline_run::train::{self, FinishedRun};
use paceline_run::{evaluate, instructions};
use paceline_study::{lab, plan, predict, sweep};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::SIGXFSZ;

use crate::cli::{Cli, Command};
use crate::commands::bench::BenchCommand;
use crate::commands::{
    self, analyze, check, classify, compare, completions, fetch, generate, hang, new, record,
    schedule, show, tokenizer, trace,
};
use crate::{logging, mistakes};

/// The command line of paceline, with choices of its user's own.
///
/// Choices belong to the process: each [`Program`] has those that an earlier one has added.
#[derive(Debug, Default)]
pub struct Program {
    /// Why choices could not be added.
    problems: Vec<String>,
}

impl Program {
    /// The program without further choices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model, which `--model` can name.
    pub fn model<M: Own + ModelSettings>(self) -> Self {
        self.adding(&MODELS, own::model::<M>(), TypeId::of::<M>())
    }

    /// Adds a data set, which `--data` can name.
    pub fn data_set<D: Own + DataSettings>(self) -> Self {
        self.adding(&DATA_SETS, own::data::<D>(), TypeId::of::<D>())
    }

    /// Adds a strategy, which `--strategy` can name.
    pub fn strategy<S: OwnStrategy>(self) -> Self {
        self.adding(&STRATEGIES, own::strategy::<S>(), TypeId::of::<S>())
    }

    /// Adds a choice, if its name and the names of its flags are free. Otherwise keeps all problems.
    fn adding<K>(mut self, registry: &Registry<K>, choice: Choice<K>, of_type: TypeId) -> Self {
        if registry.has(of_type) {
            return self;
        }
        let cli = Cli::whole();
        let words = format!("--{} {}, which this program adds", registry.key, choice.name);
        let problem = |flag: Arg| {
            let Some(long) = flag.get_long() else {
                let flag = flag.get_id();
                return Some(format!("{words}: its flag {flag} has no long name; give it one"));
            };
            let command = clash(&cli, registry.key, &flag)?;
            Some(format!(
                "{words}: its flag --{long} is a flag of {command} already; give it another name, or all flags a prefix \
                 (Own::PREFIX)"
            ))
        };
        let num_before = self.problems.len();
        self.problems.extend((choice.flags)().into_iter().filter_map(problem));
        if self.problems.len() == num_before {
            let added = registry.add(choice, of_type);
            self.problems.extend(added.err().map(|failure| failure.to_string()));
        }
        self
    }

    fn check(&self) -> Result<()> {
        if self.problems.is_empty() {
            Ok(())
        } else {
            Err(Failure::Usage(self.problems.join("\n")))
        }
    }

    /// Reads the command line of this process, and carries it out.
    pub fn main(self) -> ExitCode {
        survive_file_limits();
        let words: Vec<OsString> = std::env::args_os().collect();
        logging::start(&words);
        let outcome = self.check().and_then(|()| run(mistakes::read(&words)?.command));
        let code = outcome.unwrap_or_else(|failure| failure.report());
        ExitCode::from(streams::finish(code))
    }

    /// Trains as `paceline train` with these flags, but within this process: ranks are threads. Prints the same as
    /// `paceline train`, so nothing with `--quiet`. Leaves signals to the caller.
    ///
    /// # Errors
    ///
    /// [`Failure::Usage`] if a choice could not be added, or if the flags are wrong; any other failure if the run fails.
    pub fn train<W: Into<OsString> + Clone>(
        &self,
        flags: impl IntoIterator<Item = W>,
    ) -> Result<FinishedRun> {
        self.check()?;
        train::train_here(flags)
    }
}

/// Raises the limit on the files that this process may have open (usually 1024) as far as it may, up to [`MANY_FILES`].
/// Programs that this one starts inherit it.
fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    // `None` is no limit.
    let allowed = limit.maximum.map_or(MANY_FILES, |maximum| maximum.min(MANY_FILES));
    if limit.current.is_some_and(|current| current < allowed) {
        // If that fails, a run with many ranks says which file it could not open.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(allowed), ..limit });
    }
}

/// More files than a rank has open: two connections to each of up to 1023 others, and the files of its run.
const MANY_FILES: u64 = 1 << 14;

/// From now on a write beyond the limit on the size of files (`ulimit -f`, a quota) fails as on a full disk; by default the
/// signal that comes with it ends the process. Programs that this one starts keep the default.
fn survive_file_limits() {
    // With a handler, whatever it does, the write returns an error. If there can be no handler, the default stays.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// Carries out a command line. Returns the exit code.
fn run(command: Command) -> Result<u8> {
    instructions::check_variable()?;
    // A recorded program has the limits that it has without us.
    if !matches!(command, Command::Record(_)) {
        allow_many_files();
    }
    let place = || environment::read(|name| std::env::var_os(name));
    match command {
        Command::Train(args) => commands::train::train(&args.0, place()?),
        Command::Evaluate(args) => evaluate::evaluate(&args.0, place()?),
        Command::Generate(args) => generate::generate(&args, carried_tokenizer),
        Command::Classify(args) => classify::classify(&args, carried_tokenizer),
        Command::Tokenizer(command) => tokenizer::tokenizer(&command),
        Command::Fetch(command) => fetch::fetch(&command),
        Command::Checkpoint(command) => {
            paceline_checkpoint::command::checkpoint(&command, carried_tokenizer)
        }
        Command::Bench(BenchCommand::Operation(args)) => {
            paceline_commbench::sweep::bench(&args, place()?)
        }
        Command::Bench(BenchCommand::Study(study, typed)) => study.make(&typed, place()?),
        Command::Check(args) => check::check(&args, place()?),
        Command::Lab(args) => lab::lab(&args.0, place()?),
        Command::Sweep(args) => sweep::sweep(&args.0, place()?),
        Command::Predict(args) => predict::predict(&args.0, place()?),
        Command::Plan(args) => plan::plan(&args.0, place()?),
        Command::Record(args) => record::record(&args),
        Command::Analyze(args) => analyze::analyze(&args),
        Command::Hang(args) => hang::hang(&args),
        Command::Compare(args) => compare::compare(&args),
        Command::Schedule(args) => schedule::schedule(&args),
        Command::Show(args) => show::show(&args),
        Command::Completions(args) => completions::completions(&args),
        Command::New(args) => new::new(&args),
        Command::Trace(command) => trace::trace(&command),
        Command::Launch(args) => launcher::launch_command(&args),
        Command::Rank { parent, command } => launcher::become_rank(parent, &command),
        Command::Steps(args) => record::steps::time_steps(&args),
        Command::Guard => launcher::guard_groups(),
    }
}

/// The tokenizer of a data set that this program carries.
fn carried_tokenizer(data: &str) -> Option<&'static str> {
    DATA_SETS.get(data).ok()?.of.tokenizer
}

/// The command, among those that choose by `--key` and so would have `flag` too, in which another flag has one of its
/// names. A flag of the same name that takes any text, such as the folder of `paceline generate
/// --model`, chooses nothing.
fn clash(command: &Parser, key: &str, flag: &Arg) -> Option<String> {
    let name = command.get_name();
    let own = names(flag);
    let is_taken = |other: &Arg| names(other).iter().any(|name| own.contains(name));
    // These are not flags of a command until it is used.
    let is_of_all = own.iter().any(|name| ["--help", "-h", "--version", "-V"].contains(&&**name));
    let is_choice =
        |other: &Arg| other.get_long() == Some(key) && !other.get_possible_values().is_empty();
    let has_key = command.get_arguments().any(is_choice);
    if has_key && (is_of_all || command.get_arguments().any(is_taken)) {
        return Some(name.to_owned());
    }
    let of_part = command.get_subcommands().find_map(|part| clash(part, key, flag));
    of_part.map(|part| format!("{name} {part}"))
}

/// The names by which a flag is known: that of the field, those on the command line.
fn names(flag: &Arg) -> Vec<String> {
    let long = flag.get_long().into_iter().chain(flag.get_all_aliases().unwrap_or_default());
    let short =
        flag.get_short().into_iter().chain(flag.get_all_short_aliases().unwrap_or_default());
    let typed = long.map(|name| format!("--{name}")).chain(short.map(|name| format!("-{name}")));
    typed.chain([flag.get_id().to_string()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_commands_that_choose_by_the_key_clash() {
        let of_model =
            |flag: &'static str| clash(&Cli::whole(), MODELS.key, &Arg::new(flag).long(flag));
        assert_eq!(of_model("seed").as_deref(), Some("paceline train"));
        assert_eq!(of_model("measure").as_deref(), Some("paceline predict"));
        // `paceline generate --model` names a folder.
        assert_eq!(of_model("prompt"), None);
    }
}
