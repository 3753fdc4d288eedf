//! What is said about a command line that cannot be read: what is wrong, and what to write instead.
//!
//! Takes the words and the error of `clap`. The help is named only where it helps: after a flag, a command or a value that
//! nobody knows, and not after a value that has been explained. This file knows no defaults, and starts nothing.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, Error, FromArgMatches};
use paceline_failure::{Failure, Result};
use paceline_host::text::named;
use paceline_run::train::help;
use paceline_settings::spec::message;
use strsim::levenshtein;

use crate::cli::Cli;
use crate::habits;

/// The flag that prints all flags, of a command whose help has only some.
const ALL_FLAGS: &str = "--help-all";

/// Reads a command line, the name of the program included. Prints the help and ends the process if the words ask for it.
pub fn read(words: &[OsString]) -> Result<Cli> {
    let shows_all = words.iter().any(|word| word == ALL_FLAGS);
    let program = Cli::command();
    let program = if shows_all {
        program
    } else {
        program.mut_subcommand("train", |train| train.defer(help::short))
    };
    let parsed = program.try_get_matches_from(words);
    parsed.and_then(|typed| Cli::from_arg_matches(&typed)).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
        _ => Failure::Usage(answer(words, &error)),
    })
}

fn answer(words: &[OsString], error: &Error) -> String {
    let program = Cli::whole();
    let (command, path) = command(&program, words);
    let typed = words.iter().skip(1).take_while(|word| *word != "--");
    let typed: Vec<String> = typed.map(|word| named(word)).collect();
    if let Some(text) = habits::answer(&typed, command, &path, error) {
        return text;
    }
    let has = |long: &str| command.get_arguments().any(|own| own.get_long() == Some(long));
    let help = if has(&ALL_FLAGS[2..]) { ALL_FLAGS } else { "--help" };
    let help = format!("\n\nFor all flags: {path} {help}");
    let text = message(error);
    match error.kind() {
        ErrorKind::InvalidUtf8 => not_utf8(words).unwrap_or(text),
        ErrorKind::InvalidSubcommand => unknown_command(command, &path, error).unwrap_or(text),
        ErrorKind::UnknownArgument => misspelled(&typed, command, &path).unwrap_or_else(|| {
            match unknown_flag(&program, command, &path, error) {
                Some((text, is_explained)) => text + if is_explained { "" } else { &help },
                None => text + &help,
            }
        }),
        // The name of a command that another argument follows, such as that of a folder.
        ErrorKind::ArgumentConflict if command.has_subcommands() => {
            misspelled(&typed, command, &path).unwrap_or(text)
        }
        ErrorKind::MissingRequiredArgument | ErrorKind::MissingSubcommand => {
            format!("{text}{}{help}", usage(error))
        }
        _ => text,
    }
}

/// The command that the words name, as far as they name one, and how it is called.
fn command<'a>(program: &'a Command, words: &[OsString]) -> (&'a Command, String) {
    let mut found = (program, program.get_name().to_owned());
    for word in words.iter().skip(1) {
        let Some(part) = found.0.find_subcommand(word) else { break };
        found = (part, format!("{} {}", found.1, part.get_name()));
    }
    found
}

fn not_utf8(words: &[OsString]) -> Option<String> {
    let at = words.iter().position(|word| word.to_str().is_none())?;
    let flag =
        words[..at].last().and_then(|word| word.to_str()).filter(|word| word.starts_with('-'));
    let flag = flag.map_or(String::new(), |flag| format!("{flag} "));
    Some(format!("{flag}{}: this is not valid UTF-8; pass another name", named(&words[at])))
}

/// The commands that users can call, not those that the launcher does.
fn offered(command: &Command) -> Vec<&str> {
    command.get_subcommands().filter(|part| !part.is_hide_set()).map(Command::get_name).collect()
}

fn unknown_command(command: &Command, path: &str, error: &Error) -> Option<String> {
    let ContextValue::String(typed) = error.get(ContextKind::InvalidSubcommand)? else {
        return None;
    };
    let names = offered(command);
    let meant = match nearest(typed, &names) {
        Some(name) => format!("did you mean {path} {name}?"),
        None => format!("pass one of {}", names.join(", ")),
    };
    Some(format!("there is no command {path} {typed}; {meant}"))
}

/// The command that the word after `path` may be meant for.
fn misspelled(typed: &[String], command: &Command, path: &str) -> Option<String> {
    let word = typed.get(path.split(' ').count() - 1).filter(|word| !word.starts_with('-'))?;
    let name = nearest(word, &offered(command)).filter(|name| name != word)?;
    Some(format!("there is no command {path} {word}; did you mean {path} {name}?"))
}

/// What is said about a flag that the command does not have, and whether that explains it.
fn unknown_flag(
    program: &Command,
    command: &Command,
    path: &str,
    error: &Error,
) -> Option<(String, bool)> {
    let ContextValue::String(typed) = error.get(ContextKind::InvalidArg)? else { return None };
    let typed = typed.as_str();
    let flag = typed.strip_prefix("--")?;
    let has = |command: &Command| command.get_arguments().any(|own| own.get_long() == Some(flag));
    if command.get_name() == program.get_name() {
        let of_command = program.get_subcommands().find(|part| !part.is_hide_set() && has(part));
        return of_command.map(|part| {
            let name = part.get_name();
            (format!("{typed}: the command comes first, as in {path} {name} {typed}"), true)
        });
    }
    let offered = command.get_arguments().filter(|own| !own.is_hide_set());
    let names: Vec<&str> = offered.filter_map(|own| own.get_long()).collect();
    let problem = format!("{path} has no flag {typed}");
    Some(match nearest(&flag.replace('_', "-"), &names) {
        Some(name) => (format!("{problem}; did you mean --{name}?"), true),
        None => (problem, false),
    })
}

/// The one of `names` that a user may have meant by `typed`, if one is similar enough.
fn nearest<'a>(typed: &str, names: &[&'a str]) -> Option<&'a str> {
    let nearest = names.iter().min_by_key(|name| levenshtein(typed, name))?;
    (levenshtein(typed, nearest) <= nearest.len() / 3 + 1 && nearest.len() > 2).then_some(nearest)
}

/// The usage line of an error, after an empty line.
fn usage(error: &Error) -> String {
    let text = error.render().to_string();
    let usage = text.split_once("\n\nUsage:").map(|(_, rest)| rest);
    let usage = usage.and_then(|rest| rest.split("\n\n").next());
    usage.map_or(String::new(), |usage| format!("\n\nUsage:{}", usage.trim_end()))
}
