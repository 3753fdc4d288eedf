//! Where a report is written: into a tree of reports in the current folder, next to the tree of traces.
//!
//! Two places may lead to the same folder, because the first part of a path is replaced. A report names its traces, so
//! a folder that has the report of other traces keeps it, and the next name is taken.

use std::path::{Component, Path, PathBuf};

use paceline_analysis::hta::Kind;
use paceline_analysis::read::{self, Window};
use serde_json::Value;

/// The most bytes of a report that is looked at.
const LIMIT_BYTES: u64 = 1 << 30;

/// The folder by whose name the report of the traces at these places is called, and a name below it if they are files.
pub(super) fn named_after(places: &[PathBuf]) -> (PathBuf, Option<String>) {
    let Some(first) = places.first() else { return (PathBuf::new(), None) };
    if first.is_dir() {
        return (first.clone(), None);
    }
    let folder = first.parent().unwrap_or(Path::new(""));
    let is_of_rank =
        folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("rank_"));
    let folder = if is_of_rank { folder.parent().unwrap_or(folder) } else { folder };
    (folder.to_owned(), Some(file_name(first, places.len() - 1)))
}

/// The name of a trace that is a file, with `others` others.
fn file_name(file: &Path, others: usize) -> String {
    let stem = read::stem(file).map_or_else(|| file.display().to_string(), str::to_owned);
    // A name such as `..json` must not lead to another folder.
    let stem = if stem.trim_matches('.').is_empty() { "trace" } else { &stem };
    if others == 0 { stem.to_owned() } else { format!("{stem}-and-{others}-more") }
}

/// The name of the run at a place, for the difference of two.
pub(super) fn run_name(place: &Path) -> String {
    match named_after(&[place.to_owned()]) {
        (_, Some(name)) => name,
        (folder, None) => {
            folder.file_name().map_or_else(|| "run".to_owned(), |name| name.display().to_string())
        }
    }
}

/// The first of the folders `folder`, `folder-2`, ... whose report `<name>.json`, if it has one, is the one that is to be
/// written, according to its JSON.
pub(super) fn free(folder: PathBuf, name: &str, is_same: impl Fn(&Value) -> bool) -> PathBuf {
    let numbered = |number: u64| match number {
        1 => folder.clone(),
        number => {
            let mut name = folder.file_name().unwrap_or_default().to_owned();
            name.push(format!("-{number}"));
            folder.with_file_name(name)
        }
    };
    let is_free = |folder: &PathBuf| {
        let file = folder.join(format!("{name}.json"));
        let report = || paceline_files::read_text(&file, LIMIT_BYTES).ok();
        let said = || serde_json::from_str(&report()?).ok();
        file.symlink_metadata().is_err() || said().is_some_and(|said| is_same(&said))
    };
    (1..).map(numbered).find(is_free).unwrap_or(folder)
}

/// Whether a report is of the traces at these places: of these files, or of files in these folders.
pub(super) fn is_of(report: &Value, places: &[PathBuf]) -> bool {
    let whole = |path: &Path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        path.canonicalize().unwrap_or(path)
    };
    let places: Vec<PathBuf> = places.iter().map(|place| whole(place)).collect();
    let rows = report["tables"]["files"]["rows"].as_array();
    let files: Vec<PathBuf> = rows
        .into_iter()
        .flatten()
        .filter_map(|row| Some(whole(Path::new(row["file"].as_str()?))))
        .collect();
    // A report of files is of all of them, and one of a folder is not of a file in it alone.
    let are_files = places.iter().all(|place| !place.is_dir());
    let is_here = |file: &PathBuf| places.iter().any(|place| file.starts_with(place));
    let is_whole = !are_files || places.iter().all(|place| files.contains(place));
    !files.is_empty() && files.iter().all(is_here) && is_whole
}

/// The folder for the report of the traces in `folder`. It is the path of the traces as seen from the
/// `current` folder, with `reports` or `reports_sharding` instead of its first part, whatever that is called.
/// If the path leads out of the current folder, only its last part is kept, so that nothing is written
/// outside of the current folder.
pub(super) fn root(folder: &Path, current: &Path, kind: Kind) -> PathBuf {
    let root = Path::new(match kind {
        Kind::Ddp => "reports",
        Kind::Sharding => "reports_sharding",
    });
    let folder = folder.strip_prefix(current).unwrap_or(folder);
    let parts: Vec<Component<'_>> =
        folder.components().filter(|part| *part != Component::CurDir).collect();
    let below = if parts.iter().all(|part| matches!(part, Component::Normal(_))) {
        parts.get(1..).unwrap_or_default()
    } else {
        &parts[parts.len() - 1..]
    };
    let below = below.iter().filter(|part| matches!(part, Component::Normal(_)));
    below.fold(root.to_owned(), |path, part| path.join(part))
}

