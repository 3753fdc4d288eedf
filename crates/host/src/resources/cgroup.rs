//! The limits on memory of this process's control group and all groups above it; and how often the kernel has killed for lack
//! of memory there.
//!
//! Slurm and `systemd-run` limit a group of the job's own, deep in the tree. Reads versions 2 and 1.

use std::fs;
use std::path::{Path, PathBuf};

/// Version 1 writes a number of about 2^63 if there is no limit.
const NO_LIMIT: u64 = 1 << 60;

/// The names of the files of a version.
#[derive(Clone, Copy)]
struct GroupFiles {
    limit: &'static str,
    used: &'static str,
    /// The line of `memory.stat` about pages of files not touched lately, groups below included.
    given_up: &'static str,
    /// The file with the line `oom_kill`.
    events: &'static str,
}

const VERSION_1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    given_up: "total_inactive_file ",
    events: "memory.oom_control",
};
const VERSION_2: GroupFiles = GroupFiles {
    limit: "memory.max",
    used: "memory.current",
    given_up: "inactive_file ",
    events: "memory.events",
};

/// The groups that limit this process's memory, from its own up: the most bytes of each, and how many are left.
pub(super) fn memory_groups(root: &Path) -> Vec<(u64, u64)> {
    let of_mount = |(folders, names): (Vec<PathBuf>, GroupFiles)| {
        folders.into_iter().filter_map(move |folder| limit_of(&folder, &names))
    };
    folders(root).into_iter().flat_map(of_mount).collect()
}

/// How many processes of this process's own group the kernel has killed for lack of memory.
pub(super) fn oom_kills(root: &Path) -> u64 {
    let kills = |folder: &PathBuf, names: &GroupFiles| {
        let text = fs::read_to_string(folder.join(names.events)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok())
    };
    // A group that has no file is counted in the one above it.
    let of_mount = |(folders, names): &(Vec<PathBuf>, GroupFiles)| {
        folders.iter().find_map(|folder| kills(folder, names))
    };
    folders(root).iter().filter_map(of_mount).sum()
}

/// For each mount that shows this process's group: its folder and those above it, and the names of their files.
fn folders(root: &Path) -> Vec<(Vec<PathBuf>, GroupFiles)> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let (own, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
    let mut all = Vec::new();
    for line in own.lines() {
        // The number of the hierarchy, its controllers (an empty list in version 2), and the group's path.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let names = match controllers {
            "" => VERSION_2,
            list if list.split(',').any(|name| name == "memory") => VERSION_1,
            _ => continue,
        };
        let is_2 = controllers.is_empty();
        for mount in mounts.iter().filter(|mount| mount.is_2 == is_2) {
            all.push((mount.folders(root, Path::new(path)), names));
        }
    }
    all
}

fn limit_of(folder: &Path, names: &GroupFiles) -> Option<(u64, u64)> {
    let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
    let limit = number(names.limit).filter(|limit| *limit < NO_LIMIT)?;
    let used = number(names.used).unwrap_or(0);
    let statistics = text("memory.stat").unwrap_or_default();
    // Pages of files not touched lately count as used, but the kernel gives them up when memory is needed.
    let line = statistics.lines().find_map(|line| line.strip_prefix(names.given_up));
    let given_up = line.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0);
    Some((limit, limit.saturating_sub(used.saturating_sub(given_up))))
}

struct Mount {
    /// The group that the mount point shows.
    top: PathBuf,
    point: PathBuf,
    is_2: bool,
}

impl Mount {
    /// Reads a line of `mountinfo`: numbers, shown folder, mount point, options, `-`, kind, source, options of the kind.
    /// `None` for other kinds.
    fn parse(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (top, point) = (unescaped(place.next()?), unescaped(place.next()?));
        let mut kind = kind.split(' ');
        let (name, options) = (kind.next()?, kind.nth(1).unwrap_or_default());
        let is_2 = name == "cgroup2";
        let is_memory = name == "cgroup" && options.split(',').any(|option| option == "memory");
        (is_2 || is_memory).then_some(Self { top, point, is_2 })
    }

