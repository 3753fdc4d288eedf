//! A file of PyTorch's flight recorder: the last calls of one rank, and how far each came.
//!
//! A path goes in, and [`Dump`] comes out. Versions 2.3 to 2.10 of the format are read, of NCCL and of Gloo, pickled or as JSON. This file does not
//! know why anybody waits. Source: `torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`.

use std::collections::BTreeMap;
use std::path::Path;

use paceline_files::Printable;

use super::pickle::{Id, PlainValues};
use crate::TraceError;
use crate::read::MAX_RANKS;

/// The largest file that is read. A full buffer of 2,000 calls with their stacks takes a few megabytes.
const MAX_BYTES: u64 = 64 << 20;

/// How far a call came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    /// The host has handed it over.
    Scheduled,
    /// The device has begun it.
    Started,
    /// It has ended.
    Completed,
}

/// A collective, or a send or receive.
#[derive(Debug)]
pub(super) struct Entry {
    /// The name of its group, which is the same on all ranks.
    pub(super) group: String,
    /// The group as users know it, as in `3 (mesh_tp)`.
    pub(super) label: String,
    /// Its number among the collectives of the group, from 1; 0 for a send or receive.
    pub(super) number: i64,
    /// As in `all_reduce`; of a send or receive `send 0->3`, with ranks within the group.
    pub(super) name: String,
    /// Type and shape of the inputs, as in `Float [4, 128]`.
    pub(super) inputs: String,
    pub(super) state: State,
    /// Gloo's entries do not tell whether a call has begun.
    pub(super) is_gloo: bool,
    /// When something last happened to it, in nanoseconds since 1970.
    pub(super) last_ns: i64,
    /// The line of the user's program that made the call, as in `train.py:88 in step`.
    pub(super) line: Option<String>,
}

impl Entry {
    pub(super) fn is_p2p(&self) -> bool {
        self.number == 0
    }
}

/// The numbers of a group's last collectives, where the file has no entries of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct LastNumbers {
    pub(super) enqueued: i64,
    pub(super) completed: i64,
}

/// The contents of a rank's file.
#[derive(Debug)]
pub(super) struct Dump {
    pub(super) rank: usize,
    /// The ranks of each group.
    pub(super) groups: BTreeMap<String, Vec<usize>>,
    pub(super) progress: BTreeMap<String, LastNumbers>,
    /// In the order of the calls.
    pub(super) entries: Vec<Entry>,
    /// Whether it tells which calls the device has begun.
    pub(super) has_starts: bool,
}

impl Dump {
    /// Reads the file of a rank.
    pub(super) fn read(path: &Path, rank: usize) -> Result<Self, TraceError> {
        let bytes = paceline_files::read(path, MAX_BYTES)
            .map_err(|source| TraceError::Io { path: path.to_owned(), source })?;
        let parsed =
            PlainValues::parse(&bytes).and_then(|(values, root)| Self::of(&values, root, rank));
        parsed.map_err(|fault| {
            TraceError::Unfit(format!(
                "{}: no file of PyTorch's flight recorder: {fault}",
                path.printable()
            ))
        })
    }

    fn of(values: &PlainValues, root: Id, rank: usize) -> Result<Self, String> {
        let get = |key: &str| values.get(root, key).ok_or_else(|| format!("it has no {key}"));
        let version = values.text(get("version")?).ok_or("its version is no text")?;
        if version.split('.').next() != Some("2") {
            return Err(format!("its version is {version}, and only 2.3 to 2.10 are known"));
        }
        let of_file = values.get(root, "entries").map_or(&[][..], |list| values.list(list));
        let read = of_file.iter().map(|of| entry(values, *of));
        let entries = read.collect::<Option<Vec<_>>>().ok_or("an entry has not what all have")?;
        let local = |of: &Id| Some((values.int(values.get(*of, "pg_id")?)?, group(values, *of)?));
        let names: BTreeMap<i64, String> = of_file.iter().filter_map(local).collect();
        let groups = values.pairs(get("pg_config")?).filter_map(|(name, of)| {
            Some((name.to_owned(), ranks(values.text(values.get(of, "ranks")?)?)))
        });
        let groups: BTreeMap<String, Vec<usize>> = groups.collect();
        let status: BTreeMap<i64, Id> = values
            .pairs(get("pg_status")?)
            .filter_map(|(id, of)| Some((id.parse().ok()?, of)))
            .collect();
        // Without entries, local numbers and names correspond in the order of numbers.
        let mut in_order: Vec<&String> = groups.keys().collect();
        in_order.sort_by_key(|name| (name.parse::<u64>().is_err(), name.parse::<u64>().ok()));
        let is_plain = in_order.len() == status.len();
        let number = |of: Id, key: &str| values.get(of, key).and_then(|of| values.int(of));
        let has_starts = entries.iter().any(|of| of.state == State::Started)
            || status
                .values()
                .any(|of| number(*of, "last_started_collective").is_some_and(|at| at > 0));
        let progress = status.iter().enumerate().filter_map(|(at, (id, of))| {
            let name = names.get(id).or_else(|| is_plain.then(|| in_order[at]))?;
            let enqueued = number(*of, "last_enqueued_collective")?;
            let completed = number(*of, "last_completed_collective")?;
            Some((name.clone(), LastNumbers { enqueued, completed }))
        });
        Ok(Self { rank, progress: progress.collect(), groups, entries, has_starts })
    }
}

