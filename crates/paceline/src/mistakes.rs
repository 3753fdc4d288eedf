//! The answer to a command line that cannot be read: the mistake, and the words to write instead.
//!
//! Takes the words and the error of `clap`, which names similar flags and commands. Words that users know from other programs
//! (torchrun, mpirun, nccl-tests, DeepSpeed, nanoGPT, transformers) are answered from a table. This file knows no defaults, and
//! starts nothing.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, Error, FromArgMatches};
use paceline_failure::{Failure, Result};
use paceline_files::printable;
use paceline_host::text::named;
use paceline_run::train::help;
use paceline_settings::spec::message;

use crate::cli::Cli;

/// Flags of other programs, and values with the flag that they are typed for, in small letters and with dashes for underscores;
/// and the advice. A command answers with the first row whose words have the user's and whose flag it has.
const ALIASES: &[(&str, &str)] = &[
    ("-n, -np, -g, --np, --ngpus, --n-gpus, --gpus, --num-gpus, --nprocs", "--nproc N"),
    (
        "--num-processes, --nproc-per-node, --world-size, --ranks, --num-ranks, --workers",
        "--nproc N",
    ),
    ("--standalone", "--nproc N alone: the ranks of one host meet at a port that it chooses"),
    ("--rdzv-endpoint, --rdzv-backend, --rdzv-id", "--master-addr HOST --master-port PORT"),
    ("--nodes, --num-nodes, --num-machines", "--nnodes N"),
    ("--port, --main-process-port", "--master-port PORT"),
    ("--num-epochs, --num-train-epochs, --max-epochs", "--epochs N"),
    ("--max-steps, --num-steps, --iterations, --iters, --max-iters, --train-iters", "--steps N"),
    ("-b, --bs, --batch, --micro-batch-size", "--batch-size N"),
    ("--per-device-train-batch-size, --train-micro-batch-size-per-gpu", "--batch-size N"),
    ("--grad-accum, --accum-steps, --accumulate-grad-batches", "--accumulate N"),
    ("--max-grad-norm, --grad-clip, --clip-grad", "--clip-grad-norm X"),
    ("--optim, --opt", "--optimizer NAME"),
    ("--wd, --decay", "--weight-decay X"),
    ("--scheduler, --lr-scheduler, --lr-scheduler-type", "--lr-schedule NAME"),
    ("--warmup, --num-warmup-steps, --lr-warmup, --warmup-iters", "--lr-warmup-steps N"),
    ("--checkpoint-dir, --save-dir", "--save DIR"),
    ("--checkpoint, --ckpt, --checkpoints", "--save DIR to write, or --resume DIR to go on"),
    ("--save-interval, --save-steps", "--save-every N"),
    ("--resume-from-checkpoint, --resume-from, --load, --load-checkpoint", "--resume DIR"),
    ("--eval, --do-eval, --validate, --val", "--evaluate"),
    ("--eval-steps, --eval-interval", "--eval-every N"),
    ("--dataset, --dataset-name", "--data NAME"),
    ("--data-path, --dataset-path, --data-root, --dataset-dir", "--data-dir DIR"),
    ("--num-workers, --dataloader-num-workers, --prefetch-factor", "--load-ahead N"),
    ("--seq-length, --sequence-length, --block-size", "--seq-len N"),
    ("--model-name-or-path, --pretrained-model, --hf-model", "--pretrained DIR"),
    ("--gradient-checkpointing, --activation-checkpointing", "--checkpoint-activations"),
    ("--random-seed, --manual-seed", "--seed N"),
    ("--log-interval, --logging-steps", "--log-every N"),
    ("--output-dir", "--run-dir DIR"),
    ("--run-name, --experiment-name", "--name NAME"),
    ("--config-file, --yaml", "--config FILE"),
    ("--trace, --profiler, --torch-profiler", "--profile"),
    ("--tb", "--tensorboard"),
    ("--wandb, --report-to, --mlflow, --logger", "--tensorboard, or read metrics.jsonl of the run"),
    ("--dtype, --torch-dtype", "--precision TYPE"),
    ("--bf16, --mixed-precision, --precision mixed, --precision amp", "--precision bf16"),
    ("--precision half", "--precision bf16 or fp16"),
    ("--fp16, --half", "--precision fp16"),
    ("--gpu, --cuda, --use-cuda", "--device cuda"),
    ("--device mps, --device rocm, --device xpu", "--device cpu; cards are those of NVIDIA"),
    ("--as-published, --like-for-like", "--ddp-choice published, or --shard-choice published"),
    ("--nccl", "--device cuda; cards are connected by NCCL"),
    ("--gloo, --transport gloo, --transport ucc", "--transport shm, or tcp for several hosts"),
    ("--ddp, --distributed, --data-parallel", "--strategy ddp, which is the default"),
    ("--strategy dp, --strategy data-parallel, --strategy horovod", "--strategy ddp"),
    ("--fsdp, --strategy fsdp, --strategy fsdp2, --strategy hsdp", "--strategy sharded3"),
    ("--strategy full-shard, --strategy fully-shard", "--strategy sharded3"),
    ("--strategy shard-grad-op, --strategy zero-2", "--strategy sharded2, or zero2"),
    ("--strategy zero-1", "--strategy sharded1, or zero1"),
    ("--strategy zero-3, --strategy stage3", "--strategy sharded3, or zero3"),
    ("--zero, --zero-stage, --deepspeed", "--strategy sharded1, sharded2 or sharded3, by stage"),
    (
        "--strategy zero, --strategy deepspeed",
        "--strategy sharded1, sharded2 or sharded3, by stage",
    ),
    ("--pp, --pipeline-parallel-size, --num-stages", "--mesh pp=N for N stages"),
    ("--strategy pp, --strategy pipeline, --strategy gpipe, --strategy 1f1b", "--mesh pp=N"),
    ("--tp, --tensor-parallel-size", "--mesh tp=N"),
    ("--optimizer adam", "--optimizer adamw --weight-decay 0"),
    ("--model gpt, --model gpt2, --model transformer, --model lm", "--model llama"),
    ("--model llama2, --model llama3", "--model llama"),
    ("--model resnet, --model resnet18, --model resnet50, --model vit", "--model cnn"),
    ("--data imagenet, --data imagenette, --data imagefolder", "--data images --data-dir DIR"),
    ("--data fashionmnist, --data fashion-mnist, --data kmnist", "--data mnist --data-dir DIR"),
];

