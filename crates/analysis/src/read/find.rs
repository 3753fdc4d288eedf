//! Finds the traces in folders or lists of files, and groups them by rank and profiling window.
//!
//! The layout is `profile/<choice>/rank_<r>/worker_<r>.<time>.pt.trace.json.gz`, which PyTorch's handler for
//! TensorBoard writes too; files of other names are traces if they hold events. A rank that was profiled several times has several files, which differ by the time
//! in their names. Several runs may leave their traces in the same folder. Traces that give the id of their
//! run, as those of paceline do, never share a window with traces of another run. This module reads only the
//! facts about the run from each file, and whether the last of several traces of a rank has work.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use paceline_files::Printable;

use super::file::{header, is_trace, on_all_cores};
use super::foreign;
use super::names::{ENDINGS, PROFILERS, rank_of_path, stamp_of};
use super::top::Header;
use super::work::has_work;
use crate::TraceError;
use crate::timeline::Timeline;

/// How deep folders are searched. The limit ends the search if the file system has a loop.
const MAX_FOLDERS: usize = 16;
/// How many files of a folder without traces are looked at for what they are.
const MAX_OTHERS: usize = 100;

/// The profiling windows to return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    /// The newest trace of each rank that has steps with work. If there are several runs, only the run with the
    /// newest trace.
    Latest,
    /// All windows with work: the first trace of each rank, the second of each rank, ...
    All,
}

/// A trace whose rank is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceFile {
    /// The path of the file.
    pub path: PathBuf,
    /// From `distributedInfo`, or from the path if that is missing. 0 if neither names it and all traces come from one process.
    pub rank: usize,
    /// From `distributedInfo`.
    pub world_size: Option<usize>,
    /// The id of its run, see [`Header::run_id`].
    pub run_id: Option<String>,
    /// The time in the file name, as written there. `None` if the name has none.
    pub stamp: Option<String>,
}

/// Traces that belong together, at most one of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The time in the file name of the lowest rank.
    pub stamp: Option<String>,
    /// In order of rank; never empty.
    pub files: Vec<TraceFile>,
    /// Ranks without a file, although some file says that they took part.
    pub missing: Vec<usize>,
    /// Contradictions, in whole sentences: a rank that is not below the number of ranks, or that differs from
    /// the rank in the path.
    pub doubts: Vec<String>,
    /// Later traces that are not in the window, because their steps have no work. PyTorch's profiler writes them if
    /// the program ends when a schedule without `repeat` has begun another cycle.
    pub left_out: Vec<PathBuf>,
}

/// Finds the traces at `places`. Folders are searched for files that end in `.pt.trace.json` or `.pt.trace.json.gz`. If a
/// folder has none, its traces are all files that end in `.json` or `.json.gz` and hold events. A place that is a file may
/// have any name. If one of the places is a file, several traces of one rank are an error.
pub fn find(places: &[PathBuf], select: Select) -> Result<Vec<Window>, TraceError> {
    let (mut paths, mut are_named) = (Vec::new(), false);
    for place in places {
        let meta =
            fs::metadata(place).map_err(|source| TraceError::Io { path: place.clone(), source })?;
        if meta.is_dir() {
            let found = in_folder(place)?;
            if found.is_empty() {
                return Err(no_files(place));
            }
            paths.extend(found);
        } else {
            are_named = true;
            paths.push(place.clone());
        }
    }
    if paths.is_empty() {
        return Err(no_files(Path::new(".")));
    }
    paths.sort();
    paths.dedup();
    let mut ranks: BTreeMap<usize, Vec<TraceFile>> = BTreeMap::new();
    for file in with_ranks(paths)? {
        ranks.entry(file.rank).or_default().push(file);
    }
    for (&rank, files) in &mut ranks {
        files.sort_by(|a, b| order(a).cmp(&order(b)));
        tell_apart(rank, files, are_named)?;
    }
    let (mut groups, mut left_out) = (by_run(ranks), Vec::new());
    for ranks in &mut groups {
        left_out.extend(leave_out_empty(ranks)?);
    }
    let mut windows = match select {
        Select::Latest => {
            groups.into_iter().map(latest).max_by(order_of_windows).into_iter().collect()
        }
        Select::All => groups.into_iter().flat_map(all).collect::<Vec<_>>(),
    };
    windows.sort_by(order_of_windows);
    if let Some(last) = windows.last_mut() {
        last.left_out = left_out;
    }
    Ok(windows)
}

