//! The checkpoints in a folder: one folder each, named after the number of optimizer steps.
//!
//! A folder of this name is complete, because it gets the name by an atomic rename after all that it holds has reached
//! the disk. A folder that is being written, or removed, has a hidden name. `latest` holds the name of the newest one.
//! This file does not know what a checkpoint consists of.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::disk::Disk;

/// The file that makes a folder a checkpoint.
pub(crate) const INDEX: &str = "index.json";
/// The file with the name of the newest checkpoint.
pub(crate) const LATEST: &str = "latest";
/// The file in which earlier versions kept a checkpoint.
pub(crate) const SINGLE_FILE: &str = "checkpoint.safetensors";

/// How the name of a file begins by which ranks find out that they see the same folder.
pub(super) const RUN_PREFIX: &str = ".run-";

const PREFIX: &str = "step-";
/// How the names of folders end that are being written, and of those that are being removed.
const HIDDEN: [&str; 2] = [".partial", ".removed"];

/// The name of the checkpoint after so many steps.
pub(crate) fn name(steps: u64) -> String {
    format!("{PREFIX}{steps:09}")
}

/// The hidden name of a checkpoint while run `id` writes it.
pub(super) fn partial_name(steps: u64, id: &str) -> String {
    format!(".{}.{id}{}", name(steps), HIDDEN[0])
}

fn removed_name(steps: u64) -> String {
    format!(".{}{}", name(steps), HIDDEN[1])
}

fn steps_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?;
    let steps = digits.parse().ok()?;
    (self::name(steps) == name).then_some(steps)
}

/// The steps of all checkpoints in a folder, in order. A folder that cannot be read has none.
pub(super) fn all(folder: &Path) -> Vec<u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<u64> = entries
        .filter_map(|entry| steps_of(entry.file_name().to_str()?))
        .filter(|steps| folder.join(name(*steps)).join(INDEX).exists())
        .collect();
    found.sort_unstable();
    found
}

/// The checkpoints in a folder, the one to go on from first. Those after it follow those before it: they are of a run
/// that somebody has gone back from.
pub(super) fn in_order(folder: &Path) -> Vec<PathBuf> {
    let mut found = all(folder);
    let latest = fs::read_to_string(folder.join(LATEST)).ok();
    let latest =
        latest.and_then(|text| steps_of(text.trim())).filter(|steps| found.contains(steps));
    newest_first(&mut found, latest.unwrap_or(u64::MAX));
    found.into_iter().map(|steps| folder.join(name(steps))).collect()
}

/// The steps of the checkpoint in a folder that a run would go on from, if there is one.
pub fn latest(folder: &Path) -> Option<u64> {
    steps_of(in_order(folder).first()?.file_name()?.to_str()?)
}

fn newest_first(steps: &mut [u64], latest: u64) {
    steps.sort_unstable_by_key(|steps| (*steps > latest, std::cmp::Reverse(*steps)));
}

/// Gives a checkpoint its name, makes it the latest, and removes old ones so that `keep` stay. All files in `partial`,
/// and their names, are on the disk already.
pub(super) fn publish(
    disk: &Disk,
    folder: &Path,
    partial: &Path,
    steps: u64,
    keep: usize,
) -> io::Result<()> {
    let path = folder.join(name(steps));
    let mut removed = Vec::new();
    if path.try_exists()? {
        // A run that has gone back comes to the same step again.
        removed.push(set_aside(disk, folder, steps)?);
    }
    disk.rename(partial, &path)?;
    disk.sync_folder(folder)?;
    let latest = format!("{}\n", name(steps));
    disk.replace(&folder.join(LATEST), None, |out| out.write_all(latest.as_bytes()))?;
    let mut found = all(folder);
    newest_first(&mut found, steps);
    for old in found.into_iter().skip(keep.max(1)) {
        removed.push(set_aside(disk, folder, old)?);
    }
    if !removed.is_empty() {
        // Only when the old names are gone for good, so that no name is left without its files.
        disk.sync_folder(folder)?;
    }
    removed.iter().try_for_each(|path| disk.remove_tree(path))
}

fn set_aside(disk: &Disk, folder: &Path, steps: u64) -> io::Result<PathBuf> {
    let hidden = folder.join(removed_name(steps));
    // What an earlier run could not remove is in the way.
    disk.remove_tree(&hidden)?;
    disk.rename(&folder.join(name(steps)), &hidden)?;
    Ok(hidden)
}

/// Removes what earlier runs have left: checkpoints that are not complete, or that were being removed.
pub(super) fn remove_leftovers(disk: &Disk, folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_hidden = HIDDEN.iter().any(|end| name.ends_with(end));
        if is_hidden && name.starts_with(&format!(".{PREFIX}")) {
            disk.remove_tree(&entry.path())?;
        } else if name.starts_with(RUN_PREFIX) {
            disk.remove(&entry.path())?;
        }
    }
    disk.remove_partial(&folder.join(LATEST))
}

/// Whether there is a checkpoint, or one of an earlier version of this program. If the system cannot tell, the answer is
/// yes, so that opening it reports why.
pub fn is_in(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).try_exists().unwrap_or(true);
    has(INDEX) || has(SINGLE_FILE) || !all(folder).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_steps() {
        for steps in [0, 7, 123_456_789, u64::MAX] {
            assert_eq!(steps_of(&name(steps)), Some(steps));
        }
        for other in
            ["step-7", "step-", "step-+00000007", "step-0000000071", "latest", "step-00000000x"]
        {
            assert_eq!(steps_of(other), None, "{other}");
        }
    }

    #[test]
    fn checkpoints_of_a_run_that_was_gone_back_from_come_last_and_go_first() {
        let mut steps = [10, 20, 30, 40];
        newest_first(&mut steps, 20);
        assert_eq!(steps, [20, 10, 40, 30]);

        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let disk = Disk::default();
        let publish = |steps, keep| {
            let partial = folder.join(partial_name(steps, "id"));
            fs::create_dir(&partial).unwrap();
            fs::write(partial.join(INDEX), steps.to_string()).unwrap();
            publish(&disk, folder, &partial, steps, keep).unwrap();
        };
        [10, 20, 30].iter().for_each(|steps| publish(*steps, 3));
        assert_eq!(all(folder), [10, 20, 30]);
        publish(15, 3);
        assert_eq!(all(folder), [10, 15, 30]);
        let names: Vec<_> = [15, 10, 30].map(|steps| folder.join(name(steps))).into();
        assert_eq!(in_order(folder), names);
        // Again, in place of the one that is there.
        publish(30, 2);
        assert_eq!(all(folder), [15, 30]);
        fs::remove_file(folder.join(LATEST)).unwrap();
        assert_eq!(in_order(folder)[0], folder.join(name(30)));
        assert_eq!(fs::read_dir(folder).unwrap().count(), 2, "nothing else is left");
    }
}
