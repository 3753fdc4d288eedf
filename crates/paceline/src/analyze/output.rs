//! Where a report goes: beside the traces, in a tree of its own.

use std::path::{Component, Path, PathBuf};

use paceline_analysis::hta::Kind;
use paceline_analysis::read::Window;

/// The folder of the report of the traces in `folder`: its part that begins with `profile`, as
/// `profile` or `profile_runpod`, becomes `reports` or `reports_sharding`. Where no part does, the first
/// one is replaced if there are several, and otherwise the folder's name is put below. Nothing is written
/// outside of the current folder, unless the traces lie in a folder of profiles elsewhere.
pub(super) fn root(folder: &Path, kind: Kind) -> PathBuf {
    let root = match kind {
        Kind::Ddp => "reports",
        Kind::Sharding => "reports_sharding",
    };
    let parts: Vec<Component<'_>> =
        folder.components().filter(|part| *part != Component::CurDir).collect();
    let is_profile = |part: &Component<'_>| match part {
        Component::Normal(name) => name.to_string_lossy().starts_with("profile"),
        _ => false,
    };
    if let Some(at) = parts.iter().position(is_profile) {
        let (above, below) = (&parts[..at], &parts[at + 1..]);
        return above
            .iter()
            .collect::<PathBuf>()
            .join(root)
            .join(below.iter().collect::<PathBuf>());
    }
    let is_plain = parts.iter().all(|part| matches!(part, Component::Normal(_)));
    match parts.as_slice() {
        [_, below @ ..] if is_plain && !below.is_empty() => {
            Path::new(root).join(below.iter().collect::<PathBuf>())
        }
        [.., Component::Normal(name)] => Path::new(root).join(name),
        _ => root.into(),
    }
}

/// The folder of one of several windows.
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
            ("/data/profile/ddp", "/data/reports/ddp"),
            ("../profile/ddp", "../reports/ddp"),
            ("traces/a/b", "reports/a/b"),
            ("traces", "reports/traces"),
            ("/data/traces", "reports/traces"),
            ("../traces", "reports/traces"),
            (".", "reports"),
            ("", "reports"),
            ("..", "reports"),
            ("/", "reports"),
        ];
        for (folder, expected) in all {
            assert_eq!(root(Path::new(folder), Kind::Ddp), Path::new(expected), "{folder}");
        }
        let sharding = root(Path::new("profile_runpod/pytorch_zero3"), Kind::Sharding);
        assert_eq!(sharding, Path::new("reports_sharding/pytorch_zero3"));
    }

    #[test]
    fn windows_have_folders_of_their_own() {
        let window = |idx, stamp: Option<&str>| Window {
            idx,
            stamp: stamp.map(str::to_owned),
            files: Vec::new(),
            missing: Vec::new(),
            doubts: Vec::new(),
        };
        assert_eq!(of_window(&window(0, Some("1700"))), "run_0_1700");
        assert_eq!(of_window(&window(3, None)), "run_3");
    }
}
