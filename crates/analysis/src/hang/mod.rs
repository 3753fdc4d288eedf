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

mod dump;
mod pickle;
mod waits;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use paceline_files::Printable;
use serde::Serialize;

use crate::TraceError;
use crate::read::on_all_cores;
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

/// Reads all files of a folder whose names end with the number of a rank, such as `nccl_trace_rank_12` or `trace_dump_3.json`, on all cores.
///
/// # Errors
///
/// If there are none, two of one rank, or one that is no file of the flight recorder.
pub fn read(folder: &Path) -> Result<Hang, TraceError> {
    let io = |source| TraceError::Io { path: folder.to_owned(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        files.extend(rank_of(&path).map(|rank| (rank, path)));
    }
    files.sort();
    let unfit =
        |reason: String| Err(TraceError::Unfit(format!("{}: {reason}", folder.printable())));
    if let Some([a, b]) = files.array_windows::<2>().find(|[a, b]| a.0 == b.0) {
        return unfit(format!(
            "two files of rank {}: {} and {}",
            a.0,
            a.1.printable(),
            b.1.printable()
        ));
    }
    if files.is_empty() {
        return unfit(
            "no files of PyTorch's flight recorder, whose names end with the number of a rank, as in nccl_trace_rank_12; PyTorch \
             writes them to the path in TORCH_NCCL_DEBUG_INFO_TEMP_FILE, by default /tmp/nccl_trace_rank_"
                .to_owned(),
        );
    }
    let dumps = on_all_cores(&files, |(_, (rank, path)): (usize, &(usize, PathBuf))| {
        Dump::read(path, *rank)
    });
    Ok(waits::explain(&dumps.into_iter().collect::<Result<Vec<_>, _>>()?))
}

/// The number at the end of a file's name, before any ending.
fn rank_of(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(".json").or_else(|| name.strip_suffix(".pkl")).unwrap_or(name);
    let begin = stem.rfind(|c: char| !c.is_ascii_digit())? + 1;
    stem[begin..].parse().ok()
}
