//! The specification of a run, as sweeps change it: one setting after the other, by the name of its flag.
//!
//! This is the only file of the sweep that knows how a run is stated and started.

use std::ffi::OsString;
use std::path::Path;

use clap::Arg;

use crate::cli::{Given, NOT_SWEPT, SweptFlags};
use crate::config::{self, TrainConfig};
use crate::{Failure, Result};

/// What states a run.
pub type Spec = Given;

/// The alternative that leaves a flag out.
pub const LEFT_OUT: &str = "default";

/// Resolves a specification and checks all of it, before anything starts.
pub fn resolve(spec: &Spec) -> Result<TrainConfig> {
    let (config, _data) = config::resolve_inputs(&*spec.train_args()?, None)?;
    Ok(config)
}

/// Each flag with its values, in words.
pub fn settings(spec: &Spec) -> Vec<(String, String)> {
    let words = spec.words().into_iter().map(|word| word.to_string_lossy().into_owned());
    let mut settings: Vec<(String, String)> = Vec::new();
    for word in words {
        match (word.strip_prefix("--"), settings.last_mut()) {
            (None, Some((_, values))) => *values = format!("{values} {word}"),
            (flag, _) => {
                let (name, value) =
                    flag.unwrap_or(&word).split_once('=').unwrap_or((&word[2..], ""));
                settings.push((format!("--{name}"), value.to_owned()));
            }
        }
    }
    settings
}

/// The arguments of `paceline` that start this run and write its summary to a file.
pub fn arguments(spec: &Spec, summary: &Path) -> Vec<OsString> {
    let mut words = vec![OsString::from("train")];
    words.extend(spec.with("json", summary.display()).words());
    words.push("--quiet".into());
    words
}

/// The specification as somebody would type it.
pub fn shown(spec: &Spec) -> String {
    let words = spec.words().into_iter().map(|word| word.to_string_lossy().into_owned());
    ["paceline train".to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

/// Refuses what is no name of a flag that can be varied; says which one is nearest.
pub fn check_key(key: &str) -> Result<()> {
    if let Some((_, why)) = NOT_SWEPT.iter().find(|(name, _)| *name == key) {
        return Err(Failure::Usage(format!("--vary {key}: it cannot be varied: {why}")));
    }
    let command = SweptFlags::command();
    let keys: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
    if keys.contains(&key) {
        return Ok(());
    }
    let nearest = keys.into_iter().min_by_key(|known| distance(key, known));
    let hint = nearest.map_or(String::new(), |name| format!("; the nearest one is {name}"));
    Err(Failure::Usage(format!("--vary {key}: paceline train has no flag --{key}{hint}")))
}

/// The specification with a flag set to one alternative: values of a list are separated by spaces, a switch
/// is `true` or `false`.
pub fn with(spec: &Spec, key: &str, alternative: &str) -> Result<Spec> {
    let spec = spec.without(&[key]);
    if alternative == LEFT_OUT {
        return Ok(spec);
    }
    let refused =
        |e: &dyn std::fmt::Display| Failure::Usage(format!("--vary {key}={alternative}: {e}"));
    let train = SweptFlags::command();
    let flag = train.get_arguments().find(|flag| flag.get_long() == Some(key));
    let is_switch = flag.is_some_and(|flag| !flag.get_action().takes_values());
    let is_list = flag.and_then(|flag| flag.get_num_args()).is_some_and(|num| num.max_values() > 1);
    let mut words = spec.words();
    match (is_switch, alternative) {
        (true, "true") => words.push(format!("--{key}").into()),
        (true, "false") => {}
        (true, _) => return Err(refused(&"a switch is true or false")),
        (false, _) if is_list => {
            words.push(format!("--{key}").into());
            words.extend(alternative.split_whitespace().map(OsString::from));
        }
        (false, _) => words.push(format!("--{key}={alternative}").into()),
    }
    let words = [OsString::from("train")].into_iter().chain(words);
    let matches = train.clone().try_get_matches_from(words);
    let matches = matches.map_err(|error| refused(&unparsed(&error)))?;
    Ok(Given::of(&train, &matches))
}

/// What the parser says, without the lines that name another command.
fn unparsed(error: &clap::Error) -> Failure {
    let text = error.render().to_string();
    Failure::Usage(text.trim_start_matches("error: ").trim_end().to_owned())
}

/// How many letters have to be changed, added or removed to turn one word into the other (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in other.iter().enumerate() {
            let substituted = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}
