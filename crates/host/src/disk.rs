//! The operations by which this program writes files.
//!
//! Every operation goes through a [`Disk`]. The disk of a program is the real one. The disk of a test fails at one chosen
//! operation, or stops there for good, as that of a killed process does, so a test can interrupt a save at each of its
//! operations.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use paceline_trace::runtime::{now, sleep};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, fcntl_setfl, linkat, open};
use rustix::io::Errno;

#[cfg(any(test, feature = "faults"))]
pub mod faults;
#[cfg(any(test, feature = "faults"))]
pub mod power_cut;

/// How long a pipe may be without a reader. An ordinary open would wait for one without end, and signals that this process
/// handles would not interrupt it.
const READER_LIMIT: Duration = Duration::from_secs(10);

/// How long a lock may still be held by its last owner. A killed process releases its locks after its memory, so a command that
/// is repeated at once can still meet them. A child that is being started holds its parent's locks until `exec`.
const LAST_MOMENTS: Duration = Duration::from_secs(2);

/// Locks a file for this process alone. False where the file system has no locks; an error if another process holds the lock
/// for two seconds.
pub fn lock(file: &File) -> io::Result<bool> {
    let deadline = now() + LAST_MOMENTS;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if now() < deadline => {
                sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::WouldBlock.into()),
            Err(TryLockError::Error(_)) => return Ok(false),
        }
    }
}

const READER_POLL: Duration = Duration::from_millis(20);

/// Bytes that are collected before they are written.
const BUFFER_BYTES: usize = 1 << 20;

/// The file system, or in a test a file system that fails at a chosen operation.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    #[cfg(any(test, feature = "faults"))]
    faults: Option<std::sync::Arc<faults::Faults>>,
    #[cfg(any(test, feature = "faults"))]
    recorder: Option<std::sync::Arc<std::sync::Mutex<Vec<Operation>>>>,
}

/// An operation. Files have numbers, because a file may have no name, or several ones.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A new folder.
    Folder(PathBuf),
    /// A new file, with a name if it has one.
    Create(usize, Option<PathBuf>),
    /// Bytes at the end of a file.
    Write(usize, Vec<u8>),
    /// The contents of the file are forced to the disk.
    Sync(usize),
    /// The names in the folder are forced to the disk.
    SyncFolder(PathBuf),
    /// A name of a file.
    Link(usize, PathBuf),
    /// A second name in place of the first one, which may be taken from another file.
    Rename(PathBuf, PathBuf),
    /// Removal of a file or a folder.
    Remove(PathBuf),
    /// The caller has reported that everything so far is safe.
    Acknowledged(u64),
}

