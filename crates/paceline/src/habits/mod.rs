//! Words that users know from other programs: mpirun's `-np`, nccl-tests' `-g`, torchrun's and transformers' flags.
//!
//! A command line that has one of them is not guessed at. It is answered with the word to write here, once `clap` has
//! refused it. A word is answered only in commands that have the flag in question. The words are in `table.rs`, and values of
//! flags in `values.rs`.

mod table;
mod values;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};
use paceline_collectives::OpKind;
use paceline_commbench::operation::OPS;
use paceline_files::printable;

use self::table::{EXPLAINED, HABITS, Habit};
use self::values::letters;

/// What to write instead of a word of another program, if one is what `clap` stumbled over.
pub(super) fn answer(
    typed: &[String],
    command: &Command,
    path: &str,
    error: &Error,
) -> Option<String> {
    operation(command, path, error)
        .or_else(|| program(typed, command, path, error))
        .or_else(|| value_of_others(typed, error))
        .or_else(|| flag(typed, command, path, error))
}

fn text(error: &Error, kind: ContextKind) -> &str {
    match error.get(kind) {
        Some(ContextValue::String(text)) => text,
        _ => "",
    }
}

/// `launch -n 2 ./program`, as mpirun and torchrun have it.
fn program(typed: &[String], command: &Command, path: &str, error: &Error) -> Option<String> {
    let word = text(error, ContextKind::InvalidArg);
    let is_unknown = error.kind() == ErrorKind::UnknownArgument;
    if command.get_name() != "launch" || !is_unknown || word.starts_with('-') {
        return None;
    }
    let at = typed.iter().position(|typed| typed == word)?;
    let (flags, program) = (&typed[1..at], &typed[at..]);
    let words: Vec<&str> = flags
        .iter()
        .map(String::as_str)
        .chain(["--"])
        .chain(program.iter().map(String::as_str))
        .collect();
    Some(format!("{word}: two dashes come before the program; write {path} {}", words.join(" ")))
}

/// A value as another program spells it.
fn value_of_others(typed: &[String], error: &Error) -> Option<String> {
    let accepted = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(accepted)) => accepted.as_slice(),
        _ => &[],
    };
    let flag = text(error, ContextKind::InvalidArg).split([' ', '[']).next()?;
    let value = text(error, ContextKind::InvalidValue);
    let text = (!value.is_empty()).then(|| values::answer(flag, value, accepted)).flatten()?;
    // The alias is what the user knows.
    let is_backend =
        flag == "--transport" && typed.iter().any(|word| word.starts_with("--backend"));
    let flag = if is_backend { "--backend" } else { flag };
    Some(format!("{flag} {}: {text}", printable(value)))
}

