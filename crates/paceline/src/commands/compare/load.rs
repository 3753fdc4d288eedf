//! Reads the folder of a run, and the traces that the run has written.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use paceline_analysis::hta::{self, Analysis, Options};
use paceline_analysis::read;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_observe::figures::run_summary::RunSummary;

use super::settings::{self, Settings};

/// The file of a run folder that has the run's settings.
const CONFIG: &str = "config.json";

/// A run that was made.
#[derive(Debug)]
pub(super) struct Run {
    /// The name of its folder, or its path if another run's folder has the same name.
    pub name: String,
    pub summary: RunSummary,
    /// The settings of the run, by name, from its configuration.
    pub settings: Settings,
    /// The flags among them that were stated.
    pub stated: Settings,
    /// The analysis of its traces, if it was profiled and all traces can be read.
    pub traced: Option<Analysis>,
    /// Why there is no analysis although the run was profiled: one reason per bad trace.
    pub untraced: Vec<String>,
}

/// Returns the run folders among `places`, and the run folders inside those `places` that are not run
/// folders themselves. A run that was started has a configuration. It has a summary only if it has
/// finished.
pub(in crate::commands) fn folders(places: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let has = |folder: &Path, file: &str| folder.join(file).is_file();
    let is_run = |folder: &Path| has(folder, "summary.json") || has(folder, CONFIG);
    let mut all = Vec::new();
    for place in places {
        if is_run(place) {
            all.push(place.clone());
            continue;
        }
        let unreadable = |reason: &str| {
            Failure::Usage(format!(
                "{}: {reason}; pass the folder of a finished run, such as runs/<time>-<model>-<strategy>",
                place.printable()
            ))
        };
        if !place.is_dir() {
            return Err(unreadable("there is no such folder"));
        }
        let within = std::fs::read_dir(place)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
            .map_err(|e: std::io::Error| unreadable(&e.to_string()))?;
        let mut within: Vec<PathBuf> = within;
        within.retain(|folder| is_run(folder));
        if within.is_empty() {
            return Err(unreadable("there is no summary.json in it"));
        }
        within.sort();
        all.extend(within);
    }
    Ok(all)
}

/// The names of the folders: the last part of each path, or whole paths if that does not tell them apart.
pub(super) fn names(folders: &[PathBuf]) -> Vec<String> {
    let words = |path: &Path| path.to_string_lossy().into_owned();
    let last = |folder: &PathBuf| folder.file_name().map_or(words(folder), |of| words(of.as_ref()));
    let names: Vec<String> = folders.iter().map(last).collect();
    let is_clear = names.iter().collect::<BTreeSet<_>>().len() == names.len();
    if is_clear { names } else { folders.iter().map(|folder| words(folder)).collect() }
}

/// Reads a run. The error says why the run cannot be compared.
pub(super) fn run(folder: &Path, name: String) -> std::result::Result<Run, String> {
    if !folder.join("summary.json").is_file() {
        return Err("it has not come to its end: there is no summary.json".into());
    }
    let summary = RunSummary::read(&folder.join("summary.json")).map_err(|e| e.to_string())?;
    let (traced, untraced) = match traced(folder, &summary.part::<Vec<String>>("traces")) {
        Ok(traced) => (traced, Vec::new()),
        Err(reasons) => (None, reasons),
    };
    let [settings, stated] = settings::read(&folder.join(CONFIG));
    Ok(Run { name, settings, stated, traced, untraced, summary })
}

/// Analyzes the traces that the run's summary names, if it names any. All of them have to be readable,
/// because a mean over some of the ranks must not be compared with means over all. If not, returns one
/// reason per bad trace.
fn traced(folder: &Path, named: &[String]) -> std::result::Result<Option<Analysis>, Vec<String>> {
    let (mut timelines, mut reasons) = (Vec::new(), Vec::new());
    for named in named {
        match find(folder, Path::new(named)) {
            None => reasons.push(format!("{named} is not there")),
            Some(file) => match read::open(&file) {
                Ok(timeline) => timelines.push(timeline),
                Err(error) => reasons.push(error.to_string()),
            },
        }
    }
    if !reasons.is_empty() {
        return Err(reasons);
    }
    if timelines.is_empty() {
        return Ok(None);
    }
    hta::analyze(&timelines, &Options::default()).map(Some).map_err(|error| vec![error.to_string()])
}

/// Finds a file that a run named relative to the folder in which the run was started. That folder is
/// assumed to be an ancestor of the run folder, or the current folder.
fn find(folder: &Path, named: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(folder).ok()?;
    let above = absolute.ancestors().skip(1).map(|above| above.join(named));
    above.chain([named.to_owned()]).find(|file| file.is_file())
}
