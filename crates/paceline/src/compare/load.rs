//! What the folder of a run says of it, and the traces that it has written.

use std::path::{Path, PathBuf};

use paceline_analysis::hta::{self, Analysis, Options};
use paceline_analysis::read;
use serde::Deserialize;
use serde_json::Value;

use crate::sweep::execute::RunSummary;
use crate::{Failure, Result};

/// A run that was made.
#[derive(Debug)]
pub(super) struct Run {
    /// The name of its folder.
    pub name: String,
    pub model: String,
    pub batch_size: u64,
    pub accuracy: Option<f64>,
    /// Wall-clock time of the whole run; earlier versions did not write it.
    pub total_s: Option<f64>,
    /// Exposed communication as a part of the step.
    pub comm_overhead_pctg: Option<f64>,
    pub summary: RunSummary,
    /// What its traces say, if it was profiled and all of them can be read.
    pub traced: Option<Analysis>,
    /// Why its traces say nothing, although it was profiled: each trace at fault by name.
    pub untraced: Vec<String>,
}

/// The run folders among `places`, and those within folders that are none.
pub(super) fn folders(places: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let is_run = |folder: &Path| folder.join("summary.json").is_file();
    let mut all = Vec::new();
    for place in places {
        if is_run(place) {
            all.push(place.clone());
            continue;
        }
        let unreadable = |reason: &str| {
            Failure::Run(format!(
                "{}: {reason}; pass the folder of a finished run, such as runs/<time>-<model>-<strategy>",
                place.display()
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

/// Reads a run.
pub(super) fn run(folder: &Path) -> Result<Run> {
    let file = folder.join("summary.json");
    let unreadable = |e: &dyn std::fmt::Display| Failure::io(file.display(), e);
    let text = std::fs::read_to_string(&file).map_err(|e| unreadable(&e))?;
    let whole: Value = serde_json::from_str(&text).map_err(|e| unreadable(&e))?;
    let summary = RunSummary::deserialize(&whole).map_err(|e| unreadable(&e))?;
    let number = |key: &str| whole.get(key).and_then(Value::as_f64);
    let name = folder
        .file_name()
        .map_or_else(|| folder.display().to_string(), |name| name.to_string_lossy().into_owned());
    let (traced, untraced) = match traced(folder, &whole) {
        Ok(traced) => (traced, Vec::new()),
        Err(reasons) => (None, reasons),
    };
    Ok(Run {
        name,
        model: whole.get("model").and_then(Value::as_str).unwrap_or("?").to_owned(),
        batch_size: whole.get("batch_size").and_then(Value::as_u64).unwrap_or(0),
        accuracy: number("eval_accuracy").or_else(|| number("accuracy")),
        total_s: number("total_s"),
        comm_overhead_pctg: number("comm_overhead_pct"),
        traced,
        untraced,
        summary,
    })
}

/// The analysis of the traces that the run's summary names, if it names some. A mean without one of
/// the ranks would be compared with means of all, so all traces have to be good; else this says of each
/// that is not what is wrong with it.
fn traced(folder: &Path, summary: &Value) -> std::result::Result<Option<Analysis>, Vec<String>> {
    let named = summary.get("traces").and_then(Value::as_array).into_iter().flatten();
    let (mut timelines, mut reasons) = (Vec::new(), Vec::new());
    for named in named {
        let words = named.as_str().map_or_else(|| named.to_string(), str::to_owned);
        match find(folder, Path::new(&words)) {
            None => reasons.push(format!("{words} is not there")),
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

/// A file that a run has named from the folder in which it was started, which is one of those above the run
/// folder, or this one.
fn find(folder: &Path, named: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(folder).ok()?;
    let above = absolute.ancestors().skip(1).map(|above| above.join(named));
    above.chain([named.to_owned()]).find(|file| file.is_file())
}