fn flag(typed: &[String], command: &Command, path: &str, error: &Error) -> Option<String> {
    let text = |kind| text(error, kind);
    let is_np = |word: &&String| word.starts_with("-np");
    // mpirun's -np is read as -n with the value p.
    let np = typed.iter().find(is_np).map(String::as_str);
    let word = match error.kind() {
        ErrorKind::UnknownArgument => match text(ContextKind::InvalidArg) {
            "-n" => np.map_or("-n", |_| "-np"),
            unknown => unknown,
        },
        ErrorKind::ValueValidation if text(ContextKind::InvalidValue).starts_with('p') => {
            np.map(|_| "-np")?
        }
        _ => return None,
    };
    let has = |flag: &str| command.get_arguments().any(|own| own.get_long() == Some(flag));
    if word.starts_with("--standalone") && has("master-addr") {
        return Some(format!(
            "{word}: {path} needs no such flag: the ranks of one host meet at a port that it chooses; leave it out"
        ));
    }
    let explained = EXPLAINED.iter().find(|(words, flag, _)| words.contains(&word) && has(flag));
    if let Some((.., text)) = explained {
        return Some(format!("{word}: {text}"));
    }
    let is_known = |habit: &&Habit| habit.theirs.contains(&word) && has(habit.flag);
    let habit = HABITS.iter().find(is_known)?;
    let own = command.get_arguments().find(|own| own.get_long() == Some(habit.flag))?;
    let is_switch = own.get_num_args().is_some_and(|num| num.min_values() == 0);
    let value = value(typed, word);
    let shown = value.as_ref().map_or(word.to_owned(), |value| format!("{word} {value}"));
    if is_switch && habit.value.is_none() {
        let Habit { what, flag, .. } = habit;
        return Some(format!("{shown}: {path} calls {what} --{flag}; pass --{flag}"));
    }
    let names = own.get_possible_values();
    let names: Vec<String> = names.iter().map(|name| name.get_name().to_owned()).collect();
    let own_flag = format!("--{}", habit.flag);
    if let Some(text) = value.as_ref().and_then(|value| values::answer(&own_flag, value, &names)) {
        return Some(format!("{shown}: {path} calls {} {own_flag}, and {text}", habit.what));
    }
    let of_flag = || own.get_value_names().map_or("N".to_owned(), |names| names.concat());
    let pass = habit.value.map(str::to_owned).or(value).unwrap_or_else(of_flag);
    if word == "-n" && has("iters") {
        // Here two habits meet.
        return Some(format!(
            "{shown}: nccl-tests' -n, the number of iterations, is --iters here, and mpirun's -n is --nproc; pass \
             --iters {pass} or --nproc {pass}"
        ));
    }
    let Habit { what, flag, .. } = habit;
    let more = if *flag == "master-addr" { " --master-port PORT" } else { "" };
    let pass = if *flag == "master-addr" { "HOST".to_owned() } else { pass };
    Some(format!("{shown}: {path} calls {what} --{flag}; pass --{flag} {pass}{more}"))
}

/// The value that was typed for a flag: in its word, after an equals sign or, for one letter, directly; or the next word.
fn value(typed: &[String], flag: &str) -> Option<String> {
    let (at, rest) = typed
        .iter()
        .enumerate()
        .filter_map(|(at, word)| word.strip_prefix(flag).map(|rest| (at, rest)))
        // A long flag may begin like another one.
        .find(|(_, rest)| rest.is_empty() || rest.starts_with('=') || !flag.starts_with("--"))?;
    let within = rest.strip_prefix('=').unwrap_or(rest);
    let next = typed.get(at + 1).filter(|next| !next.starts_with('-'));
    if within.is_empty() { next.cloned() } else { Some(within.to_owned()) }
}

/// `allreduce`, and nccl-tests' `all_reduce_perf`: an operation by another spelling.
fn operation(command: &Command, path: &str, error: &Error) -> Option<String> {
    if command.get_name() != "bench" {
        return None;
    }
    let typed = [ContextKind::InvalidValue, ContextKind::InvalidSubcommand];
    let typed = typed.into_iter().find_map(|kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    })?;
    let spoken = letters(typed);
    let spoken = spoken.strip_suffix("perf").unwrap_or(&spoken);
    let is_it = |kind: &OpKind| letters(kind.name()) == spoken;
    let name = OPS.iter().map(|(kind, ..)| *kind).find(is_it)?.name();
    Some(format!("{path} {typed}: the operation is spelled {name} here; write {path} {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_stands_in_the_word_or_after_it() {
        let of = |words: &str, flag| {
            let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
            value(&words, flag)
        };
        for words in ["-g 2", "-g=2", "-g2", "all_reduce -g 2 -c 0"] {
            assert_eq!(of(words, "-g").as_deref(), Some("2"), "{words}");
        }
        assert_eq!(of("--load-ahead 3 --load 2", "--load").as_deref(), Some("2"));
        assert_eq!(of("-g -c 0", "-g"), None);
        assert_eq!(of("-c 0", "-g"), None);
    }
}
