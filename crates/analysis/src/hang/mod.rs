//! Who hangs: the ranks that others wait for, from the files of PyTorch's flight recorder.
//!
//! A folder of such files goes in, and [`Hang`] comes out, which can be printed or written as JSON. Rules, in this order:
//!
//! 1. *Desynchronized.* Members of a group have another operation, size or type at the same number of an unfinished collective: those in the
//!    minority are named, or all if there is none.
//! 2. *Waiting.* A rank whose device has begun a call waits for all members that have not: their host has not made the call, or their
//!    device has not come to it. Sends wait for receives, in pairs.
//! 3. A rank that others wait for and that waits for nobody is the cause: its *host* has stopped if it has nothing unfinished, otherwise
//!    its *device*. It has *no file* if its process has ended. If all wait for each other, the *order* of their calls differs.
//! 4. All others are victims.
//!
//! Where no file tells which calls a device has begun, the first unfinished call of a rank counts as begun. Gloo's files never do, and they
//! have no sends and receives.

pub(crate) mod dump;
pub(crate) mod pickle;
mod waits;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use paceline_files::{Printable, printable};
use serde::Serialize;

use crate::TraceError;
use crate::read::{MAX_RANKS, on_all_cores};
use dump::Dump;

/// Why a rank holds up the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Cause {
    /// Its call differs from that of its peers.
    #[serde(rename = "desynchronized")]
    Desynchronized,
    /// Its program has not made the call: a lock, an exception, a loader.
    #[serde(rename = "host")]
    Host,
    /// Its device has not come to the call, or does not end it.
    #[serde(rename = "device")]
    Device,
    /// Others wait for it, and it has written nothing.
    #[serde(rename = "no file")]
    NoFile,
    /// It waits for ranks that wait for it.
    #[serde(rename = "order")]
    Order,
    /// All members have begun a call, and none ends it: the network, or the library.
    #[serde(rename = "network")]
    Network,
}

/// A rank that others wait for.
#[derive(Clone, Debug, Serialize)]
pub struct Culprit {
    /// The rank.
    pub rank: usize,
    /// Why it holds up the others.
    pub cause: Cause,
    /// The name of the group in which they wait for it.
    pub group: String,
    /// The call that it has not made, not begun, or made in another way, as in `all_reduce #37`.
    pub call: String,
    /// The line of the program from which its peers made that call.
    pub line: Option<String>,
    /// Its own call where that differs: operation, type and shape.
    pub own: Option<String>,
    /// The same of its peers.
    pub theirs: Option<String>,
    /// When it last made, began or ended a call, in nanoseconds since 1970.
    pub last_ns: Option<i64>,
    /// The ranks that wait for it directly.
    pub peers: BTreeSet<usize>,
}

/// A rank that only waits.
#[derive(Clone, Debug, Serialize)]
pub struct Victim {
    /// The rank.
    pub rank: usize,
    /// The call that it waits in.
    pub call: String,
    /// The name of the call's group.
    pub group: String,
    /// The ranks that it waits for.
    pub waits_for: BTreeSet<usize>,
}

/// The ranks of a job that hangs.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Hang {
    /// The number of files.
    pub files: usize,
    /// The ranks that are members of groups and have no file.
    pub missing: Vec<usize>,
    /// The ranks that hold up the others.
    pub culprits: Vec<Culprit>,
    /// All others that wait.
    pub victims: Vec<Victim>,
}

/// The beginning of the names that PyTorch chooses.
const BY_DEFAULT: &str = "nccl_trace_rank_";

/// Reads all files of a folder whose names end with the number of a rank, such as `nccl_trace_rank_12` or `trace_dump_3.json`, on all cores. If
/// their names begin in several ways, those that PyTorch chooses are meant.
///
/// # Errors
///
/// If there are none, two of one rank, other names in several ways, or a file that is no file of the flight recorder.
pub fn read(folder: &Path) -> Result<Hang, TraceError> {
    let io = |source| TraceError::Io { path: folder.to_owned(), source };
    let unfit =
        |reason: String| Err(TraceError::Unfit(format!("{}: {reason}", folder.printable())));
    let mut by_name: BTreeMap<String, Vec<(usize, PathBuf)>> = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let path = entry.path();
        if let Some((name, rank)) = rank_of(&path)
            && !entry.file_type().is_ok_and(|of| of.is_dir())
        {
            by_name.entry(name).or_default().push((rank, path));
        }
    }
    let mut files = match (by_name.remove(BY_DEFAULT), by_name.pop_first()) {
        (Some(files), _) => files,
        (None, Some((_, files))) if by_name.is_empty() => files,
        (None, Some((name, _))) => {
            let other = by_name.keys().next().map_or("", String::as_str);
            return unfit(format!(
                "files of {} and of {} may be of several jobs; put those of one job into a folder",
                printable(&name),
                printable(other)
            ));
        }
        (None, None) => {
            return unfit(format!(
                "no files of PyTorch's flight recorder, whose names end with the number of a rank, as in {BY_DEFAULT}12; PyTorch \
                 writes them to the path in TORCH_NCCL_DEBUG_INFO_TEMP_FILE, by default /tmp/{BY_DEFAULT}"
            ));
        }
    };
    files.sort();
    if let Some([a, b]) = files.array_windows::<2>().find(|[a, b]| a.0 == b.0) {
        let [first, second] = [&a.1, &b.1].map(|path| path.printable());
        return unfit(format!("two files of rank {}: {first} and {second}", a.0));
    }
    let dumps = on_all_cores(&files, |(_, (rank, path)): (usize, &(usize, PathBuf))| {
        Dump::read(path, *rank)
    });
    Ok(waits::explain(&dumps.into_iter().collect::<Result<Vec<_>, _>>()?))
}

/// The rank at the end of a file's name, before any ending, and the name before it.
fn rank_of(path: &Path) -> Option<(String, usize)> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(".json").or_else(|| name.strip_suffix(".pkl")).unwrap_or(name);
    let (name, rank) = stem.split_at(stem.trim_end_matches(|c: char| c.is_ascii_digit()).len());
    let rank = rank.parse().ok().filter(|rank| *rank < MAX_RANKS)?;
    Some((name.to_owned(), rank))
}
