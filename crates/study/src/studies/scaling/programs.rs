//! Scaling of the user's own program: its flags, and the specification of a run.
//!
//! `paceline __steps` starts the ranks and measures them; this file does not know how.

use std::ffi::OsString;

use paceline_failure::Result;
use paceline_files::printable;
use paceline_host::resources;
use paceline_launch::launcher::check_program;
use regex::bytes::Regex;

use super::ScalingArgs;
use super::laws::Mode;
use crate::spec::{PROGRAM, Spec};
use crate::study::Setting;
use crate::usage;

/// Optimizer steps of a run by default.
const STEPS: u64 = 40;
/// The flag that states the batch of all ranks.
const BATCH: &str = "global-batch-size";
/// Programs and modules of Python that start ranks.
const LAUNCHERS: &str = "torchrun accelerate deepspeed mpirun mpiexec srun horovodrun torch.distributed.run \
                         torch.distributed.launch accelerate.commands.launch";

/// A parser of `--throughput`.
pub(super) fn pattern(text: &str) -> std::result::Result<String, String> {
    // The last line says what is wrong, and those before show where.
    let last = |error: regex::Error| {
        error.to_string().lines().last().unwrap_or_default().replace("error: ", "")
    };
    match Regex::new(text).map_err(last)?.captures_len() {
        2 => Ok(text.to_owned()),
        _ => {
            Err("pass one pair of parentheses, around the number; others begin with (?:".to_owned())
        }
    }
}

/// Whether the program takes its share of a batch.
pub(super) fn is_divisible(args: &ScalingArgs) -> bool {
    args.command.iter().any(|word| word.contains("{batch}"))
}

/// Checks the program and the flags beside it. Returns the setting, and the batch of one rank alone.
pub(super) fn check(args: &ScalingArgs) -> Result<(Setting, usize)> {
    let words = &args.command;
    check_program("bench scaling", &words.iter().map(OsString::from).collect::<Vec<_>>())?;
    let module = words.iter().skip_while(|word| *word != "-m").nth(1);
    let program = words[0].rsplit('/').next();
    let mut names = program.into_iter().chain(module.map(String::as_str));
    if let Some(launcher) = names.find(|name| LAUNCHERS.split(' ').any(|of| of == *name)) {
        return usage(format!(
            "bench scaling: {launcher} starts ranks, and so does this command; leave out the launcher and its flags, as \
             -- python train.py"
        ));
    }
    let given = &args.train.0;
    if let Some(flag) = given.keys().find(|key| *key != BATCH) {
        return usage(format!(
            "--{flag}: a flag of paceline train, which does not run here; pass flags of the program after it"
        ));
    }
    let needs_share = args.mode == Some(Mode::Strong);
    let has_share = is_divisible(args) || words.iter().any(|word| word.contains("{nproc}"));
    if is_divisible(args) != given.has(BATCH) || needs_share && !has_share {
        let flag = if needs_share {
            "--mode: strong scaling divides --global-batch-size among the ranks, as {batch}"
        } else {
            "--global-batch-size and {batch} go together"
        };
        return usage(format!(
            "{flag}; pass both, as --global-batch-size 256 -- python train.py --batch-size {{batch}}"
        ));
    }
    let model = printable(&words.join(" ")).into_owned();
    let setting = Setting { model, cores: resources::num_cores(), ..Setting::default() };
    Ok((setting, given.number(BATCH).unwrap_or(1)))
}

/// The specification of a run with this batch of all ranks.
pub(super) fn spec(args: &ScalingArgs, global_batch: usize, ranks: usize) -> Result<Spec> {
    if is_divisible(args) && !global_batch.is_multiple_of(ranks) {
        return usage(format!(
            "--global-batch-size {global_batch}: {ranks} ranks cannot have equal shares; pass a multiple of {ranks}"
        ));
    }
    let steps = args.steps.unwrap_or(if args.throughput.is_some() { 0 } else { STEPS });
    let flags = [
        format!("--nproc={ranks}"),
        format!("--steps={steps}"),
        format!("--per-step={global_batch}"),
        format!("--throughput={}", args.throughput.as_deref().unwrap_or_default()),
        "--".to_owned(),
    ];
    let (batch, nproc) = ((global_batch / ranks).to_string(), ranks.to_string());
    let fill = |word: &String| word.replace("{batch}", &batch).replace("{nproc}", &nproc);
    let words = flags.into_iter().chain(args.command.iter().map(fill));
    Ok(Spec::default().with_values(PROGRAM, words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_has_one_group() {
        assert!(pattern(r"([\d.]+) (?:it|samples)/s").is_ok());
        for (bad, words) in [("it/s", "one pair"), ("(a)(b)", "one pair"), ("(", "unclosed group")]
        {
            let error = pattern(bad).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
