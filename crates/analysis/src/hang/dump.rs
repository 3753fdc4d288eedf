//! A file of PyTorch's flight recorder: the last calls of one rank, and how far each came.
//!
//! A path goes in, and [`Dump`] comes out. Versions 2.3 to 2.10 of the format are read, of NCCL and of Gloo, pickled or as JSON. This file does not
//! know why anybody waits. Source: `torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use paceline_files::Printable;

use super::pickle::{Id, PlainValues};
use crate::TraceError;
use crate::read::MAX_RANKS;

/// The largest file that is read. A full buffer of 2,000 calls with their stacks takes a few megabytes.
const MAX_BYTES: u64 = 64 << 20;

/// The most values of a file. A full buffer has about 100,000.
const MOST_VALUES: usize = 4 << 20;

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
    /// The unique name of its group, which is the same on all ranks.
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
    pub(super) groups: Vec<(String, Vec<usize>)>,
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
        let parsed = PlainValues::parse(&bytes, MOST_VALUES)
            .and_then(|(values, root)| Self::of(&values, root, rank));
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
        let groups = values.pairs(get("pg_config")?).filter_map(|(name, of)| {
            let ranks = ranks(values.text(values.get(of, "ranks")?)?);
            Some((name.to_owned(), (named(name, &ranks), ranks)))
        });
        let groups: BTreeMap<String, (String, Vec<usize>)> = groups.collect();
        let group = |of: Id| {
            let name = group(values, of)?;
            Some(groups.get(&name).map_or(name, |(unique, _)| unique.clone()))
        };
        let of_file = values.get(root, "entries").map_or(&[][..], |list| values.list(list));
        let read = of_file.iter().map(|of| entry(values, *of, group(*of)?));
        let entries = read.collect::<Option<Vec<_>>>().ok_or("an entry has not what all have")?;
        let entries = without_ends(entries);
        let local = |of: &Id| Some((values.int(values.get(*of, "pg_id")?)?, group(*of)?));
        let names: BTreeMap<i64, String> = of_file.iter().filter_map(local).collect();
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
            let name = names.get(id).or_else(|| is_plain.then(|| &groups[in_order[at]].0))?;
            let enqueued = number(*of, "last_enqueued_collective")?;
            let completed = number(*of, "last_completed_collective")?;
            Some((name.clone(), LastNumbers { enqueued, completed }))
        });
        let progress = progress.collect();
        let groups = groups.into_values().collect();
        Ok(Self { rank, progress, groups, entries, has_starts })
    }
}

/// The ranks in `[0, 1, 5]`.
fn ranks(text: &str) -> Vec<usize> {
    let inner = text.trim_matches(['[', ']']);
    let all = inner.split(',').filter_map(|rank| rank.trim().parse().ok());
    all.filter(|rank| *rank < MAX_RANKS).collect()
}

/// A name of a group that no other one has: groups that `split_group` makes have one name, and other members. The default group, of Gloo
/// too, is named 0.
fn named(name: &str, ranks: &[usize]) -> String {
    if name == "0" {
        return name.to_owned();
    }
    let mut hasher = DefaultHasher::new();
    ranks.hash(&mut hasher);
    format!("{name} {:016x}", hasher.finish())
}

/// The calls without the entry that ends a batch of them, as of `batch_isend_irecv`: PyTorch writes only there how far the batch came. The
/// calls of a batch have the same number.
fn without_ends(all: Vec<(Entry, Option<i64>)>) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::with_capacity(all.len());
    let mut batches: HashMap<String, (Option<i64>, Vec<usize>)> = HashMap::new();
    for (entry, number) in all {
        let batch = batches.entry(entry.group.clone()).or_default();
        if batch.0 != number {
            *batch = (number, Vec::new());
        }
        if entry.name.ends_with("coalesced") && !batch.1.is_empty() {
            for at in batch.1.drain(..) {
                (entries[at].state, entries[at].last_ns) = (entry.state, entry.last_ns);
            }
            continue;
        }
        batch.1.push(entries.len());
        entries.push(entry);
    }
    entries
}

fn group(values: &PlainValues, of: Id) -> Option<String> {
    let name = values.list(values.get(of, "process_group")?).first()?;
    Some(values.text(*name)?.to_owned())
}

/// An entry, and its number among the calls of its kind in the group: the same for all of a batch. That of sends and receives is below zero.
fn entry(values: &PlainValues, of: Id, unique: String) -> Option<(Entry, Option<i64>)> {
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
    let is_p2p = flag("is_p2p");
    let in_batch = if is_p2p { int("p2p_seq_id").map(|of| !of) } else { int("collective_seq_id") };
    let entry = Entry {
        label: description.map_or_else(|| group.clone(), |text| format!("{group} ({text})")),
        group: unique,
        number: if is_p2p { 0 } else { int("collective_seq_id")? },
        name: name.to_owned(),
        inputs: tensors(values, get("input_sizes"), get("input_dtypes")),
        state,
        is_gloo,
        last_ns: times.iter().filter_map(|key| int(key)).max()?,
        line: get("frames").and_then(|frames| line(values, frames)),
    };
    Some((entry, in_batch))
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

/// The innermost frame of Python outside of PyTorch's own files.
pub(crate) fn line(values: &PlainValues, frames: Id) -> Option<String> {
    let text = |frame: Id, key: &str| values.text(values.get(frame, key)?);
    let is_own = |frame: &&Id| {
        text(**frame, "filename")
            .is_some_and(|file| file.ends_with(".py") && !file.contains("torch/"))
    };
    let frame = *values.list(frames).iter().find(is_own)?;
    let number = values.int(values.get(frame, "line")?)?;
    Some(format!("{}:{number} in {}", text(frame, "filename")?, text(frame, "name")?))
}