impl Disk {
    /// Makes a folder, and those above it, where they are missing.
    pub fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.perform(|| Operation::Folder(path.to_owned()), || fs::create_dir_all(path))
    }

    /// Like [`Disk::create_folder`], and forces the names of the new folders to the disk.
    pub fn create_folder_safely(&self, path: &Path) -> io::Result<()> {
        let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let missing: Vec<&Path> = path.ancestors().take_while(is_missing).collect();
        self.create_folder(path)?;
        missing.iter().try_for_each(|folder| self.sync_folder(folder_of(folder)))
    }

    /// Makes a folder. Fails if there is something of that name.
    pub fn create_new_folder(&self, path: &Path) -> io::Result<()> {
        self.perform(|| Operation::Folder(path.to_owned()), || fs::create_dir(path))
    }

    /// Removes an empty folder.
    pub fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.perform(|| Operation::Remove(path.to_owned()), || fs::remove_dir(path))
    }

    /// Opens a file for reading and writing, with its contents, or makes it.
    pub fn open_or_create(&self, path: &Path) -> io::Result<DiskFile> {
        self.opened(Some(path), || paceline_files::open_or_create(path))
    }

    /// Makes a file for writing, or empties the one there. This program chose the name, so a link is not followed.
    pub fn create(&self, path: &Path) -> io::Result<DiskFile> {
        self.opened(Some(path), || paceline_files::create(path))
    }

    /// Opens for writing whatever the user has named, be it a device, a pipe or a link. A pipe without a reader is an error
    /// after ten seconds.
    pub fn open_named(&self, path: &Path) -> io::Result<DiskFile> {
        let is_pipe = path.metadata().is_ok_and(|of| of.file_type().is_fifo());
        let open = || if is_pipe { open_pipe(path, READER_LIMIT) } else { File::create(path) };
        self.opened(Some(path), open)
    }

    fn opened(
        &self,
        path: Option<&Path>,
        open: impl FnOnce() -> io::Result<File>,
    ) -> io::Result<DiskFile> {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let create = || Operation::Create(number, path.map(Path::to_owned));
        let file = self.perform(create, open)?;
        Ok(DiskFile { file, disk: self.clone(), number })
    }

    /// Replaces the file at `path` by the output of `write`, or makes it. A complete file, earlier or new, is there at every
    /// moment. If `kept` is given, the earlier file keeps that name; for a moment it has only that name.
    ///
    /// While it is written the new file has no name, so a killed process leaves nothing behind. File systems without nameless
    /// files see `<path>.partial`. Its mode is that of any new file of this process. Of two processes that replace the same
    /// file at the same time, the last one wins.
    pub fn replace<T, E: From<io::Error>>(
        &self,
        path: &Path,
        kept: Option<&Path>,
        write: impl FnOnce(&mut (dyn Write + Send)) -> Result<T, E>,
    ) -> Result<T, E> {
        let partial = partial(path);
        let outcome = self.write_new(path, &partial, write).and_then(|(written, _turn)| {
            if let Some(kept) = kept
                && path.try_exists()?
            {
                self.rename(path, kept)?;
            }
            self.rename(&partial, path)?;
            // The names are on the disk only when the folder is.
            self.sync_folder(folder_of(path))?;
            Ok(written)
        });
        if outcome.is_err() {
            // The error that is reported is the first one.
            let _ = self.remove(&partial);
        }
        outcome
    }

    /// Removes the parts of the file at `path` that a killed process may have left.
    pub fn remove_partial(&self, path: &Path) -> io::Result<()> {
        self.remove(&partial(path)).or_else(gone)
    }

    /// Writes a new file that is complete, on the disk, and named `partial`. The folder that comes with the outcome is locked
    /// as long as that name is taken.
    fn write_new<T, E: From<io::Error>>(
        &self,
        path: &Path,
        partial: &Path,
        write: impl FnOnce(&mut (dyn Write + Send)) -> Result<T, E>,
    ) -> Result<(T, File), E> {
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let nameless = open(folder_of(path), flags, Mode::from_raw_mode(0o666));
        let has_name = nameless.is_err();
        let open = || nameless.map(File::from).or_else(|_| paceline_files::create(partial));
        let file = self.opened(has_name.then_some(partial), open)?;
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, file);
        let written = write(&mut out)?;
        let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync()?;
        let turn = File::open(folder_of(path))?;
        // Who has waited for two seconds goes on without: the other process does not run.
        let _ = lock(&turn);
        if !has_name {
            // A file that an earlier process has left under this name is useless.
            self.remove(partial).or_else(gone)?;
            let nameless = format!("/proc/self/fd/{}", file.file.as_raw_fd());
            let link = || linkat(CWD, nameless, CWD, partial, AtFlags::SYMLINK_FOLLOW);
            let named = || Operation::Link(file.number, partial.to_owned());
            self.perform(named, || Ok(link()?))?;
        }
        Ok((written, turn))
    }

    /// Gives a file or a folder another name.
    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.perform(|| Operation::Rename(from.into(), to.into()), || fs::rename(from, to))
    }

    /// Removes a file.
    pub fn remove(&self, path: &Path) -> io::Result<()> {
        self.perform(|| Operation::Remove(path.to_owned()), || fs::remove_file(path))
    }

    /// Forces the names in a folder to the disk.
    pub fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.perform(|| Operation::SyncFolder(path.to_owned()), || self.force(&File::open(path)?))
    }

    /// Removes a folder of files. A missing folder is not an error. If `path` is a link, only the link is removed.
    pub fn remove_tree(&self, path: &Path) -> io::Result<()> {
        if path.is_symlink() {
            return self.remove(path).or_else(gone);
        }
        let entries = match fs::read_dir(path) {
            Ok(entries) => entries,
            Err(error) => return gone(error),
        };
        for entry in entries {
            self.remove(&entry?.path()).or_else(gone)?;
        }
        self.remove_folder(path).or_else(gone)
    }

    /// Whether a test has made it, to fail at an operation. Such a test makes hundreds of runs, and never cuts the power. So they need
    /// not wait for the disk, and measure nothing.
    pub fn is_made_to_fail(&self) -> bool {
        #[cfg(any(test, feature = "faults"))]
        if self.faults.is_some() {
            return true;
        }
        false
    }

    fn force(&self, file: &File) -> io::Result<()> {
        if self.is_made_to_fail() { Ok(()) } else { file.sync_all() }
    }

    /// Acts. In a test the operation may fail, and is remembered once it has succeeded.
    fn perform<T>(
        &self,
        operation: impl FnOnce() -> Operation,
        act: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        #[cfg(any(test, feature = "faults"))]
        if self.faults.is_some() || self.recorder.is_some() {
            let operation = operation();
            self.faults.iter().try_for_each(|faults| faults.enter(&operation))?;
            let done = act()?;
            self.record(operation);
            self.faults.iter().for_each(|faults| faults.pause());
            return Ok(done);
        }
        let _ = operation;
        act()
    }

    #[cfg(any(test, feature = "faults"))]
    fn record(&self, operation: Operation) {
        if let Some(recorder) = &self.recorder {
            recorder.lock().expect("no panic meanwhile").push(operation);
        }
    }
}

