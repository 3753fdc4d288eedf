//! Which file is whose: the traces of a folder, or of a list of files, by rank and profiling window.
//!
//! The layout is `profile/<choice>/rank_<r>/worker_<r>.<time>.pt.trace.json.gz`, which PyTorch's handler for
//! TensorBoard writes too; a rank that profiled several times has several files, which are told apart by the time
//! in their names. Runs leave their traces in the same folder; those that say of which run they are, as ours do,
//! never share a window with another's. It looks into the files only for what they say of their run.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Header, ReadError, header};

/// No run has as many ranks; a larger number in a file or path is not believed.
pub(super) const MAX_RANKS: usize = 1 << 20;

/// How deep folders are searched, so that a loop in the file system ends.
const MAX_FOLDERS: usize = 16;

/// Which profiling windows are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    /// The newest trace of each rank, of the run that left the newest.
    Latest,
    /// All windows: the first trace of each rank, the second of each rank, ...
    All,
}

/// A trace whose rank is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceFile {
    /// Where it is.
    pub path: PathBuf,
    /// From `distributedInfo`, else from the path.
    pub rank: usize,
    /// From `distributedInfo`.
    pub world_size: Option<usize>,
    /// From `distributedInfo`.
    pub backend: Option<String>,
    /// See [`Header::run_id`].
    pub run_id: Option<String>,
    /// The time in its name, as written there.
    pub stamp: Option<String>,
}

/// Traces that belong together, at most one of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its number, from 0; also [`Select::Latest`] gives the number 0.
    pub idx: usize,
    /// The time in the name of the file of the lowest rank.
    pub stamp: Option<String>,
    /// In order of rank; never empty.
    pub files: Vec<TraceFile>,
    /// Ranks of which there is no file, though some file says that they took part.
    pub missing: Vec<usize>,
    /// What does not fit together, in whole sentences: ranks beyond the number of ranks, or other ones than the
    /// paths say.
    pub doubts: Vec<String>,
}

/// Finds the traces at `places`: folders are searched for files that end in `.pt.trace.json` or
/// `.pt.trace.json.gz`; files are taken whatever their names. Where a file is given, all form one window.
pub fn find(places: &[PathBuf], select: Select) -> Result<Vec<Window>, ReadError> {
    let (mut paths, mut are_named) = (Vec::new(), false);
    for place in places {
        let meta =
            fs::metadata(place).map_err(|source| ReadError::Io { path: place.clone(), source })?;
        if meta.is_dir() {
            let before = paths.len();
            search(place, MAX_FOLDERS, &mut paths)?;
            if paths.len() == before {
                return Err(ReadError::NoFiles { place: place.clone() });
            }
        } else {
            are_named = true;
            paths.push(place.clone());
        }
    }
    if paths.is_empty() {
        return Err(ReadError::NoFiles { place: PathBuf::from(".") });
    }
    paths.sort();
    paths.dedup();
    let mut ranks: BTreeMap<usize, Vec<TraceFile>> = BTreeMap::new();
    for path in paths {
        let file = identify(path)?;
        ranks.entry(file.rank).or_default().push(file);
    }
    for (&rank, files) in &mut ranks {
        files.sort_by(|a, b| order(a).cmp(&order(b)));
        tell_apart(rank, files, are_named)?;
    }
    let groups = by_run(ranks);
    let mut windows = match select {
        Select::Latest => {
            groups.into_iter().map(latest).max_by(order_of_windows).into_iter().collect()
        }
        Select::All => groups.into_iter().flat_map(all).collect::<Vec<_>>(),
    };
    windows.sort_by(order_of_windows);
    for (idx, window) in windows.iter_mut().enumerate() {
        window.idx = idx;
    }
    Ok(windows)
}

/// The files of each rank, in order of time.
type Ranks = BTreeMap<usize, Vec<TraceFile>>;

/// Runs may have left their traces in one folder, and share no window. Files that do not say of which run they are
/// are told apart by how many ranks there were; one that does not say this either belongs to the largest.
fn by_run(ranks: Ranks) -> Vec<Ranks> {
    let largest = ranks.values().flatten().filter_map(|file| file.world_size).max();
    let mut groups: BTreeMap<(Option<usize>, Option<String>), Ranks> = BTreeMap::new();
    for file in ranks.into_values().flatten() {
        let key = (file.world_size.or(largest), file.run_id.clone());
        groups.entry(key).or_default().entry(file.rank).or_default().push(file);
    }
    groups.into_values().collect()
}

