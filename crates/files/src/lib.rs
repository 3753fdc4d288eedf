//! The one way to open files that others wrote, and files that others may have planted where this program writes.
//!
//! A path that a user names, or in a folder that others can write to, may be a FIFO on which an open waits forever, an
//! endless device, a file of any size, or a link to something that must not be overwritten. So:
//!
//! - [`open`] opens regular files only, and never waits.
//! - [`read`] and [`read_text`] also state how many bytes a file of its kind may have.
//! - [`read_stream`] also takes what a user pipes in: `/dev/stdin`, or `<(command)` in a shell.
//! - [`create`] and [`open_or_create`] write to names that this program chooses, so they follow no link there;
//!   [`check_own`] says beforehand whether they would refuse.
//!
//! Links are followed to files that are only read, as in caches of models, and always above the last part of a path.
//!
//! [`printable`] and its like show text that others wrote, so that no name controls a terminal; [`Printable::printable`]
//! shows paths, so that no name starts a line of its own.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod printable;

pub use printable::{Printable, printable, printable_lines, printable_piece};

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Opens a regular file for reading, and never waits for a writer. The error for anything else names its kind.
///
/// # Errors
/// Those of the operating system, and [`io::ErrorKind::InvalidInput`] for anything but a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    // A device may act when it is opened, so its kind is checked first.
    regular(&std::fs::metadata(path)?.file_type())?;
    // The file may have been replaced since: opening must not wait, and the opened file counts.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    regular(&file.metadata()?.file_type())?;
    Ok(file)
}

/// The bytes of a regular file that has at most `limit_bytes`.
///
/// # Errors
/// Those of [`open`], and [`io::ErrorKind::FileTooLarge`] for a larger file.
pub fn read(path: &Path, limit_bytes: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let len = file.metadata()?.len();
    if len > limit_bytes {
        return Err(too_large(limit_bytes));
    }
    read_up_to(file, len, limit_bytes)
}

/// Like [`read`], for a file that must be UTF-8.
///
/// # Errors
/// Those of [`read`], and [`io::ErrorKind::InvalidData`] for other bytes.
pub fn read_text(path: &Path, limit_bytes: u64) -> io::Result<String> {
    text(read(path, limit_bytes)?)
}

/// Like [`read_text`], also for a pipe or a terminal that this process was given, such as `/dev/stdin`; waits for its
/// writer.
///
/// # Errors
/// Those of [`read_text`].
pub fn read_stream(path: &Path, limit_bytes: u64) -> io::Result<String> {
    let is_given = ["/dev/stdin", "/dev/fd/", "/proc/self/fd/"]
        .iter()
        .any(|given| path.to_str().is_some_and(|path| path.starts_with(given)));
    if is_given {
        text(read_up_to(File::open(path)?, 0, limit_bytes)?)
    } else {
        read_text(path, limit_bytes)
    }
}

/// Empties or makes a file for writing, with the mode of any new file. The last part of `path` must not be a link, and an
/// existing file must be a regular one.
///
/// # Errors
/// Those of the operating system, and [`io::ErrorKind::InvalidInput`] for a link or for anything but a regular file.
pub fn create(path: &Path) -> io::Result<File> {
    let file = open_or_create(path)?;
    file.set_len(0)?;
    Ok(file)
}

/// Opens a file for reading and writing, with its contents, or makes it. Like [`create`] otherwise.
///
/// # Errors
/// Those of [`create`].
pub fn open_or_create(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR
        | OFlags::CREATE
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::NOCTTY
        | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::from_raw_mode(0o666));
    let file = File::from(opened.map_err(|error| match error {
        rustix::io::Errno::LOOP => refused("a link"),
        error => error.into(),
    })?);
    regular(&file.metadata()?.file_type())?;
    Ok(file)
}

/// Opens an existing regular file for writing only: a file of the kernel, such as one of tracefs.
///
/// # Errors
/// Those of [`open`], and [`io::ErrorKind::InvalidInput`] for a link.
pub fn open_to_write(path: &Path) -> io::Result<File> {
    check_own(path)?;
    let flags =
        OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    regular(&file.metadata()?.file_type())?;
    Ok(file)
}