/// Commands of earlier versions, with a second word or a flag that is gone, and the words for the same today.
const MOVED: &[(&str, &str)] = &[
    ("paceline bench buckets", "paceline lab buckets --sizes 1,10 --links 10gbe"),
    ("paceline bench naive-ddp", "paceline lab buckets --sizes 1,10 --links 10gbe"),
    ("paceline lab combine", "paceline sweep --vary KEY=A,B --vary OTHER=C,D"),
    ("paceline lab --trace", "paceline analyze DIR"),
];

/// Reads a command line, the name of the program included. Prints the help and ends the process if the words ask for it.
pub fn read(words: &[OsString]) -> Result<Cli> {
    let program = Cli::command();
    let program = if words.iter().any(|word| word == "--help-all") {
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
    let (mut command, mut path) = (&program, program.get_name().to_owned());
    for word in words.iter().skip(1) {
        let Some(part) = command.find_subcommand(word) else { break };
        (command, path) = (part, format!("{path} {}", part.get_name()));
    }
    let flag = text(error, ContextKind::InvalidArg).split(' ').next().unwrap_or_default();
    let begin: Vec<&str> = words.iter().skip(1).take(2).filter_map(|word| word.to_str()).collect();
    let typed = [format!("paceline {}", begin.join(" ")), format!("{path} {flag}")];
    if let Some((old, new)) = MOVED.iter().find(|(old, _)| typed.iter().any(|typed| typed == old)) {
        return format!("{old}: pass {new}");
    }
    if let Some(text) = alias(command, error) {
        return text;
    }
    let problem = message(error);
    let is_flag = text(error, ContextKind::InvalidArg).starts_with('-');
    let usage = match error.kind() {
        ErrorKind::InvalidUtf8 => return not_utf8(words).unwrap_or(problem),
        ErrorKind::InvalidSubcommand => {
            let typed = text(error, ContextKind::InvalidSubcommand);
            let offered = command.get_subcommands().filter(|part| !part.is_hide_set());
            let names: Vec<&str> = offered.map(Command::get_name).collect();
            let similar = match error.get(ContextKind::SuggestedSubcommand) {
                // The most similar one is the last.
                Some(ContextValue::Strings(similar)) => similar.last(),
                _ => None,
            };
            return match similar.filter(|similar| names.contains(&similar.as_str())) {
                Some(similar) => {
                    format!("there is no command {path} {typed}; did you mean {path} {similar}?")
                }
                None => {
                    format!("there is no command {path} {typed}; pass one of {}", names.join(", "))
                }
            };
        }
        ErrorKind::UnknownArgument if is_flag && !command.has_subcommands() => String::new(),
        ErrorKind::UnknownArgument
        | ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand => usage(error),
        ErrorKind::ArgumentConflict if command.has_subcommands() => usage(error),
        _ => return problem,
    };
    let help = if has(command, "--help-all") { "--help-all" } else { "--help" };
    format!("{problem}{usage}\n\nFor all flags: {path} {help}")
}

fn text(error: &Error, kind: ContextKind) -> &str {
    match error.get(kind) {
        Some(ContextValue::String(text)) => text,
        _ => "",
    }
}

fn has(command: &Command, flag: &str) -> bool {
    command.get_arguments().any(|own| own.get_long().is_some_and(|own| flag[2..] == *own))
}

/// The row for the flag, or for the value of a flag, that `clap` refused; or the value that is spelled like it.
fn alias(command: &Command, error: &Error) -> Option<String> {
    let flag = text(error, ContextKind::InvalidArg).split(' ').next()?;
    let value = text(error, ContextKind::InvalidValue);
    let typed = match value {
        "" if error.kind() == ErrorKind::UnknownArgument => flag.to_owned(),
        "" => return None,
        // mpirun's -np 2 is read as -n with the value p.
        _ if matches!(flag, "--nproc" | "--iters") && value.starts_with('p') => "-np".to_owned(),
        value => format!("{flag} {value}"),
    };
    let word = typed.to_lowercase().replace('_', "-");
    let is_meant = |(theirs, pass): &&(&str, &str)| {
        let own = pass.split([' ', ',', ';']).next();
        theirs.split(", ").any(|known| known == word) && own.is_some_and(|own| has(command, own))
    };
    if let Some((_, pass)) = ALIASES.iter().find(is_meant) {
        return Some(format!("{}: pass {pass}", printable(&typed)));
    }
    let letters = |word: &str| word.to_lowercase().replace(['-', '_'], "");
    let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidValue) else {
        return None;
    };
    let same = known.iter().find(|known| letters(known) == letters(value))?;
    Some(format!("{}: pass {same}", printable(&typed)))
}

fn not_utf8(words: &[OsString]) -> Option<String> {
    let at = words.iter().position(|word| word.to_str().is_none())?;
    let flag =
        words[..at].last().and_then(|word| word.to_str()).filter(|word| word.starts_with('-'));
    let flag = flag.map_or(String::new(), |flag| format!("{flag} "));
    Some(format!("{flag}{}: this is not valid UTF-8; pass another name", named(&words[at])))
}

/// The usage line of an error, after an empty line.
fn usage(error: &Error) -> String {
    let text = error.render().to_string();
    let usage = text.split_once("\n\nUsage:").map(|(_, rest)| rest);
    let usage = usage.and_then(|rest| rest.split("\n\n").next());
    usage.map_or(String::new(), |usage| format!("\n\nUsage:{}", usage.trim_end()))
}