    /// The shown folders of a group and of those above it.
    fn folders(&self, root: &Path, group: &Path) -> Vec<PathBuf> {
        // In a container the path may lie outside. Then the mount shows the container's own group.
        let below = group.strip_prefix(&self.top).unwrap_or(Path::new(""));
        let point = root.join(self.point.strip_prefix("/").unwrap_or(&self.point));
        below.ancestors().map(|below| point.join(below)).collect()
    }
}

/// A path of `mountinfo`, where spaces are written as `\040`.
fn unescaped(path: &str) -> PathBuf {
    PathBuf::from(path.replace("\\040", " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MOUNTS_2: &str = "\
        24 1 0:22 / /proc rw,nosuid - proc proc rw\n\
        30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_limits_of_all_groups_above_count() {
        let job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7";
        let [limit, step] = ["memory.max", "step_0/memory.max"].map(|name| format!("{job}/{name}"));
        let [used, stat] =
            ["memory.current", "memory.stat"].map(|name| format!("{job}/step_0/{name}"));
        let root = tree(&[
            ("proc/self/cgroup", "0::/system.slice/slurmstepd.scope/job_7/step_0\n"),
            ("proc/self/mountinfo", MOUNTS_2),
            (limit.as_str(), "1000\n"),
            (step.as_str(), "4000\n"),
            (used.as_str(), "900\n"),
            (stat.as_str(), "anon 300\nfile 600\ninactive_file 400\n"),
            ("sys/fs/cgroup/system.slice/memory.max", "max\n"),
            ("sys/fs/cgroup/memory.max", "50\n"),
            ("sys/fs/cgroup/memory.current", "51\n"),
            // The groups of others do not count.
            ("sys/fs/cgroup/user.slice/memory.max", "10\n"),
        ]);
        let groups = memory_groups(root.path());
        assert_eq!(groups, [(4000, 3500), (1000, 1000), (50, 0)]);
    }

    #[test]
    fn version_1_has_its_own_names_and_says_by_a_large_number_that_there_is_no_limit() {
        let mounts = "\
            30 24 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
            32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let root = tree(&[
            ("proc/self/cgroup", "4:cpu,cpuacct:/jobs/7\n3:memory:/jobs/7\n0::/\n"),
            ("proc/self/mountinfo", mounts),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", "500\n"),
            ("sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes", "300\n"),
            (
                "sys/fs/cgroup/memory/jobs/7/memory.stat",
                "inactive_file 1\ntotal_inactive_file 50\n",
            ),
            ("sys/fs/cgroup/cpu/jobs/7/memory.limit_in_bytes", "1\n"),
        ]);
        assert_eq!(memory_groups(root.path()), [(500, 250)]);
    }

    #[test]
    fn kills_for_lack_of_memory_are_counted_in_the_own_group() {
        let events = "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 1\n";
        let root = tree(&[
            ("proc/self/cgroup", "0::/job/step\n"),
            ("proc/self/mountinfo", MOUNTS_2),
            // The step itself does not count memory.
            ("sys/fs/cgroup/job/memory.events", events),
            ("sys/fs/cgroup/memory.events", "oom_kill 7\n"),
        ]);
        assert_eq!(oom_kills(root.path()), 3);
        let root = tree(&[
            ("proc/self/cgroup", "3:memory:/job\n"),
            ("proc/self/mountinfo", "30 24 0:26 / /cg rw - cgroup cgroup rw,memory\n"),
            ("cg/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ]);
        assert_eq!(oom_kills(root.path()), 2);
        assert_eq!(oom_kills(tree(&[]).path()), 0);
    }

    #[test]
    fn a_mount_that_shows_a_part_of_the_tree_is_read_from_there() {
        // A container whose own group is at the mount point.
        let mounts = "30 24 0:26 /docker/ab /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
        for own in ["0::/docker/ab/inner\n", "0::/elsewhere\n"] {
            let root = tree(&[
                ("proc/self/cgroup", own),
                ("proc/self/mountinfo", mounts),
                ("sys/fs/cgroup/memory.max", "700\n"),
                ("sys/fs/cgroup/inner/memory.max", "max\n"),
            ]);
            assert_eq!(memory_groups(root.path()), [(700, 700)], "{own}");
        }
        assert!(memory_groups(tree(&[]).path()).is_empty());
    }
}