fn no_files(place: &Path) -> TraceError {
    let others = fs::read_dir(place).into_iter().flatten().flatten().take(MAX_OTHERS);
    let mut others: Vec<PathBuf> = others.map(|entry| entry.path()).collect();
    others.sort();
    let other = others.iter().filter(|path| path.is_file()).find_map(|path| {
        let what = foreign::of_bytes(path).or_else(|| foreign::of_keys(path))?;
        Some(format!(" {} {what}.", path.printable()))
    });
    TraceError::Unfit(format!(
        "No trace files found. (Looked in {} for files that end in .json or .json.gz and hold \"traceEvents\".){}",
        place.printable(),
        other.unwrap_or_default()
    ))
}

/// Reads the traces of all ranks with [`open`](super::open) or [`open_beginning`](super::open_beginning), several at a time.
pub fn open_all(
    files: &[TraceFile],
    open: fn(&Path) -> Result<Timeline, TraceError>,
) -> Result<Vec<Timeline>, TraceError> {
    let ranked = |(_, file): (usize, &TraceFile)| -> Result<Timeline, TraceError> {
        Ok(Timeline { rank: Some(file.rank), ..open(&file.path)? })
    };
    // All are read before the first error is returned, so that it is always the same one.
    on_all_cores(files, ranked).into_iter().collect()
}

/// Removes the last traces of each rank whose steps have no work, if an earlier trace of the rank has some. Returns them.
fn leave_out_empty(ranks: &mut Ranks) -> Result<Vec<PathBuf>, TraceError> {
    let mut left_out = Vec::new();
    for files in ranks.values_mut() {
        let mut num_kept = files.len();
        while num_kept > 1 && !has_work(&files[num_kept - 1].path)? {
            num_kept -= 1;
        }
        if num_kept > 1 || num_kept < files.len() && has_work(&files[0].path)? {
            left_out.extend(files.drain(num_kept..).map(|file| file.path));
        }
    }
    Ok(left_out)
}

/// The files of each rank, in order of time.
type Ranks = BTreeMap<usize, Vec<TraceFile>>;

/// Separates the runs that left their traces in one folder, because runs never share a window. Files without
/// a run id are separated by the number of ranks. A file that does not give this number belongs to the
/// largest run.
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

/// The order of windows, by their newest file.
fn order_of_windows(a: &Window, b: &Window) -> Ordering {
    a.files.iter().map(order).max().cmp(&b.files.iter().map(order).max())
}

/// The traces of a folder and its subfolders.
fn in_folder(folder: &Path) -> Result<Vec<PathBuf>, TraceError> {
    let mut all = Vec::new();
    search(folder, MAX_FOLDERS, &mut all)?;
    let ends = |path: &PathBuf, endings: [&str; 2]| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        endings.iter().any(|ending| name.ends_with(ending))
    };
    if all.iter().any(|path| ends(path, PROFILERS)) {
        all.retain(|path| ends(path, PROFILERS));
        return Ok(all);
    }
    let mut traces = Vec::new();
    for path in all {
        if is_trace(&path)? {
            traces.push(path);
        }
    }
    Ok(traces)
}

/// Collects the files of a folder and its subfolders that may be traces.
fn search(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), TraceError> {
    let io = |source| TraceError::Io { path: folder.to_owned(), source };
    for entry in fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let path = entry.path();
        // Links to folders are not followed; links to files are.
        if entry.file_type().map_err(io)?.is_dir() {
            if depth > 0 {
                search(&path, depth - 1, found)?;
            }
        } else if path.is_file()
            && ENDINGS.iter().any(|suffix| entry.file_name().to_string_lossy().ends_with(suffix))
        {
            found.push(path);
        }
    }
    Ok(())
}

