//! For tests: a record of the operations on a disk, and the states in which a power cut can leave it.
//!
//! The model is as pessimistic as file systems may be. Before a file is synced, its last writes may be missing or torn,
//! and its length may be kept or not. Before a folder is synced, any first part of the changes of names may have reached
//! the disk, or any last part without the first.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Disk, Operation, folder_of};

impl Disk {
    /// A disk that remembers the operations on it.
    pub fn recorded() -> Self {
        Self { recorder: Some(Arc::default()), ..Self::default() }
    }

    /// The operations so far that have succeeded.
    pub fn operations(&self) -> Vec<Operation> {
        self.recorder
            .as_ref()
            .map_or_else(Vec::new, |recorder| recorder.lock().expect("no panic meanwhile").clone())
    }

    /// Remembers that the caller relies on everything so far.
    pub fn acknowledge(&self, what: u64) {
        self.perform(|| Operation::Acknowledged(what), || Ok(())).expect("it cannot fail");
    }
}

/// The fate of bytes that have not been synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsynced {
    /// They are on the disk by chance.
    Kept,
    /// They are missing.
    Dropped,
    /// They are missing, but the file is as long as if they were there.
    Zeros,
    /// Half of the last write is missing.
    Torn,
}

impl Unsynced {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Kept, Self::Dropped, Self::Zeros, Self::Torn];
}

/// Which of the changes of names that have not been synced are on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastingNames {
    /// The first changes, this many for each folder.
    First(usize),
    /// All but the first ones of each folder.
    AllBut(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    File(usize),
    Folder(usize),
}

#[derive(Clone, Debug)]
enum Change {
    Add(String, Node),
    Remove(String),
    Rename(String, String),
}

#[derive(Clone, Debug, Default)]
struct Contents {
    /// The contents that have been synced.
    synced: Vec<u8>,
    /// All writes since then.
    writes: Vec<Vec<u8>>,
}

#[derive(Clone, Debug, Default)]
struct Entries {
    synced: BTreeMap<String, Node>,
    changes: Vec<Change>,
}

impl Entries {
    /// The names after these changes. A change of a missing name has no effect.
    fn after<'a>(&self, changes: impl IntoIterator<Item = &'a Change>) -> BTreeMap<String, Node> {
        let mut names = self.synced.clone();
        for change in changes {
            match change {
                Change::Add(name, node) => drop(names.insert(name.clone(), *node)),
                Change::Remove(name) => drop(names.remove(name)),
                Change::Rename(from, to) => {
                    if let Some(node) = names.remove(from) {
                        names.insert(to.clone(), node);
                    }
                }
            }
        }
        names
    }
}

/// A disk below one folder: its contents, and their synced part.
#[derive(Clone, Debug)]
pub struct ModelDisk {
    root: PathBuf,
    files: BTreeMap<usize, Contents>,
    /// Folder 0 is the root.
    folders: Vec<Entries>,
}