/// The ranks in `[0, 1, 5]`.
fn ranks(text: &str) -> Vec<usize> {
    let inner = text.trim_matches(['[', ']']);
    let all = inner.split(',').filter_map(|rank| rank.trim().parse().ok());
    all.filter(|rank| *rank < MAX_RANKS).collect()
}

fn group(values: &PlainValues, of: Id) -> Option<String> {
    let name = values.list(values.get(of, "process_group")?).first()?;
    Some(values.text(*name)?.to_owned())
}

fn entry(values: &PlainValues, of: Id) -> Option<Entry> {
    let get = |key: &str| values.get(of, key);
    let int = |key: &str| get(key).and_then(|of| values.int(of));
    let flag = |key: &str| get(key).and_then(|of| values.bool(of)).unwrap_or(false);
    let full = values.text(get("profiling_name")?)?;
    let (library, name) = full.split_once(':').unwrap_or(("", full));
    let is_gloo = library == "gloo";
    // Gloo knows no states, only whether a call has left the list of those that run.
    let state = match values.text(get("state")?)? {
        "completed" => State::Completed,
        "scheduled" if is_gloo && flag("retired") => State::Completed,
        "started" => State::Started,
        _ => State::Scheduled,
    };
    let times = ["time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"];
    let group = group(values, of)?;
    let description = values.list(get("process_group")?).get(1).and_then(|of| values.text(*of));
    let description = description.filter(|text| !["", "undefined"].contains(text));
    Some(Entry {
        label: description.map_or_else(|| group.clone(), |text| format!("{group} ({text})")),
        group,
        number: if flag("is_p2p") { 0 } else { int("collective_seq_id")? },
        name: name.to_owned(),
        inputs: tensors(values, get("input_sizes"), get("input_dtypes")),
        state,
        is_gloo,
        last_ns: times.iter().filter_map(|key| int(key)).max()?,
        line: get("frames").and_then(|frames| line(values, frames)),
    })
}

/// Types and shapes, as in `Float [4, 128], Half [7]`.
fn tensors(values: &PlainValues, sizes: Option<Id>, dtypes: Option<Id>) -> String {
    let list = |of: Option<Id>| of.map_or(&[][..], |of| values.list(of));
    let each = list(sizes).iter().zip(list(dtypes)).map(|(size, dtype)| {
        let dims = values.list(*size).iter().filter_map(|dim| values.int(*dim));
        format!("{} {:?}", values.text(*dtype).unwrap_or("?"), dims.collect::<Vec<_>>())
    });
    each.collect::<Vec<_>>().join(", ")
}

/// The innermost frame outside of PyTorch's own files.
fn line(values: &PlainValues, frames: Id) -> Option<String> {
    let text = |frame: Id, key: &str| values.text(values.get(frame, key)?);
    let is_own = |frame: &&Id| {
        text(**frame, "filename")
            .is_some_and(|file| !file.contains("torch/") && !file.starts_with('<'))
    };
    let frame = *values.list(frames).iter().find(is_own)?;
    let number = values.int(values.get(frame, "line")?)?;
    Some(format!("{}:{number} in {}", text(frame, "filename")?, text(frame, "name")?))
}