/// The name of the folder for one of several windows, by its place among them.
pub(super) fn of_window(at: usize, window: &Window) -> String {
    match &window.stamp {
        Some(stamp) => format!("run_{at}_{stamp}"),
        None => format!("run_{at}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_part_is_replaced() {
        let all = [
            ("profile/simple_ddp", "reports/simple_ddp"),
            ("./profile/simple_ddp/", "reports/simple_ddp"),
            ("profile_runpod/pytorch_zero3", "reports/pytorch_zero3"),
            ("profile", "reports"),
            ("traces/a/b", "reports/a/b"),
            ("traces", "reports"),
            ("/here/profile/ddp", "reports/ddp"),
            (".", "reports"),
            ("/here", "reports"),
            ("", "reports"),
        ];
        for (folder, expected) in all {
            let found = root(Path::new(folder), Path::new("/here"), Kind::Ddp);
            assert_eq!(found, Path::new(expected), "{folder}");
        }
        let traces = Path::new("profile_runpod/pytorch_zero3");
        let sharding = root(traces, Path::new("/here"), Kind::Sharding);
        assert_eq!(sharding, Path::new("reports_sharding/pytorch_zero3"));
    }

    #[test]
    fn no_name_of_a_part_leads_elsewhere() {
        let all = [
            ("runs/profiler_old/ddp", "reports/profiler_old/ddp"),
            ("other/profile/ddp", "reports/profile/ddp"),
        ];
        for (folder, expected) in all {
            let found = root(Path::new(folder), Path::new("/here"), Kind::Ddp);
            assert_eq!(found, Path::new(expected), "{folder}");
        }
    }

    #[test]
    fn nothing_is_written_outside_of_the_current_folder() {
        let all = [
            ("/data/profile/ddp", "reports/ddp"),
            ("/profiles/run/ddp", "reports/ddp"),
            ("../profile/ddp", "reports/ddp"),
            ("../traces", "reports/traces"),
            ("profile/..", "reports"),
            ("..", "reports"),
            ("/", "reports"),
        ];
        for (folder, expected) in all {
            let found = root(Path::new(folder), Path::new("/here"), Kind::Ddp);
            assert_eq!(found, Path::new(expected), "{folder}");
        }
    }

    #[test]
    fn files_have_names_below_the_folder_above_their_ranks() {
        let named =
            |files: &[&str]| named_after(&files.iter().map(PathBuf::from).collect::<Vec<_>>());
        let below = |folder: &str, name: &str| (PathBuf::from(folder), Some(name.to_owned()));
        assert_eq!(named(&["profile/ddp/rank_1/a.pt.trace.json"]), below("profile/ddp", "a"));
        assert_eq!(
            named(&["profile/ddp/a.17.json.gz", "b.json"]),
            below("profile/ddp", "a.17-and-1-more")
        );
        assert_eq!(named(&["a.trace"]), below("", "a.trace"));
        assert_eq!(named(&["...json"]), below("", "trace"));
        assert_eq!(run_name(Path::new("x/a.pt.trace.json")), "a");
    }

    #[test]
    fn a_report_of_other_traces_is_kept() {
        let here = tempfile::tempdir().unwrap();
        let folder = here.path().join("reports/ddp");
        let is = |title: &'static str| move |report: &Value| report["title"] == title;
        for (title, expected) in [("a", "ddp"), ("b", "ddp-2"), ("c", "ddp-3"), ("b", "ddp-2")] {
            let found = free(folder.clone(), "summary", is(title));
            assert_eq!(found, folder.with_file_name(expected));
            std::fs::create_dir_all(&found).unwrap();
            let text = serde_json::json!({"title": title}).to_string();
            std::fs::write(found.join("summary.json"), text).unwrap();
        }
        std::fs::write(folder.join("summary.json"), "{").unwrap();
        assert_eq!(free(folder.clone(), "summary", is("a")), folder.with_file_name("ddp-4"));
    }

    #[test]
    fn windows_have_folders_of_their_own() {
        let window = |stamp: Option<&str>| Window {
            stamp: stamp.map(str::to_owned),
            files: Vec::new(),
            missing: Vec::new(),
            doubts: Vec::new(),
            left_out: Vec::new(),
        };
        assert_eq!(of_window(0, &window(Some("1700"))), "run_0_1700");
        assert_eq!(of_window(3, &window(None)), "run_3");
    }
}