impl ModelDisk {
    /// An empty disk below `root`.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), files: BTreeMap::new(), folders: vec![Entries::default()] }
    }

    /// A disk that holds what is below `root` now.
    pub fn holding(root: &Path) -> Self {
        let mut disk = Self::new(root);
        // These numbers are apart from those of files that are written.
        disk.hold(0, root, &mut (usize::MAX / 2..));
        disk
    }

    fn hold(&mut self, folder: usize, path: &Path, numbers: &mut impl Iterator<Item = usize>) {
        for entry in fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()) {
            let node = if entry.is_dir() {
                self.folders.push(Entries::default());
                let number = self.folders.len() - 1;
                self.hold(number, &entry, numbers);
                Node::Folder(number)
            } else {
                let number = numbers.next().expect("there are enough");
                let (synced, writes) = (fs::read(&entry).unwrap(), Vec::new());
                self.files.insert(number, Contents { synced, writes });
                Node::File(number)
            };
            self.folders[folder].synced.insert(name_of(&entry), node);
        }
    }

    /// Repeats on the model an operation of the real disk.
    pub fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Folder(path) => {
                if path != &self.root && self.find(path).is_none() {
                    let number = self.folders.len();
                    self.folders.push(Entries::default());
                    self.change(path, |name| Change::Add(name, Node::Folder(number)));
                }
            }
            Operation::Create(file, path) => {
                self.files.insert(*file, Contents::default());
                if let Some(path) = path {
                    self.change(path, |name| Change::Add(name, Node::File(*file)));
                }
            }
            Operation::Write(file, bytes) => {
                self.files.get_mut(file).expect("a file").writes.push(bytes.clone());
            }
            Operation::Sync(file) => {
                let contents = self.files.get_mut(file).expect("a file");
                contents.synced.extend(contents.writes.drain(..).flatten());
            }
            Operation::Link(file, path) => {
                self.change(path, |name| Change::Add(name, Node::File(*file)));
            }
            Operation::Rename(from, to) => {
                assert_eq!(folder_of(from), folder_of(to), "names change within a folder");
                let to = name_of(to);
                self.change(from, |name| Change::Rename(name, to));
            }
            Operation::Remove(path) => self.change(path, Change::Remove),
            Operation::SyncFolder(path) => {
                let folder = self.folder(path);
                let entries = &mut self.folders[folder];
                entries.synced = entries.after(&entries.changes);
                entries.changes.clear();
            }
            Operation::Acknowledged(_) => {}
        }
    }

    /// The most unsynced changes of names in a folder.
    pub fn num_unsynced_names(&self) -> usize {
        self.folders.iter().map(|folder| folder.changes.len()).max().unwrap_or(0)
    }

    /// Writes the contents after a power cut into `to`.
    pub fn leave(&self, to: &Path, data: Unsynced, names: LastingNames) {
        self.leave_each(to, &mut || data, &mut |at| match names {
            LastingNames::First(count) => at < count,
            LastingNames::AllBut(count) => at >= count,
        });
    }

    /// Writes the contents after a power cut into `to`. `data` decides for each file, and `lasts` for each unsynced change of a
    /// name, by its number in its folder, whether it is on the disk.
    pub fn leave_each(
        &self,
        to: &Path,
        data: &mut impl FnMut() -> Unsynced,
        lasts: &mut impl FnMut(usize) -> bool,
    ) {
        self.leave_folder(0, to, data, lasts);
    }

    fn leave_folder(
        &self,
        folder: usize,
        to: &Path,
        data: &mut impl FnMut() -> Unsynced,
        lasts: &mut impl FnMut(usize) -> bool,
    ) {
        let entries = &self.folders[folder];
        let changes = entries.changes.iter().enumerate().filter(|(at, _)| lasts(*at));
        let changes: Vec<&Change> = changes.map(|(_, change)| change).collect();
        for (name, node) in entries.after(changes) {
            let path = to.join(name);
            match node {
                Node::File(file) => fs::write(path, self.contents(file, data())).unwrap(),
                Node::Folder(folder) => {
                    fs::create_dir(&path).unwrap();
                    self.leave_folder(folder, &path, data, lasts);
                }
            }
        }
    }

    fn contents(&self, file: usize, data: Unsynced) -> Vec<u8> {
        let Contents { synced, writes } = &self.files[&file];
        let mut bytes = synced.clone();
        let unsynced = writes.concat();
        match (data, writes.split_last()) {
            (Unsynced::Kept, _) => bytes.extend(unsynced),
            (Unsynced::Dropped, _) | (Unsynced::Torn, None) => {}
            (Unsynced::Zeros, _) => bytes.resize(bytes.len() + unsynced.len(), 0),
            (Unsynced::Torn, Some((last, before))) => {
                bytes.extend(before.concat());
                bytes.extend(&last[..last.len() / 2]);
            }
        }
        bytes
    }

    fn change(&mut self, path: &Path, change: impl FnOnce(String) -> Change) {
        let folder = self.folder(folder_of(path));
        self.folders[folder].changes.push(change(name_of(path)));
    }

    fn folder(&self, path: &Path) -> usize {
        match self.find(path) {
            Some(Node::Folder(folder)) => folder,
            other => panic!("{} is {other:?}", path.display()),
        }
    }

    /// The file or folder that has this name now.
    fn find(&self, path: &Path) -> Option<Node> {
        let below = path.strip_prefix(&self.root).ok()?;
        below.iter().try_fold(Node::Folder(0), |at, name| {
            let Node::Folder(folder) = at else { return None };
            let entries = &self.folders[folder];
            entries.after(&entries.changes).get(name.to_str()?).copied()
        })
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().and_then(|name| name.to_str()).expect("a name").to_owned()
}
