//! `paceline __steps`, which `paceline bench scaling` starts for each run of the user's program: starts the ranks, times their
//! optimizer steps or reads what they print, and writes a summary.
//!
//! The hook is that of `paceline record`, with a file that times instead of recording.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use paceline_failure::outputs::write_json;
use paceline_failure::{Failure, Result};
use paceline_host::disk::Disk;
use paceline_host::text::plural;
use paceline_launch::launcher::{Launch, Output, launch};
use paceline_table::stats;
use regex::bytes::Regex;
use serde_json::json;

use super::notes::Notes;
use super::{Hook, INSTEAD, PATHS};

/// How long ranks may take to end after a signal.
const GRACE: Duration = Duration::from_millis(300);
/// The most bytes of a rank's output that are searched, from its start.
const MAX_OUTPUT: u64 = 64 << 20;
const TIMER: (&str, &str) = (INSTEAD, include_str!("paceline_steps.py"));

/// Flags of `paceline __steps`.
#[derive(Debug, Args)]
pub struct StepsArgs {
    /// The number of ranks.
    #[arg(long)]
    nproc: usize,
    /// Optimizer steps after which the program ends; 0 for its own end.
    #[arg(long)]
    steps: u64,
    /// The amount that a step of all ranks counts in the throughput.
    #[arg(long)]
    per_step: f64,
    /// The pattern of the throughput in the output; empty if steps are timed.
    #[arg(long)]
    throughput: String,
    /// The file of the summary.
    #[arg(long)]
    json: PathBuf,
    /// The program and its arguments.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// Runs the program. Returns its exit code.
pub fn time_steps(args: &StepsArgs) -> Result<u8> {
    let settings = json!({ "steps": args.steps }).to_string();
    let hook = Hook::new(&[TIMER, ("settings.json", &settings)])?;
    let log_folder = (!args.throughput.is_empty()).then(|| hook.folder.clone());
    let ended = launch(&Launch {
        command: args.command.clone(),
        num_ranks: args.nproc,
        variables: vec![(PATHS, hook.paths())],
        output: Output { log_folder, ..Output::default() },
        grace: GRACE,
        ..Launch::default()
    })?;
    if ended.code == 0 {
        summarize(args, &hook.folder)?;
    }
    Ok(ended.code)
}

/// Writes the summary: the steps of the slowest rank, and the throughput. Fails if there is none, or if the ranks did not train
/// together.
fn summarize(args: &StepsArgs, folder: &Path) -> Result<()> {
    let notes = Notes::read(folder);
    let stepped = || notes.processes.iter().filter(|of| of.steps > 0);
    let most = |name| stepped().filter_map(|of| of.timed.get(name).copied()).reduce(f64::max);
    let world = most("world").map_or(args.nproc, |world| world as usize);
    if world != args.nproc {
        return Err(Failure::Run(format!(
            "the program was started as {}, and torch.distributed had {world} in its steps; it has to take part as rank \
             RANK of WORLD_SIZE, as torch.distributed.init_process_group() does without arguments",
            plural(args.nproc, "rank")
        )));
    }
    let step_ms = most("step_ms");
    let throughput = if args.throughput.is_empty() {
        let per_s = step_ms.map(|ms| args.per_step * 1e3 / ms);
        per_s.ok_or_else(|| {
            format!("{}; --throughput REGEX reads what it prints instead", notes.why_untimed())
        })
    } else {
        printed(args, folder)?.ok_or_else(|| {
            format!(
                "the program has printed no number above zero that --throughput {} finds",
                args.throughput
            )
        })
    };
    let summary = json!({
        "strategy": "", "transport": "", "params": 0, "weights_sha256": "",
        "world_size": args.nproc,
        "steps": stepped().map(|of| of.steps).min().unwrap_or(0),
        "threads": most("threads"),
        "step_ms_median": step_ms,
        "in_backward_ms": most("in_backward_ms"),
        "throughput": throughput.map_err(Failure::Run)?,
    });
    write_json(&Disk::default(), &args.json, &summary)
}

/// The sum over the ranks of the median number that each has printed, the first quarter left out; `None` without numbers.
fn printed(args: &StepsArgs, folder: &Path) -> Result<Option<f64>> {
    let pattern =
        Regex::new(&args.throughput).map_err(|error| Failure::Usage(error.to_string()))?;
    let number = |line: &[u8]| {
        let digits = pattern.captures(line)?.get(1)?.as_bytes().to_vec();
        let number = String::from_utf8(digits).ok()?.replace(',', "").parse::<f64>().ok()?;
        Some(number).filter(|number| number.is_finite() && *number > 0.0)
    };
    let mut sum = None;
    for path in (0..args.nproc).map(|rank| folder.join(format!("rank_{rank}.log"))) {
        let mut text = Vec::new();
        let read = paceline_files::open(&path)
            .and_then(|file| file.take(MAX_OUTPUT).read_to_end(&mut text));
        read.map_err(Failure::cannot("read", &path))?;
        let lines = text.split(|byte| matches!(byte, b'\n' | b'\r'));
        let numbers: Vec<f64> = lines.filter_map(number).collect();
        let median = stats::median(numbers[numbers.len() / 4..].iter().copied());
        sum = median.map(|of| of + sum.unwrap_or(0.0)).or(sum);
    }
    Ok(sum)
}
