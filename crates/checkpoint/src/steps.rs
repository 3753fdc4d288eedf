//! The checkpoints in a folder: one folder each, named after the number of optimizer steps.
//!
//! A folder gets its name by an atomic rename after its contents have reached the disk, so it is complete. A folder that is being
//! written, or removed, has a hidden name. `latest` names the newest one, and only after it is on the disk: if that folder is gone,
//! somebody has removed it. `good` names the last good one. Each checkpoint names the one before.

use std::path::{Path, PathBuf};
use std::{fs, io};

use paceline_files::Printable;
use paceline_host::disk::Disk;

use super::index::{INDEX, Previous};
use super::not_finite::NotFinite;
use super::reader::Reader;

/// The file with the name of the newest checkpoint.
pub const LATEST: &str = "latest";
/// The file with the name of the last checkpoint after which enough losses were finite.
pub(super) const GOOD: &str = "good";
/// The most bytes of these two files: the name of a checkpoint, with room for spaces.
const MAX_NAME_FILE_BYTES: u64 = 256;
/// The file in which earlier versions kept a checkpoint.
pub(super) const SINGLE_FILE: &str = "checkpoint.safetensors";

/// Prefix of the file by which ranks find out that they see the same folder.
pub(super) const RUN_PREFIX: &str = ".run-";

const PREFIX: &str = "step-";
/// Endings of folders that are being written, and of those being removed.
const HIDDEN: [&str; 2] = [".partial", ".removed"];

/// The name of a checkpoint.
pub fn name(steps: u64) -> String {
    format!("{PREFIX}{steps:09}")
}

/// The hidden name of a checkpoint while run `id` writes it.
pub(super) fn partial_name(steps: u64, id: &str) -> String {
    format!(".{}.{id}{}", name(steps), HIDDEN[0])
}

fn removed_name(steps: u64) -> String {
    format!(".{}{}", name(steps), HIDDEN[1])
}

pub(super) fn steps_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?;
    let steps = digits.parse().ok()?;
    (self::name(steps) == name).then_some(steps)
}

/// Whether the folder has the checkpoint after `steps` steps.
pub(super) fn is_complete(folder: &Path, steps: u64) -> bool {
    folder.join(name(steps)).join(INDEX).exists()
}

/// The steps of all checkpoints in a folder, in order; empty if it cannot be read.
pub(super) fn all(folder: &Path) -> Vec<u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<u64> = entries
        .filter_map(|entry| steps_of(entry.file_name().to_str()?))
        .filter(|steps| is_complete(folder, *steps))
        .collect();
    found.sort_unstable();
    found
}

/// The checkpoints in a folder, the one to go on from first. Those of an abandoned continuation (see [`way_to`]) come last.
pub(super) fn in_order(folder: &Path) -> Vec<PathBuf> {
    steps_in_order(folder).into_iter().map(|steps| folder.join(name(steps))).collect()
}

fn steps_in_order(folder: &Path) -> Vec<u64> {
    let found = all(folder);
    let latest = named_by(folder, LATEST).ok().flatten().filter(|steps| found.contains(steps));
    let Some(head) = latest.or(found.last().copied()) else { return found };
    let mut order = way_to(folder, head);
    let others = found.into_iter().rev().filter(|steps| !order.contains(steps));
    let others: Vec<u64> = others.collect();
    order.extend(others);
    order
}

/// The checkpoints from the one after `head` steps back to the first of its run. Each names the one before it, so those between the
/// two belong to a run that somebody has gone back from.
pub(super) fn way_to(folder: &Path, head: u64) -> Vec<u64> {
    let mut way = Vec::new();
    let mut before: Option<Previous> = None;
    for steps in all(folder).into_iter().rev().filter(|steps| *steps <= head) {
        // An index that cannot be read is reported where the checkpoint is opened.
        let reader = Reader::open_index(&folder.join(name(steps))).ok();
        let index = reader.as_ref().map(|reader| &reader.index);
        let is_on_way = match &before {
            None => true,
            Some(before) if before.steps == steps => {
                index.is_none_or(|index| index.digest() == before.sha256)
            }
            Some(before) => before.steps > steps,
        };
        if is_on_way {
            way.push(steps);
            before = index.and_then(|index| index.previous.clone());
        }
    }
    way
}