/// A file that is being written, without a buffer.
#[derive(Debug)]
pub struct DiskFile {
    file: File,
    disk: Disk,
    number: usize,
}

impl DiskFile {
    /// Removes the file's contents.
    pub fn clear(&mut self) -> io::Result<()> {
        self.cut(0)?;
        self.file.rewind()
    }

    /// Writes at the end from now on. Returns how many bytes the file has.
    pub fn go_to_end(&mut self) -> io::Result<u64> {
        self.file.seek(io::SeekFrom::End(0))
    }

    /// Cuts the file after its first `len_bytes`.
    pub fn cut(&mut self, len_bytes: u64) -> io::Result<()> {
        let cut = || Operation::Write(self.number, Vec::new());
        self.disk.perform(cut, || self.file.set_len(len_bytes))
    }

    /// Forces the written bytes to the disk.
    pub fn sync(&self) -> io::Result<()> {
        self.disk.perform(|| Operation::Sync(self.number), || self.disk.force(&self.file))
    }

    /// Locks it, see [`lock`].
    pub fn lock(&self) -> io::Result<bool> {
        lock(&self.file)
    }
}

impl Read for DiskFile {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.file.read(bytes)
    }
}

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        #[cfg(any(test, feature = "faults"))]
        if let Some(part) = self.disk.faults.as_ref().and_then(|faults| faults.cut(bytes)) {
            // A full disk takes a part of the bytes, and refuses the rest.
            self.disk.record(Operation::Write(self.number, part.to_vec()));
            return self.file.write(part);
        }
        #[cfg(any(test, feature = "faults"))]
        let bytes = self.disk.faults.as_ref().map_or(bytes, |faults| faults.at_once(bytes));
        let write = || Operation::Write(self.number, bytes.to_vec());
        self.disk.perform(write, || (&self.file).write_all(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn gone(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// The name of a file that is not complete.
pub fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// The folder of a file. A bare file name has the parent "".
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a pipe for writing, once somebody reads it.
fn open_pipe(path: &Path, limit: Duration) -> io::Result<File> {
    let begin = now();
    loop {
        match open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
            // From here on a write waits for the reader, as it does everywhere.
            Ok(pipe) => {
                fcntl_setfl(&pipe, OFlags::empty())?;
                return Ok(pipe.into());
            }
            Err(Errno::NXIO) if now() - begin < limit => sleep(READER_POLL),
            Err(Errno::NXIO) => {
                let seconds = limit.as_secs_f64();
                return Err(io::Error::other(format!("nobody has read this pipe for {seconds} s")));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::faults::{Fault, at_each_operation};
    use super::*;

    fn put(disk: &Disk, path: &Path, kept: Option<&Path>, text: &str) -> io::Result<()> {
        disk.replace(path, kept, |out| {
            // More than the buffer holds, so that several writes happen.
            let lines = BUFFER_BYTES / text.len() + 2;
            (0..lines).try_for_each(|_| out.write_all(text.as_bytes()))
        })
    }

    /// The file's first word, if all of the file is of that word.
    fn word(path: &Path) -> Option<String> {
        let text = fs::read_to_string(path).ok()?;
        let word = text.split_inclusive('\n').next()?.to_owned();
        assert_eq!(text, word.repeat(BUFFER_BYTES / word.len() + 2), "{}", path.display());
        Some(word.trim().to_owned())
    }

    #[test]
    fn a_file_is_replaced_and_the_earlier_one_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (path, kept) = (folder.path().join("file"), folder.path().join("before"));
        let disk = Disk::default();
        for (text, now, before) in
            [("a\n", "a", None), ("b\n", "b", Some("a")), ("c\n", "c", Some("b"))]
        {
            put(&disk, &path, Some(&kept), text).unwrap();
            assert_eq!(word(&path).as_deref(), Some(now));
            assert_eq!(word(&kept).as_deref(), before);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn several_replace_a_file_at_the_same_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::thread::scope(|scope| {
            for text in ["a\n", "b\n", "c\n"] {
                let all = || (0..20).try_for_each(|_| put(&Disk::default(), &path, None, text));
                scope.spawn(move || all().unwrap());
            }
        });
        assert!(word(&path).is_some_and(|word| ["a", "b", "c"].contains(&&*word)));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_pipe_without_a_reader_is_an_error_and_one_with_a_reader_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let said = open_pipe(&pipe, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(said.contains("nobody has read this pipe for 0.05 s"), "{said}");
        let there = pipe.clone();
        let reader = std::thread::spawn(move || fs::read_to_string(there).unwrap());
        let mut file = BufWriter::new(Disk::default().open_named(&pipe).unwrap());
        file.write_all(b"all of it").unwrap();
        drop(file);
        assert_eq!(reader.join().unwrap(), "all of it");
    }

    #[test]
    fn a_bare_file_name_means_the_current_folder() {
        assert_eq!(folder_of(Path::new("file")), Path::new("."));
        assert_eq!(folder_of(Path::new("a/file")), Path::new("a"));
        assert_eq!(folder_of(Path::new("/file")), Path::new("/"));
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        put(&Disk::default(), &folder.path().join("missing/file"), None, "a\n").unwrap_err();
        // A folder of that name refuses the last operation, the rename.
        let occupied = folder.path().join("occupied");
        fs::create_dir(&occupied).unwrap();
        put(&Disk::default(), &occupied, None, "a\n").unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_tree_that_is_removed_ends_at_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::create_dir(&target).unwrap();
        fs::write(target.join("precious"), b"precious").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        Disk::default().remove_tree(&link).unwrap();
        assert!(!link.is_symlink() && target.join("precious").exists());
        Disk::default().remove_tree(&target).unwrap();
        assert!(!target.exists());
    }

    #[test]
    fn the_mode_is_that_of_any_new_file() {
        let folder = tempfile::tempdir().unwrap();
        let (replaced, plain) = (folder.path().join("replaced"), folder.path().join("plain"));
        put(&Disk::default(), &replaced, None, "a\n").unwrap();
        fs::write(&plain, b"a").unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode();
        assert_eq!(mode(&replaced), mode(&plain));
    }

    #[test]
    fn a_fault_at_any_operation_leaves_a_complete_file() {
        let num_operations = at_each_operation(|disk, fault| {
            let folder = tempfile::tempdir().unwrap();
            let (path, kept) = (folder.path().join("file"), folder.path().join("before"));
            put(&Disk::default(), &path, Some(&kept), "old\n").unwrap();
            let outcome = put(disk, &path, Some(&kept), "new\n");
            let found = (word(&path), word(&kept));
            let found = (found.0.as_deref(), found.1.as_deref());
            let new = (Some("new"), Some("old"));
            if !disk.has_failed() {
                outcome.unwrap();
                assert_eq!(found, new);
                return;
            }
            let states = [(Some("old"), None), (None, Some("old")), new];
            assert!(states.contains(&found), "{found:?}");
            if fault != Fault::Stops {
                assert!(
                    fs::read_dir(folder.path()).unwrap().count() <= 2,
                    "a partial file is left"
                );
            }
        });
        assert!(num_operations >= 7, "create, 2 writes, sync, link, 2 renames, sync");
    }
}
