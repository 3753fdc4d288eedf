//! Where a report is written: into a tree of reports in the current folder, next to the tree of traces.

use std::path::{Component, Path, PathBuf};

use paceline_analysis::hta::Kind;
use paceline_analysis::read::Window;

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
    let below = match parts.iter().all(|part| matches!(part, Component::Normal(_))) {
        true => parts.get(1..).unwrap_or_default(),
        false => &parts[parts.len() - 1..],
    };
    let below = below.iter().filter(|part| matches!(part, Component::Normal(_)));
    below.fold(root.to_owned(), |path, part| path.join(part))
}

/// The name of the folder for one of several windows.
pub(super) fn of_window(window: &Window) -> String {
    match &window.stamp {
        Some(stamp) => format!("run_{}_{stamp}", window.idx),
        None => format!("run_{}", window.idx),
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
    fn windows_have_folders_of_their_own() {
        let window = |idx, stamp: Option<&str>| Window {
            idx,
            stamp: stamp.map(str::to_owned),
            files: Vec::new(),
            missing: Vec::new(),
            doubts: Vec::new(),
            left_out: Vec::new(),
        };
        assert_eq!(of_window(&window(0, Some("1700"))), "run_0_1700");
        assert_eq!(of_window(&window(3, None)), "run_3");
    }
}