/// The steps of the checkpoint that a file in the folder names. `None` if there is no such file.
fn named_by(folder: &Path, file: &str) -> Result<Option<u64>, String> {
    let path = folder.join(file);
    match paceline_files::read_text(&path, MAX_NAME_FILE_BYTES) {
        Ok(text) => match steps_of(text.trim()) {
            Some(steps) => Ok(Some(steps)),
            None => Err(format!("{} does not name a checkpoint", path.printable())),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{} cannot be read: {error}", path.printable())),
    }
}

/// Why the newest checkpoint is unknown or missing, and which one to use instead. `None` if it is there, or if there never was one.
pub(super) fn missing_head(folder: &Path) -> Option<String> {
    let problem = match named_by(folder, LATEST) {
        Err(problem) => problem,
        Ok(None) => return None,
        Ok(Some(steps)) => {
            let path = folder.join(name(steps));
            let problem = match path.join(INDEX).try_exists() {
                Ok(true) => return None,
                Ok(false) if path.exists() => format!("which has no {INDEX}"),
                Ok(false) => "which is not there".to_owned(),
                Err(error) => format!("which cannot be read: {error}"),
            };
            format!("{} names {}, {problem}", folder.join(LATEST).printable(), name(steps))
        }
    };
    let names: Vec<String> = all(folder).into_iter().rev().map(name).collect();
    Some(match names.first() {
        Some(first) => format!(
            "{problem}; there is {}: to go back to an earlier one, name its folder, as in --resume {}",
            names.join(" and "),
            folder.join(first).printable()
        ),
        None => format!(
            "{problem}, and no other checkpoint is there: put it back, or begin in another folder"
        ),
    })
}

/// The steps of the checkpoint that a run would go on from, if there is one.
pub fn latest(folder: &Path) -> Option<u64> {
    steps_of(in_order(folder).first()?.file_name()?.to_str()?)
}

/// The steps of the last good checkpoint in a folder, if one is known and still there.
pub(super) fn good(folder: &Path) -> Option<u64> {
    named_by(folder, GOOD).ok().flatten().filter(|good| all(folder).contains(good))
}

/// Which checkpoints stay when there is a new one.
#[derive(Clone, Debug, Default)]
pub(super) struct Keep {
    /// How many of the newest ones, the new one included.
    pub newest: usize,
    pub also: Vec<u64>,
    pub good: Option<u64>,
}

/// The first file or folder named like a checkpoint after more than `steps` steps that no run has written.
pub fn in_the_way(folder: &Path, steps: u64) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let is_later = |name: &str| steps_of(name).is_some_and(|of| of > steps);
    let later = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_later));
    later.map(|entry| entry.path()).find_map(|path| not_of_a_run(&path))
}

/// A file in a checkpoint's folder that no run writes, if there is one. A folder that cannot be read is not
/// removed either.
fn not_of_a_run(checkpoint: &Path) -> Option<PathBuf> {
    let Ok(entries) = fs::read_dir(checkpoint) else { return Some(checkpoint.to_owned()) };
    let is_of_a_run = |name: &str| {
        let is_of_rank = [".shard", ".done", ".partial"].iter().any(|end| name.ends_with(end));
        name == INDEX || name.starts_with("rank-") && is_of_rank
    };
    let others = entries.filter_map(Result::ok);
    let mut others = others.filter(|entry| !entry.file_name().to_str().is_some_and(is_of_a_run));
    others.next().map(|entry| entry.path())
}

/// Makes the checkpoint after `steps` steps the one to go on from. `good` is the last good one on the way to it.
pub(super) fn go_back(disk: &Disk, folder: &Path, steps: u64, good: Option<u64>) -> io::Result<()> {
    // First, since it is good on the way to the one that is the latest now, too.
    mark(disk, folder, GOOD, good)?;
    mark(disk, folder, LATEST, Some(steps))
}

/// Gives a checkpoint its name, makes it the latest, and removes old ones. `previous` is the one that it follows. All files in
/// `partial`, and their names, are on the disk already. Files that no run has written stay.
pub(super) fn publish(
    disk: &Disk,
    folder: &Path,
    partial: &Path,
    steps: u64,
    previous: Option<u64>,
    keep: &Keep,
) -> io::Result<()> {
    let path = folder.join(name(steps));
    let mut removed = Vec::new();
    // Before a step comes again that was good on another way.
    mark(disk, folder, GOOD, keep.good)?;
    if path.try_exists()? {
        if let Some(other) = not_of_a_run(&path) {
            let problem = format!("{} is in the way, and no run has written it", other.printable());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
        }
        // A run that has gone back comes to the same step again. For a moment there is nothing of this name.
        if named_by(folder, LATEST) == Ok(Some(steps)) {
            let is_there = |previous: &u64| *previous != steps && all(folder).contains(previous);
            mark(disk, folder, LATEST, previous.filter(is_there))?;
        }
        removed.push(set_aside(disk, folder, steps)?);
    }
    disk.rename(partial, &path)?;
    disk.sync_folder(folder)?;
    mark(disk, folder, LATEST, Some(steps))?;
    let newest = keep.newest.max(1);
    // The order is read from all indexes, so only if one of them may go.
    let in_order = if all(folder).len() > newest { steps_in_order(folder) } else { Vec::new() };
    let old = in_order.into_iter().skip(newest);
    for old in old.filter(|old| !keep.also.contains(old)) {
        if not_of_a_run(&folder.join(name(old))).is_none() {
            removed.push(set_aside(disk, folder, old)?);
        }
    }
    if !removed.is_empty() {
        // Only when the old names are gone for good, so that no name is left without its files.
        disk.sync_folder(folder)?;
    }
    removed.iter().try_for_each(|path| disk.remove_tree(path))?;
    NotFinite::forget(disk, folder, steps)
}

