//! `paceline hang`: which rank of a PyTorch job holds up the others, from the files of its flight recorder.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use clap::Args;
use paceline_analysis::hang::{Cause, Culprit, Hang, Victim, read};
use paceline_failure::outputs::{check_file, write_stated_json};
use paceline_failure::{Failure, Result};
use paceline_files::printable;
use paceline_host::disk::Disk;
use paceline_host::text::{date, plural, say};

use super::analyze::ranks_in_words;

/// The most culprits, and the most victims, that are printed.
const SHOWN: usize = 12;

const EXAMPLES: &str = "\
Reads the files that PyTorch writes when a collective does not end in time (docs/hangs.md). For
example:

  TORCH_FR_BUFFER_SIZE=2000 torchrun ...       # PyTorch 2.14 and newer do so by default
  paceline hang /tmp                           # /tmp/nccl_trace_rank_0, /tmp/nccl_trace_rank_1, ...
";

/// Flags of `paceline hang`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct HangArgs {
    /// Folder with a file for each rank, whose name ends with the number of the rank
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// Also write all culprits and victims to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Runs `paceline hang`.
///
/// # Errors
///
/// If the folder has no files of the flight recorder, or one that cannot be read.
pub fn hang(args: &HangArgs) -> Result<u8> {
    if let Some(file) = &args.json {
        check_file("json", file)?;
    }
    let found = read(&args.folder).map_err(|error| Failure::Usage(error.to_string()))?;
    show(&found, &BTreeMap::new());
    if let Some(file) = &args.json {
        write_stated_json(&Disk::default(), file, &found)?;
    }
    Ok(0)
}

/// Prints the answer. `places` says where the program of a culprit is, where that is known.
pub(super) fn show(found: &Hang, places: &BTreeMap<usize, String>) {
    let Hang { files, missing, culprits, victims } = found;
    if culprits.is_empty() {
        say(&format!("Nothing hangs: no call is unfinished in {}", plural(*files, "file")));
    }
    for culprit in culprits.iter().take(SHOWN) {
        say(&printable(&verdict(culprit)));
        if let Some(line) = &culprit.line {
            let whose = if culprit.cause == Cause::Desynchronized { "Its" } else { "The others'" };
            say(&printable(&format!("  {whose} call: {line}")));
        }
        if let Some(place) = places.get(&culprit.rank) {
            say(&printable(&format!("  {place}")));
        }
        let moment =
            culprit.last_ns.and_then(|ns| u64::try_from(ns).ok()).map(Duration::from_nanos);
        if let Some(at) = moment.and_then(|of| UNIX_EPOCH.checked_add(of)) {
            say(&format!("  Last seen: {}", date(at, "%Y-%m-%d %H:%M:%S%.3f")));
        }
        if !culprit.peers.is_empty() {
            let peers: Vec<usize> = culprit.peers.iter().copied().collect();
            say(&format!("  Held up directly: {}", ranks_in_words(&peers)));
        }
    }
    more(culprits.len(), "rank");
    if !missing.is_empty() {
        say(&format!("No files of {}", ranks_in_words(missing)));
    }
    if !victims.is_empty() {
        let only = if victims.len() == 1 { "waits" } else { "wait" };
        say(&format!("{} only {only}:", plural(victims.len(), "rank")));
        let lines = alike(victims);
        lines.iter().take(SHOWN).for_each(|line| say(line));
        more(lines.len(), "call");
    }
}

/// A line for all victims that wait in the same call for the same ranks.
fn alike(victims: &[Victim]) -> Vec<String> {
    let mut waits: BTreeMap<(&str, &str, Vec<usize>), Vec<usize>> = BTreeMap::new();
    for Victim { rank, call, group, waits_for } in victims {
        let waits_for = waits_for.iter().copied().collect();
        waits.entry((group, call, waits_for)).or_default().push(*rank);
    }
    let line = |((group, call, waits_for), ranks): ((&str, &str, Vec<usize>), Vec<usize>)| {
        let (ranks, others) = (ranks_in_words(&ranks), ranks_in_words(&waits_for));
        printable(&format!("  {ranks}, in {call} of group {group}, for {others}")).into_owned()
    };
    waits.into_iter().map(line).collect()
}

fn more(count: usize, what: &str) {
    if count > SHOWN {
        say(&format!("... and {} more (--json FILE has all)", plural(count - SHOWN, what)));
    }
}

/// The answer, in a sentence.
fn verdict(culprit: &Culprit) -> String {
    let Culprit { rank, call, group, own, theirs, .. } = culprit;
    let name = own.as_deref().unwrap_or(call);
    match culprit.cause {
        Cause::Host => format!(
            "Rank {rank} has not made the call {call} of group {group}. It has no unfinished call, so its program has stopped: a lock, an \
             exception, or data that do not come"
        ),
        Cause::Device => format!(
            "Rank {rank} has made the call {call} of group {group}, but its device does not come to it or does not end it: a kernel \
             before it does not end"
        ),
        Cause::NoFile => format!(
            "Rank {rank} has written no file, and others wait for it in {call} of group {group}"
        ),
        Cause::Desynchronized => match theirs {
            Some(theirs) => format!(
                "Rank {rank} calls {name} where others call {theirs} ({call} of group {group})"
            ),
            None => format!(
                "Ranks make different calls: rank {rank} calls {name} ({call} of group {group})"
            ),
        },
        Cause::Order => format!(
            "Rank {rank} waits for ranks that wait for it ({call} of group {group}): they make their calls in another order"
        ),
        Cause::Network => format!(
            "Rank {rank} has begun {call} of group {group}, as all members have, and it does not end: the network or the library"
        ),
    }
}
