//! Words that users know from other programs: mpirun's `-np`, nccl-tests' `-g`, torchrun's and transformers' flags.
//!
//! A command line that has one of them is not guessed at. It is answered with the word to write here, once `clap` has
//! refused it. A word is answered only in commands that have the flag in question.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};
use paceline_collectives::OpKind;
use paceline_commbench::operation::OPS;

/// The words of others for one thing.
struct Habit {
    theirs: &'static [&'static str],
    /// What it is.
    what: &'static str,
    /// The flag here, without dashes.
    flag: &'static str,
    /// The value that has to be passed, if not the one that was typed.
    value: Option<&'static str>,
}

const fn habit(theirs: &'static [&'static str], what: &'static str, flag: &'static str) -> Habit {
    Habit { theirs, what, flag, value: None }
}

const RANKS: &[&str] = &[
    "-np",
    "-n",
    "--np",
    "-g",
    "--ngpus",
    "--gpus",
    "--num-gpus",
    "--num_gpus",
    "--num-processes",
    "--num_processes",
    "--nproc-per-node",
    "--nproc_per_node",
    "--world-size",
    "--world_size",
];
const RENDEZVOUS: &[&str] =
    &["--rdzv-endpoint", "--rdzv_endpoint", "--rdzv-backend", "--rdzv_backend", "--rdzv-id"];

const HABITS: &[Habit] = &[
    habit(RANKS, "the number of ranks", "nproc"),
    habit(RENDEZVOUS, "the place where hosts meet", "master-addr"),
    habit(&["--learning-rate", "--learning_rate"], "the learning rate", "lr"),
    habit(
        &["--num-epochs", "--num_epochs", "--num_train_epochs"],
        "the number of epochs",
        "epochs",
    ),
    habit(&["--max-steps", "--max_steps", "--num-steps"], "the number of steps", "steps"),
    habit(&["--bs", "--per_device_train_batch_size"], "the batch of a rank", "batch-size"),
    habit(
        &["--gradient-accumulation-steps", "--gradient_accumulation_steps", "--grad-accum"],
        "the number of batches of an optimizer step",
        "accumulate",
    ),
    habit(
        &["--max-grad-norm", "--max_grad_norm"],
        "the largest norm of all gradients",
        "clip-grad-norm",
    ),
    habit(
        &["--checkpoint-dir", "--checkpoint_dir", "--save-dir", "--save_dir"],
        "the folder of checkpoints",
        "save",
    ),
    habit(
        &["--resume-from-checkpoint", "--resume_from_checkpoint"],
        "the checkpoint to go on from",
        "resume",
    ),
    habit(&["--output-dir", "--output_dir"], "the folder in which run folders are made", "run-dir"),
    habit(&["--run-name", "--run_name", "--experiment-name"], "the name of a run", "name"),
    Habit {
        theirs: &["--bf16", "--mixed-precision", "--mixed_precision"],
        what: "mixed precision",
        flag: "precision",
        value: Some("bf16"),
    },
    Habit {
        theirs: &["--fp16"],
        what: "mixed precision with fp16",
        flag: "precision",
        value: Some("fp16"),
    },
];

/// What to write instead of a word of another program, if one is what `clap` stumbled over.
pub(super) fn answer(
    typed: &[String],
    command: &Command,
    path: &str,
    error: &Error,
) -> Option<String> {
    operation(command, path, error)
        .or_else(|| program(typed, command, path, error))
        .or_else(|| backend(error))
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

/// PyTorch's backends.
fn backend(error: &Error) -> Option<String> {
    let value = text(error, ContextKind::InvalidValue);
    let is_backend = text(error, ContextKind::InvalidArg).starts_with("--transport")
        && ["nccl", "gloo", "ucc"].contains(&value);
    is_backend.then(|| {
        format!(
            "--backend {value}: this is a backend of PyTorch; pass --transport shm for ranks of one host, or tcp for \
             ranks of several"
        )
    })
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
    let is_known = |habit: &&Habit| habit.theirs.contains(&word) && has(habit.flag);
    let habit = HABITS.iter().find(is_known)?;
    let value = value(typed, word);
    let shown = value.as_ref().map_or(word.to_owned(), |value| format!("{word} {value}"));
    let pass = habit.value.map(str::to_owned).or(value).unwrap_or_else(|| "N".to_owned());
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
        .find_map(|(at, word)| word.strip_prefix(flag).map(|rest| (at, rest)))?;
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
    let letters = |text: &str| -> String {
        let text = text.to_ascii_lowercase();
        let text = text.strip_suffix("_perf").unwrap_or(&text);
        text.chars().filter(char::is_ascii_alphanumeric).collect()
    };
    let is_it = |kind: &OpKind| letters(kind.name()) == letters(typed);
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
        assert_eq!(of("-g -c 0", "-g"), None);
        assert_eq!(of("-c 0", "-g"), None);
    }
}
