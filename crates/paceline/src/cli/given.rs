//! Flags of `paceline train` as they were typed, for commands that start training runs of their own
//! and pass them on.
//!
//! A command that flattens [`TrainFlags`] has all flags of `paceline train`, with their help and their
//! checks, but for those that it sets itself.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, FromArgMatches, Parser};

use super::{Cli, Command, TrainArgs};
use crate::{Failure, Result};

/// Flags that commands with [`TrainFlags`] have for themselves, or that make no sense in a run that
/// only measures.
const NOT_PASSED_ON: [&str; 14] = [
    "nproc",
    // Measurements count --steps-per-epoch and --epochs.
    "steps",
    "json",
    "quiet",
    "save",
    "save_every",
    "tensorboard",
    "resume",
    "evaluate",
    "eval_every",
    "ddp_choice",
    "like_for_like",
    "as_published",
    "price_per_hour",
];

/// A flag without its dashes, and the values that followed it.
type Flag = (String, Vec<OsString>);

/// Flags and their values, in the order in which the help lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given {
    flags: Vec<Flag>,
}

impl Given {
    /// The flags of `command` that were typed.
    pub fn of(command: &clap::Command, matches: &ArgMatches) -> Self {
        let typed = command.get_arguments().filter_map(|arg| {
            let id = arg.get_id().as_str();
            let is_typed = matches.value_source(id) == Some(ValueSource::CommandLine);
            let name = arg.get_long().filter(|_| is_typed)?;
            let values = match arg.get_action().takes_values() {
                true => matches.get_raw(id).into_iter().flatten().map(OsString::from).collect(),
                false => Vec::new(),
            };
            Some((name.to_owned(), values))
        });
        Self { flags: typed.collect() }
    }

    /// The flags of `paceline train` on the command line of this process.
    pub fn of_train_command() -> Self {
        let mut command = <super::Cli as clap::CommandFactory>::command();
        command.build();
        let matches = command.clone().get_matches();
        let train = command.find_subcommand("train").zip(matches.subcommand_matches("train"));
        train.map_or_else(Self::default, |(train, matches)| Self::of(train, matches))
    }

    /// Whether a flag was typed.
    pub fn has(&self, name: &str) -> bool {
        self.flags.iter().any(|(flag, _)| flag == name)
    }

    /// The value of a flag that takes a number, if it was typed.
    pub fn number(&self, name: &str) -> Option<usize> {
        let (_, values) = self.flags.iter().find(|(flag, _)| flag == name)?;
        values.first()?.to_str()?.parse().ok()
    }

    /// All but these.
    pub fn without(&self, names: &[&str]) -> Self {
        let kept = self.flags.iter().filter(|(flag, _)| !names.contains(&flag.as_str()));
        Self { flags: kept.cloned().collect() }
    }

    /// With one more, in the place of what was typed.
    pub fn with(&self, name: &str, value: impl ToString) -> Self {
        let mut flags = self.without(&[name]).flags;
        flags.push((name.to_owned(), vec![value.to_string().into()]));
        Self { flags }
    }

    /// With one more, unless it was typed.
    pub fn with_default(&self, name: &str, value: impl ToString) -> Self {
        if self.has(name) { self.clone() } else { self.with(name, value) }
    }

    /// The same flags as `paceline train` understands them.
    pub fn train_args(&self) -> Result<Box<TrainArgs>> {
        let words = ["paceline", "train"].map(OsString::from).into_iter().chain(self.words());
        let parsed = Cli::try_parse_from(words).map_err(|e| {
            let text = e.render().to_string();
            Failure::Usage(text.trim_start_matches("error: ").trim_end().to_owned())
        })?;
        match parsed.command {
            Command::Train(args) => Ok(args),
            _ => Err(Failure::Usage("the flags are not those of paceline train".into())),
        }
    }

    /// The words of a command line.
    pub fn words(&self) -> Vec<OsString> {
        let words = self.flags.iter().flat_map(|(name, values)| {
            let flag = OsString::from(format!("--{name}"));
            match values.as_slice() {
                // In one word, a value may begin with a dash.
                [value] => {
                    let mut word = flag;
                    word.push("=");
                    word.push(value);
                    vec![word]
                }
                values => [flag].into_iter().chain(values.iter().cloned()).collect(),
            }
        });
        words.collect()
    }
}

/// The flags of `paceline train`, but for those that the command has for itself.
#[derive(Clone, Debug)]
pub struct TrainFlags(pub Given);

fn passed_on() -> clap::Command {
    let train = TrainArgs::augment_args(clap::Command::new("train"));
    let args = train.get_arguments().filter(|arg| !NOT_PASSED_ON.contains(&arg.get_id().as_str()));
    clap::Command::new("train").args(args.map(|arg| {
        let arg = arg.clone();
        match arg.get_id().as_str() {
            "epochs" => arg.help("Passes over the data [default: enough for the steps]"),
            "steps_per_epoch" => {
                arg.help("Batches of a run [default: for 30 steps, with those of warm-up]")
            }
            _ => arg,
        }
    }))
}

impl Args for TrainFlags {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.args(passed_on().get_arguments())
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for TrainFlags {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        Ok(Self(Given::of(&passed_on(), matches)))
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &ArgMatches,
    ) -> std::result::Result<(), clap::Error> {
        self.0 = Given::of(&passed_on(), matches);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(flags: &str) -> Given {
        let mut command = TrainFlags::augment_args(clap::Command::new("x"));
        command.build();
        let words = std::iter::once("x").chain(flags.split_whitespace());
        let matches = command.try_get_matches_from(words).unwrap();
        TrainFlags::from_arg_matches(&matches).unwrap().0
    }

    #[test]
    fn flags_are_passed_on_as_they_were_typed() {
        let given = given("--lr=-1 --channels 4 8 --pin-cores --model cnn --timeout=5");
        let words = given.words();
        assert_eq!(
            words,
            ["--model=cnn", "--channels", "4", "8", "--timeout=5", "--pin-cores", "--lr=-1"]
        );
        assert!(given.has("pin-cores") && !given.has("hidden"));
        assert_eq!((given.number("timeout"), given.number("hidden")), (Some(5), None));
        let changed = given.without(&["channels", "pin-cores"]).with("lr", 0.5);
        let changed = changed.with_default("timeout", 9).with_default("seed", 7);
        assert_eq!(changed.words(), ["--model=cnn", "--timeout=5", "--lr=0.5", "--seed=7"]);
    }

    #[test]
    fn defaults_are_not_passed_on() {
        assert_eq!(given(""), Given::default());
    }
}
