//! `paceline trace`: works with trace files in other ways than analyzing them.

pub mod args;

use std::io::Write;
use std::path::Path;

use paceline_analysis::TraceError;
use paceline_analysis::ranks::merge::{Merged, merge};
use paceline_analysis::ranks::{ClockSource, Clocks};
use paceline_analysis::read::{Select, Window, find};
use paceline_failure::outputs::{check_file, write_stated};
use paceline_failure::{Failure, Result, usage};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::text::{plural, say};

use self::args::{MergeArgs, TraceCommand};

/// The warning that is printed before the list of ranks whose traces do not overlap in time with the
/// newest trace.
pub(crate) const ANOTHER_RUN: &str = "By the time of day, there are traces that do not overlap with the newest one and are probably of another \
     run: of rank";

/// Runs `paceline trace`.
pub fn trace(command: &TraceCommand) -> Result<u8> {
    match command {
        TraceCommand::Merge(args) => merge_command(args),
    }
}

fn merge_command(args: &MergeArgs) -> Result<u8> {
    let output = args.output.printable();
    check_file("--output", &args.output)?;
    if args.output.exists() && !args.force {
        return usage(format!(
            "{output} is there already; pass --force to replace it, or name another --output"
        ));
    }
    let windows = find(&args.places, Select::Latest)?;
    let Some(window) = windows.into_iter().next() else {
        return Err(Failure::Run("No trace files found.".into()));
    };
    let out = args.output.canonicalize().ok();
    let is_output = |path: &Path| out.is_some() && path.canonicalize().ok() == out;
    if window.files.iter().any(|file| is_output(&file.path)) {
        return usage(format!("{output} is one of the traces to be merged; name another --output"));
    }
    let is_compressed = args.output.extension().is_some_and(|extension| extension == "gz");
    let write = |out: &mut (dyn Write + Send)| merge(&window.files, is_compressed, out);
    let merged =
        write_stated(&Disk::default(), &args.output, write).map_err(|error| match error {
            TraceError::Write(error) => Failure::io(format!("cannot write {output}"), error),
            error => error.into(),
        })?;
    say(told(&window, &merged).trim_end());
    say(&format!("Written: {output} (open it in ui.perfetto.dev)"));
    Ok(0)
}

/// The result of a merge, as text for the console.
fn told(window: &Window, merged: &Merged) -> String {
    let list = |ranks: &mut dyn Iterator<Item = usize>| -> String {
        ranks.map(|rank| rank.to_string()).collect::<Vec<_>>().join(", ")
    };
    let ranks = list(&mut window.files.iter().map(|file| file.rank));
    let mut told = format!(
        "Ranks {ranks}: {} events on one time line, {} collectives joined by arrows.\n",
        merged.num_events, merged.num_joined
    );
    if !window.missing.is_empty() {
        let missing = list(&mut window.missing.iter().copied());
        told.push_str(&format!("There is no trace of ranks {missing}.\n"));
    }
    told.push_str(&clocks(&merged.clocks));
    if merged.num_split > 0 {
        told.push_str(&format!(
            "{} rows were added for events that overlap without lying within each other.\n",
            merged.num_split
        ));
    }
    for doubt in &window.doubts {
        told.push_str(&format!("warning: {doubt}\n"));
    }
    if !merged.apart.is_empty() {
        let apart = list(&mut merged.apart.iter().copied());
        told.push_str(&format!("warning: {ANOTHER_RUN} {apart}.\n"));
    }
    let left_out = &merged.left_out;
    for (count, why) in [
        (left_out.without_time, "have no time that can be read"),
        (left_out.without_meaning, "have no phase, or are counters without values"),
        (left_out.loose_arrows, "are ends of arrows from or to no event"),
        (left_out.crowded, "overlap with too many others of their row"),
    ] {
        if count > 0 {
            told.push_str(&format!("{} left out, which {why}.\n", plural(count as usize, "event")));
        }
    }
    for (what, count) in &merged.oddities {
        told.push_str(&format!("Odd: {what}, {}.\n", plural(*count as usize, "event")));
    }
    told
}

/// How the ranks' clocks were aligned, and how well.
fn clocks(clocks: &Clocks) -> String {
    let has =
        |source: fn(&ClockSource) -> bool| clocks.ranks.iter().any(|rank| source(&rank.source));
    let how = if clocks.ranks.len() < 2 {
        return String::new();
    } else if has(|source| matches!(source, ClockSource::Estimated { .. })) {
        "estimated from the ends of collectives"
    } else if has(|source| *source == ClockSource::Measured) {
        "measured while the ranks ran"
    } else {
        "taken as they are"
    };
    let within = match clocks.error_ns() {
        // Ranks on one kernel read the same clock, and their traces say so.
        Some(0) => return "Clocks: all ranks read the same one.\n".into(),
        Some(ns) => format!(" within {} us", ns.div_ceil(1000)),
        None => ", and nothing tells how far they lie apart".into(),
    };
    format!("Clocks: {how}{within}.\n")
}
