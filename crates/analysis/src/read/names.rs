//! The names of trace files: the rank, the host and the time in them.
//!
//! A path goes in. This file reads no files.

use std::path::Path;

/// An upper limit for the number of ranks. A larger number in a file or path is considered wrong.
pub(crate) const MAX_RANKS: usize = 1 << 20;

/// The rank that a path names: in the nearest folder `rank_<n>`, otherwise in a file name that begins with
/// `worker_<n>.` or `rank_<n>.`.
pub(super) fn rank_of_path(path: &Path) -> Option<usize> {
    let number = |digits: &str| {
        let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse().ok().filter(|&rank| is_number && rank < MAX_RANKS)
    };
    let of_folder = |folder: &Path| number(folder.file_name()?.to_str()?.strip_prefix("rank_")?);
    path.ancestors().skip(1).find_map(of_folder).or_else(|| {
        let name = path.file_name()?.to_str()?;
        let rest = name.strip_prefix("worker_").or_else(|| name.strip_prefix("rank_"))?;
        number(rest.split_once('.')?.0)
    })
}

/// The host in a file name, as PyTorch's handler for TensorBoard makes it: `HOST_PID.TIME.pt.trace.json`. `worker_<n>` and `rank_<n>` name a rank,
/// not a host.
pub(super) fn host_of_path(path: &Path) -> Option<String> {
    let stem = stem(path)?;
    let name = stamp_of(path).and_then(|stamp| stem.strip_suffix(&stamp)?.strip_suffix('.'))?;
    let (host, pid) = name.rsplit_once('_')?;
    let is_pid = !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit());
    (is_pid && !host.is_empty() && !["worker", "rank"].contains(&host)).then(|| host.to_owned())
}

/// The endings of the names that profilers give to traces.
pub(super) const PROFILERS: [&str; 2] = [".pt.trace.json", ".pt.trace.json.gz"];
/// The endings of the names of all traces in folders.
pub(super) const ENDINGS: [&str; 2] = [".json", ".json.gz"];

/// The name of a trace without the ending that all names of traces have.
pub fn stem(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    PROFILERS.iter().chain(&ENDINGS).find_map(|ending| name.strip_suffix(ending))
}

/// The time in a file name: the text after the last dot before the ending, if it looks like one.
pub(super) fn stamp_of(path: &Path) -> Option<String> {
    let (_, stamp) = stem(path)?.rsplit_once('.')?;
    let is_time = stamp.starts_with(|c: char| c.is_ascii_digit())
        && stamp.chars().all(|c| c.is_ascii_digit() || "TZ-_:+".contains(c));
    is_time.then(|| stamp.to_owned())
}
