//! What `paceline train --help` prints: the flags that one needs first, by purpose, with a line each. `--help-all` prints all
//! flags with all that there is to say.
//!
//! Names of flags and of values come from the definitions of the flags, so this file has only the choice of flags and a few
//! words about each.

use std::fmt::Write;

use clap::{Arg, Args, Command};
use paceline_choices::data::DATA_SETS;
use paceline_choices::models::MODELS;
use paceline_choices::registry::{Choice, Registry};
use paceline_choices::strategies::STRATEGIES;

use super::args::TrainCommand;

/// A purpose, and its flags with a few words each.
type Group = (&'static str, &'static [(&'static str, &'static str)]);

const GROUPS: &[Group] = &[
    (
        "What to train",
        &[
            ("model", "model"),
            ("pretrained", "llama: begin with weights as Hugging Face stores them"),
            ("data", "data set"),
            ("data-dir", "folder of the data set's files"),
            ("download", "download MNIST or CIFAR-10 into --data-dir first"),
            ("recipe", "settings that belong together"),
            ("config", "settings in a file, such as config.json of a run; flags override them"),
        ],
    ),
    (
        "How long, in which steps",
        &[
            ("epochs", "passes over the data"),
            ("steps", "optimizer steps after which the run ends, instead of --epochs"),
            ("batch-size", "samples of a batch on each rank"),
            ("accumulate", "batches of an optimizer step"),
            ("optimizer", "optimizer"),
            ("lr", "learning rate"),
            ("lr-schedule", "how the learning rate changes"),
            ("clip-grad-norm", "largest norm of all gradients together"),
            ("precision", "element type of products and activations"),
            ("seed", "decides initial weights, the order of samples and synthetic data"),
            ("evaluate", "evaluate on the test set after training"),
        ],
    ),
    (
        "Ranks",
        &[
            ("nproc", "ranks on this host"),
            ("threads", "compute threads of each rank"),
            ("strategy", "how ranks keep their models equal: ddp, sharded3, zero1, local_sgd, ..."),
            ("ddp-choice", "all: run every strategy of this kind, and compare them in a table"),
            ("shard-choice", "all: the same for strategies that divide the model"),
            ("mesh", "axes of the grid of ranks: dp=2,pp=2 has two pipelines of two stages"),
            ("device", "where to compute: cpu, cuda, or sim, an emulated accelerator"),
            ("transport", "how ranks reach each other"),
            ("link", "emulate a slower network, such as 10gbe or 1gbit,50us"),
        ],
    ),
    (
        "Several hosts, with the same command on each",
        &[
            ("nnodes", "number of hosts"),
            ("node-rank", "which of the hosts this is, from 0"),
            ("master-addr", "host 0, as the others reach it"),
            ("master-port", "a free port of host 0"),
        ],
    ),
    (
        "Save and go on",
        &[
            ("save", "write checkpoints into this folder"),
            ("save-every", "steps from one checkpoint to the next"),
            ("resume", "go on from the checkpoint in this folder; auto: in that of --save"),
            ("max-restarts", "start again after a failure, at most N times"),
        ],
    ),
    (
        "See what happens",
        &[
            ("name", "name of the run folder"),
            ("profile", "write traces of some steps, for paceline analyze"),
            ("tensorboard", "write scalars for TensorBoard"),
            ("quiet", "print nothing but errors"),
        ],
    ),
];

/// The most names of values that a line has. All strategies would fill three lines.
const MAX_NAMES: usize = 10;

/// Adds the flags of `paceline train`, with the help of a few in place of that of all.
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
        let flags = flags.iter().filter_map(|(key, words)| {
            let flag = command.get_arguments().find(|flag| flag.get_long() == Some(key))?;
            Some((name(flag), described(flag, words)))
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

/// A few words about a flag, with the values that it takes if these are few, and its default.
fn described(flag: &Arg, words: &str) -> String {
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
fn added<C: Choice + ?Sized>(registry: &Registry<C>) -> Vec<(String, String)> {
    let about = |flag: &Arg| flag.get_help().map(ToString::to_string).unwrap_or_default();
    let lines = registry.added().into_iter().flat_map(|choice| {
        let choice_line =
            (format!("--{} {}", registry.key, choice.name()), choice.about().to_owned());
        let flags = choice.flags().into_iter().map(move |flag| {
            let words = described(&flag, &about(&flag));
            (name(&flag), words)
        });
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
        let keys: Vec<&str> =
            GROUPS.iter().flat_map(|(_, flags)| *flags).map(|(key, _)| *key).collect();
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