/// The traces, with the facts that they give about themselves. The trace of a program without ranks, alone or with earlier ones of the same
/// process, is of rank 0.
fn with_ranks(paths: Vec<PathBuf>) -> Result<Vec<TraceFile>, TraceError> {
    let mut files = Vec::new();
    let mut nobody = None;
    for path in paths {
        let Header { rank, world_size, run_id, absurd, is_merged, .. } = header(&path)?;
        if is_merged {
            return Err(TraceError::Unfit(format!(
                "{} has the traces of several ranks, merged for viewers by paceline trace merge; pass the folder of the \
                 ranks' own files, without this one",
                path.printable()
            )));
        }
        if let Some(claim) = absurd {
            return Err(TraceError::Unfit(format!(
                "{} claims {claim}, which no run can have; correct its \"distributedInfo\", or leave the file out",
                path.printable()
            )));
        }
        let rank = rank.or_else(|| rank_of_path(&path));
        if rank.is_none() {
            nobody.get_or_insert_with(|| path.clone());
        }
        let (rank, stamp) = (rank.unwrap_or(0), stamp_of(&path));
        files.push(TraceFile { path, rank, world_size, run_id, stamp });
    }
    let is_alone = || {
        // The handler of PyTorch's profiler names files by host and process, and then by the time.
        let process = |file: &TraceFile| {
            let name = file.path.to_str()?;
            Some(name.rsplit_once(file.stamp.as_deref()?)?.0.to_owned())
        };
        files
            .windows(2)
            .all(|pair| process(&pair[0]).is_some_and(|of| process(&pair[1]) == Some(of)))
    };
    match nobody {
        Some(path) if !is_alone() => Err(TraceError::Unfit(format!(
            "{} does not say which rank it is of: it has no \"distributedInfo\" with a \"rank\", and its path has \
             neither a folder rank_<n> nor a name that begins with worker_<n>. (only a trace that is alone needs neither)",
            path.printable()
        ))),
        _ => Ok(files),
    }
}

type Order<'a> = (Option<(usize, &'a str)>, &'a Path);

/// Sorts earlier files first. Times that are numbers may differ in length. Other times sort as text, which is
/// right for `20260131T235959`.
fn order(file: &TraceFile) -> Order<'_> {
    let time = file.stamp.as_deref().map(|stamp| {
        let is_number = stamp.bytes().all(|b| b.is_ascii_digit());
        (if is_number { stamp.len() } else { usize::MAX }, stamp)
    });
    (time, &file.path)
}

/// Checks that several files of a rank can be windows of one run: they must be in one folder and have
/// different times.
fn tell_apart(rank: usize, files: &[TraceFile], are_named: bool) -> Result<(), TraceError> {
    for pair in files.windows(2) {
        let [first, second] = [&pair[0], &pair[1]].map(|file| file.path.as_path());
        let [of_first, of_second] = [first, second].map(|path| path.parent().unwrap_or(path));
        if are_named || (pair[0].stamp == pair[1].stamp && of_first == of_second) {
            return Err(TraceError::Unfit(format!(
                "{} and {} are both of rank {rank}, in the same profiling window; give one of them",
                first.printable(),
                second.printable()
            )));
        }
        if of_first != of_second {
            return Err(TraceError::Unfit(format!(
                "there are traces of rank {rank} in {} and in {}, which look like two runs; name the folder of one",
                of_first.printable(),
                of_second.printable()
            )));
        }
    }
    Ok(())
}

/// The window of these files, which must be in order of ranks.
fn window(files: Vec<TraceFile>) -> Window {
    let world_size = files.iter().filter_map(|file| file.world_size).max().unwrap_or(0);
    let is_here = |rank: &usize| files.binary_search_by_key(rank, |file| file.rank).is_ok();
    let missing = (0..world_size).filter(|rank| !is_here(rank)).collect();
    let stamp = files.first().and_then(|file| file.stamp.clone());
    let doubts = files.iter().flat_map(doubts).collect();
    Window { stamp, files, missing, doubts, left_out: Vec::new() }
}

/// The facts about the rank in a file that are impossible, or that contradict its path.
fn doubts(file: &TraceFile) -> Vec<String> {
    let TraceFile { path, rank, world_size, .. } = file;
    let beyond = world_size.filter(|world_size| rank >= world_size).map(|world_size| {
        format!("{} claims to be of rank {rank} in a world of {world_size}.", path.printable())
    });
    let other = rank_of_path(path).filter(|of_path| of_path != rank).map(|of_path| {
        format!(
            "{} is of rank {rank} by what it says, and of rank {of_path} by its path.",
            path.printable()
        )
    });
    beyond.into_iter().chain(other).collect()
}