/// Writes the name of a checkpoint into a file of the folder, or removes the file. A file that is right is not written.
fn mark(disk: &Disk, folder: &Path, file: &str, steps: Option<u64>) -> io::Result<()> {
    let path = folder.join(file);
    match steps {
        _ if named_by(folder, file) == Ok(steps) => Ok(()),
        Some(steps) => {
            let text = format!("{}\n", name(steps));
            // The message of a save names the checkpoint, which may be there as it should be.
            disk.replace(&path, None, |out| out.write_all(text.as_bytes()))
                .map_err(|e: io::Error| io::Error::new(e.kind(), format!("{file}: {e}")))
        }
        None => {
            disk.remove(&path)?;
            disk.sync_folder(folder)
        }
    }
}

fn set_aside(disk: &Disk, folder: &Path, steps: u64) -> io::Result<PathBuf> {
    let hidden = folder.join(removed_name(steps));
    // A folder that an earlier run could not remove is in the way.
    disk.remove_tree(&hidden)?;
    disk.rename(&folder.join(name(steps)), &hidden)?;
    Ok(hidden)
}

/// Removes the remains of earlier runs: checkpoints that are not complete, or that were being removed.
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
    disk.remove_partial(&folder.join(LATEST))?;
    disk.remove_partial(&folder.join(GOOD))
}

/// Whether there is a checkpoint, or one of an earlier version of this program, or was one. If the system cannot tell, the
/// answer is yes, so that opening it reports why.
pub fn is_in(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).try_exists().unwrap_or(true);
    [INDEX, SINGLE_FILE, LATEST, GOOD].into_iter().any(has) || !all(folder).is_empty()
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

    /// Publishes a checkpoint that has an index only.
    fn put(folder: &Path, steps: u64, newest: usize) -> io::Result<()> {
        let partial = folder.join(partial_name(steps, "id"));
        fs::create_dir(&partial).unwrap();
        fs::write(partial.join(INDEX), steps.to_string()).unwrap();
        let keep = Keep { newest, ..Keep::default() };
        publish(&Disk::default(), folder, &partial, steps, None, &keep)
    }

    #[test]
    fn what_no_run_has_written_stays() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        [10, 20, 30].iter().for_each(|steps| put(folder, *steps, 2).unwrap());
        assert_eq!(all(folder), [20, 30]);
        let [old, next] = [20, 60].map(|steps| folder.join(name(steps)).join("notes.txt"));
        fs::create_dir(folder.join(name(60))).unwrap();
        [&old, &next].iter().for_each(|path| fs::write(path, b"mine").unwrap());
        assert_eq!(in_the_way(folder, 30), Some(next.clone()));
        assert_eq!(in_the_way(folder, 60), None);
        [40, 50].iter().for_each(|steps| put(folder, *steps, 2).unwrap());
        assert_eq!(all(folder), [20, 40, 50]);
        let refused = put(folder, 60, 2).unwrap_err().to_string();
        let words = format!("{} is in the way, and no run has written it", next.display());
        assert_eq!(refused, words);
        [old, next].iter().for_each(|path| assert_eq!(fs::read(path).unwrap(), b"mine"));
        // A file of that name is not a checkpoint either.
        fs::write(folder.join(name(70)), b"mine").unwrap();
        assert_eq!(in_the_way(folder, 60), Some(folder.join(name(70))));
        put(folder, 70, 2).unwrap_err();
    }

    #[test]
    fn checkpoints_of_a_run_that_was_gone_back_from_come_last_and_go_first() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let publish = |steps, newest| put(folder, steps, newest).unwrap();
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

    #[test]
    fn a_newest_checkpoint_that_is_gone_is_no_silent_step_back() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let put = |steps| {
            fs::create_dir(folder.join(name(steps))).unwrap();
            fs::write(folder.join(name(steps)).join(INDEX), b"{}").unwrap();
        };
        let says = |words: &[&str]| {
            let problem = missing_head(folder).unwrap();
            for words in words {
                assert!(problem.contains(words), "no {words:?} in {problem}");
            }
        };
        assert_eq!(missing_head(folder), None);
        assert!(!is_in(folder));
        [2, 3].into_iter().for_each(put);
        assert_eq!(missing_head(folder), None, "none was ever the latest one");
        fs::write(folder.join(LATEST), "step-000000004\n").unwrap();
        let back = format!("--resume {}", folder.join(name(3)).display());
        says(&["step-000000004, which is not there", "step-000000003 and step-000000002", &back]);
        fs::create_dir(folder.join(name(4))).unwrap();
        says(&["step-000000004, which has no index.json", &back]);
        fs::write(folder.join(LATEST), "step-4").unwrap();
        says(&["latest does not name a checkpoint", &back]);
        [2, 3, 4].iter().for_each(|steps| fs::remove_dir_all(folder.join(name(*steps))).unwrap());
        says(&["no other checkpoint is there"]);
        assert!(is_in(folder), "a run must not begin here as if nothing had been");
    }
}
