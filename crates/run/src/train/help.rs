//! The output of `paceline train --help`: the flags that one needs first, by purpose, with a line each. `--help-all` prints
//! all flags with their whole help.
//!
//! Everything about a flag comes from its definition, so this file has only the choice of flags and their order.

use std::fmt::Write;

use clap::{Arg, Args, Command};
use paceline_choices::data::DATA_SETS;
use paceline_choices::models::MODELS;
use paceline_choices::registry::Registry;
use paceline_choices::strategies::STRATEGIES;

use super::args::TrainCommand;

/// A purpose, and its flags.
type Group = (&'static str, &'static [&'static str]);

const GROUPS: &[Group] = &[
    ("What to train", &["model", "pretrained", "data", "data-dir", "download", "recipe", "config"]),
    (
        "How long, in which steps",
        &[
            "epochs",
            "steps",
            "batch-size",
            "accumulate",
            "optimizer",
            "lr",
            "lr-schedule",
            "clip-grad-norm",
            "precision",
            "seed",
            "evaluate",
        ],
    ),
    (
        "Ranks",
        &[
            "nproc",
            "threads",
            "strategy",
            "ddp-choice",
            "shard-choice",
            "mesh",
            "device",
            "transport",
            "link",
        ],
    ),
    (
        "Several hosts, with the same command on each",
        &["nnodes", "node-rank", "master-addr", "master-port"],
    ),
    ("Save and go on", &["save", "save-every", "resume", "max-restarts"]),
    ("See what happens", &["name", "profile", "tensorboard", "quiet"]),
];

/// The most names of values that a line has. All strategies would fill three lines.
const MAX_NAMES: usize = 10;

/// Adds the flags of `paceline train`, with the help of a few instead of that of all.
pub fn short(command: Command) -> Command {
    let command = TrainCommand::augment_args(command);
    let text = text(&command);
    command.override_help(text)
}

fn text(command: &Command) -> String {
    let usage = "Usage: paceline train [FLAGS]";
    let mut text =
        format!("{}\nTrain a model on several ranks\n\n{usage}\n", super::args::EXAMPLES);
    let mut group = |title: &str, lines: Vec<(String, String)>| {
        let _ = writeln!(text, "\n{title}:");
        for (flag, words) in lines {
            let _ = writeln!(text, "  {flag:<24} {words}");
        }
    };
    for (title, flags) in GROUPS {
        let flags = flags.iter().filter_map(|key| {
            let flag = command.get_arguments().find(|flag| flag.get_long() == Some(key))?;
            Some((name(flag), described(flag)))
        });
        group(title, flags.collect());
    }
    let own = [added(&MODELS), added(&DATA_SETS), added(&STRATEGIES)].concat();
    if !own.is_empty() {
        group("What this program adds", own);
    }
    text + "\nAll flags, and more about each: paceline train --help-all\n"
}

/// A flag as one types it.
fn name(flag: &Arg) -> String {
    let short = flag.get_short().map_or(String::new(), |short| format!("-{short}, "));
    let long = flag.get_long().unwrap_or_default();
    let values = flag.get_value_names().unwrap_or_default().join(" ");
    // A switch needs no value.
    let is_switch = flag.get_num_args().is_some_and(|num| num.min_values() == 0);
    let value = if is_switch || values.is_empty() { String::new() } else { format!(" {values}") };
    format!("{short}--{long}{value}")
}

/// The help of a flag up to its first full stop, semicolon or bracket, with the values that the flag takes if these are few,
/// and its default.
fn described(flag: &Arg) -> String {
    let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
    let end = [". ", "; ", " [", " ("].iter().filter_map(|end| help.find(end)).min();
    let words = &help[..end.unwrap_or(help.len())];
    let values = flag.get_possible_values();
    let names: Vec<&str> =
        values.iter().filter(|value| !value.is_hide_set()).map(|value| value.get_name()).collect();
    let is_shown = (1..=MAX_NAMES).contains(&names.len()) && !flag.is_hide_possible_values_set();
    let names = if is_shown { format!(": {}", names.join(", ")) } else { String::new() };
    let defaults = flag.get_default_values().iter().map(|value| value.to_string_lossy());
    let defaults: Vec<_> = defaults.collect();
    let is_said = !defaults.is_empty() && !flag.is_hide_default_value_set();
    let default = if is_said { format!(" [{}]", defaults.join(" ")) } else { String::new() };
    format!("{words}{names}{default}")
}

/// The choices that the program adds, each with its flags.
fn added<K>(registry: &Registry<K>) -> Vec<(String, String)> {
    let lines = registry.added().into_iter().flat_map(|choice| {
        let choice_line = (format!("--{} {}", registry.key, choice.name), choice.about.to_owned());
        let flags = (choice.flags)().into_iter().map(|flag| (name(&flag), described(&flag)));
        std::iter::once(choice_line).chain(flags)
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_flags_are_few_and_have_a_line_each() {
        let command = TrainCommand::augment_args(Command::new("train"));
        let keys: Vec<&str> = GROUPS.iter().flat_map(|(_, flags)| *flags).copied().collect();
        assert!(keys.len() <= 40, "{} flags", keys.len());
        for key in &keys {
            let has = command.get_arguments().any(|flag| flag.get_long() == Some(key));
            assert!(has, "train has no flag --{key}");
        }
        let text = text(&command);
        let (_, groups) = text.split_once("Usage").unwrap();
        let lines: Vec<&str> = groups.lines().filter(|line| line.starts_with("  ")).collect();
        assert_eq!(lines.len(), keys.len());
        let long = lines.iter().find(|line| line.len() > 110);
        assert!(long.is_none(), "{long:?}");
    }
}