fn latest(ranks: Ranks) -> Window {
    window(ranks.into_values().filter_map(|mut files| files.pop()).collect())
}

fn all(ranks: Ranks) -> Vec<Window> {
    let count = ranks.values().map(Vec::len).max().unwrap_or(0);
    let of = |idx| window(ranks.values().filter_map(|files| files.get(idx).cloned()).collect());
    (0..count).map(of).collect()
}

/// By the newest file of each.
fn order_of_windows(a: &Window, b: &Window) -> Ordering {
    a.files.iter().map(order).max().cmp(&b.files.iter().map(order).max())
}

/// The rank that a path gives: the nearest folder `rank_<n>`, else a file name that begins with `worker_<n>.` or
/// `rank_<n>.`.
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

const SUFFIXES: [&str; 2] = [".pt.trace.json", ".pt.trace.json.gz"];

/// Collects the traces of a folder and of those within.
fn search(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), ReadError> {
    let io = |source| ReadError::Io { path: folder.to_owned(), source };
    for entry in fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let path = entry.path();
        // Links to folders are not followed; links to files are.
        if entry.file_type().map_err(io)?.is_dir() {
            if depth > 0 {
                search(&path, depth - 1, found)?;
            }
        } else if SUFFIXES
            .iter()
            .any(|suffix| entry.file_name().to_string_lossy().ends_with(suffix))
        {
            found.push(path);
        }
    }
    Ok(())
}

fn identify(path: PathBuf) -> Result<TraceFile, ReadError> {
    let Header { rank, world_size, backend, run_id, absurd } = header(&path)?;
    if let Some(claim) = absurd {
        return Err(ReadError::Absurd { path, claim });
    }
    let Some(rank) = rank.or_else(|| rank_of_path(&path)) else {
        return Err(ReadError::NoRank { path });
    };
    let stamp = stamp_of(&path);
    Ok(TraceFile { path, rank, world_size, backend, run_id, stamp })
}

/// The time in a name: what stands between the last two dots before `.pt.trace.json`.
fn stamp_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix))?;
    let (_, stamp) = stem.rsplit_once('.')?;
    Some(stamp.to_owned())
}

type Order<'a> = (Option<(usize, &'a str)>, &'a Path);

/// Earlier files first. Times that are numbers may differ in length; others sort as text, which is right for
/// `20260131T235959`.
fn order(file: &TraceFile) -> Order<'_> {
    let time = file.stamp.as_deref().map(|stamp| {
        let is_number = stamp.bytes().all(|b| b.is_ascii_digit());
        (if is_number { stamp.len() } else { usize::MAX }, stamp)
    });
    (time, &file.path)
}

/// Several files of a rank are its windows only if they lie in one folder and have different times.
fn tell_apart(rank: usize, files: &[TraceFile], are_named: bool) -> Result<(), ReadError> {
    for pair in files.windows(2) {
        let [first, second] = [&pair[0], &pair[1]].map(|file| file.path.clone());
        if are_named || (pair[0].stamp == pair[1].stamp && first.parent() == second.parent()) {
            return Err(ReadError::TwoOfOneRank { rank, first, second });
        }
        if first.parent() != second.parent() {
            let folder = |path: &Path| path.parent().unwrap_or(path).to_owned();
            let (first, second) = (folder(&first), folder(&second));
            return Err(ReadError::SeveralRuns { rank, first, second });
        }
    }
    Ok(())
}

/// The window of files in order of rank.
fn window(files: Vec<TraceFile>) -> Window {
    let world_size = files.iter().filter_map(|file| file.world_size).max().unwrap_or(0);
    let is_here = |rank: &usize| files.binary_search_by_key(rank, |file| file.rank).is_ok();
    let missing = (0..world_size).filter(|rank| !is_here(rank)).collect();
    let stamp = files.first().and_then(|file| file.stamp.clone());
    let doubts = files.iter().flat_map(doubts).collect();
    Window { idx: 0, stamp, files, missing, doubts }
}

/// What a file says of its rank that cannot be, or that its path denies.
fn doubts(file: &TraceFile) -> Vec<String> {
    let TraceFile { path, rank, world_size, .. } = file;
    let beyond = world_size.filter(|world_size| rank >= world_size).map(|world_size| {
        format!("{} claims to be of rank {rank} in a world of {world_size}.", path.display())
    });
    let other = rank_of_path(path).filter(|of_path| of_path != rank).map(|of_path| {
        format!(
            "{} is of rank {rank} by what it says, and of rank {of_path} by its path.",
            path.display()
        )
    });
    beyond.into_iter().chain(other).collect()
}