/// Checks, before any work is done, whether [`create`] would refuse a name that this program chooses.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a link and for anything but a regular file.
pub fn check_own(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => Err(refused("a link")),
        Ok(found) => regular(&found.file_type()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn read_up_to(file: File, len: u64, limit_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(len as usize);
    // A file may grow while it is read, and those of /proc have no length at all.
    file.take(limit_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit_bytes { Err(too_large(limit_bytes)) } else { Ok(bytes) }
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let mut lines = before.split(|byte| *byte == b'\n');
        let (line, byte) = (lines.clone().count(), lines.next_back().map_or(0, <[u8]>::len) + 1);
        let problem = format!("it is not text in UTF-8 (line {line}, byte {byte})");
        io::Error::new(io::ErrorKind::InvalidData, problem)
    })
}

fn regular(found: &std::fs::FileType) -> io::Result<()> {
    let what = match found {
        found if found.is_file() => return Ok(()),
        found if found.is_dir() => "a folder",
        found if found.is_fifo() => "a FIFO",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    Err(refused(what))
}

fn refused(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("it is {what}, not a regular file"))
}

fn too_large(limit_bytes: u64) -> io::Error {
    let limit = match limit_bytes {
        bytes if bytes >= 1_000_000 => format!("{} MB", bytes / 1_000_000),
        bytes => format!("{bytes} bytes"),
    };
    io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {limit}"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;

    #[test]
    fn a_regular_file_is_read_through_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "text").unwrap();
        symlink(&file, &link).unwrap();
        assert_eq!(read_text(&link, 4).unwrap(), "text");
        assert_eq!(read_stream(&link, 4).unwrap(), "text");
    }

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "12345").unwrap();
        let error = read(&file, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "it has more than 4 bytes");
        // A file of a terabyte that takes no room on the disk.
        File::create(&file).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&file, 16_000_000).unwrap_err().to_string(), "it has more than 16 MB");
        // Files of /proc state no length.
        assert!(read_text(Path::new("/proc/self/status"), 1 << 16).unwrap().contains("VmRSS"));
        assert!(read(Path::new("/proc/self/status"), 10).is_err());
    }

    #[test]
    fn text_that_is_not_utf_8_is_found_by_line_and_byte() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let said = |bytes: &[u8]| {
            fs::write(&file, bytes).unwrap();
            read_text(&file, 100).unwrap_err().to_string()
        };
        assert_eq!(said(b"\xff"), "it is not text in UTF-8 (line 1, byte 1)");
        assert_eq!(said(b"a\nb\n\xe4c\n"), "it is not text in UTF-8 (line 3, byte 1)");
        assert_eq!(said(b"\na\xc3\xa4\xff"), "it is not text in UTF-8 (line 2, byte 4)");
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let said = |path: &Path| read(path, 100).unwrap_err().to_string();
        assert_eq!(said(&fifo), "it is a FIFO, not a regular file");
        assert_eq!(said(folder.path()), "it is a folder, not a regular file");
        assert_eq!(said(Path::new("/dev/zero")), "it is a device, not a regular file");
        assert_eq!(create(&fifo).unwrap_err().to_string(), "it is a FIFO, not a regular file");
        assert_eq!(read_stream(&fifo, 100).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn no_link_is_followed_where_a_file_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::write(&target, "precious").unwrap();
        symlink(&target, &link).unwrap();
        assert_eq!(create(&link).unwrap_err().to_string(), "it is a link, not a regular file");
        assert!(open_or_create(&link).is_err() && check_own(&link).is_err());
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        // A link to nothing would make a file elsewhere.
        fs::remove_file(&target).unwrap();
        assert!(create(&link).is_err());
        assert!(!target.exists());
        check_own(&target).unwrap();
        drop(create(&target).unwrap());
        check_own(&target).unwrap();
        assert!(check_own(folder.path()).is_err());
        assert_eq!(fs::read(&target).unwrap(), b"");
    }

    #[test]
    fn a_pipe_that_this_process_was_given_is_read() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&writer, b"[train]").unwrap();
        drop(writer);
        let given = format!("/proc/self/fd/{}", rustix::fd::AsRawFd::as_raw_fd(&reader));
        assert_eq!(read_stream(Path::new(&given), 100).unwrap(), "[train]");
    }
}
