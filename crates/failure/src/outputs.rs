//! The files that commands write. Commands check before any work starts that their files can be written. Each file is written
//! as a whole: a reader finds the old contents or all of the new ones.
//!
//! Most names are chosen by this program, in folders where others may have planted links. A link, a FIFO or a device of such a
//! name is replaced, and its target stays. At names that a user has stated, as by `--json`, `write_stated` and its like follow
//! links, and write to pipes and devices.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use paceline_files::Printable;
use paceline_host::disk::{Disk, folder_of};
#[cfg(feature = "charts")]
use paceline_table::chart::Picture;
use serde::Serialize;

use crate::{Failure, Result};

/// Checks that the file that `flag` names can be created. Leaves nothing behind.
pub fn check_file(flag: &str, file: &Path) -> Result<()> {
    let usage =
        |problem: &str| Err(Failure::Usage(format!("{flag} {}{problem}", file.printable())));
    if file.is_dir() {
        return usage(" is a folder; pass a file");
    }
    let folder = folder_of(file);
    if !folder.is_dir() {
        return usage(": its folder does not exist");
    }
    check_folder(flag, folder, "pass a file that you can write to")
}

/// Checks that the files that flags name, and a folder for charts, can be created.
pub fn check_outputs(files: &[(&str, &Option<PathBuf>)], charts: Option<&Path>) -> Result<()> {
    for (flag, file) in files {
        file.as_deref().map_or(Ok(()), |file| check_file(flag, file))?;
    }
    charts.map_or(Ok(()), |folder| {
        check_folder("--charts", folder, "pass a folder that you can write to")
    })
}

/// Writes each chart as `name.svg` into `folder`, which is created if missing. Returns the paths.
#[cfg(feature = "charts")]
pub fn write_charts(
    disk: &Disk,
    folder: &Path,
    charts: &[(String, Picture)],
) -> Result<Vec<PathBuf>> {
    make_folder(disk, folder)?;
    let write = |(name, chart): &(String, Picture)| {
        let file = folder.join(format!("{name}.svg"));
        write_bytes(disk, &file, chart.svg()?.as_bytes()).map(|()| file)
    };
    charts.iter().map(write).collect()
}

/// Checks that files can be created in `folder`, or in its nearest existing ancestor. `fix` is advice for the error. Leaves
/// nothing behind.
pub fn check_folder(what: &str, folder: &Path, fix: &str) -> Result<()> {
    let absolute = std::path::absolute(folder)
        .map_err(|e| Failure::Usage(format!("{what} {}: {e}", folder.printable())))?;
    let existing = absolute.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    // Threads of one program may check the same folder at the same time.
    static PROBES: AtomicU64 = AtomicU64::new(0);
    let number = PROBES.fetch_add(1, Ordering::Relaxed);
    let probe = existing.join(format!(".paceline-probe-{}-{number}", std::process::id()));
    let written = if existing.is_dir() {
        paceline_files::create(&probe).and_then(|_| std::fs::remove_file(&probe))
    } else {
        Err(std::io::ErrorKind::NotADirectory.into())
    };
    written.map_err(|e| {
        let (folder, existing) = (folder.printable(), existing.printable());
        Failure::Usage(format!("{what} {folder}: cannot write to {existing} ({e}); {fix}"))
    })
}

/// Writes the files of a report, each `<name>.<ending>`, into `folder`, which is created if missing.
pub fn write_report(
    disk: &Disk,
    folder: &Path,
    name: &str,
    files: &[(&str, String)],
) -> Result<()> {
    make_folder(disk, folder)?;
    files.iter().try_for_each(|(ending, text)| {
        write_bytes(disk, &folder.join(format!("{name}.{ending}")), text.as_bytes())
    })
}

/// Writes `value` as indented JSON, under a name that this program chooses.
pub fn write_json(disk: &Disk, path: &Path, value: &impl Serialize) -> Result<()> {
    disk.replace(path, None, json(value)).map_err(Failure::cannot("write", path))
}

/// Writes a file that holds `bytes`, under a name that this program chooses.
pub fn write_bytes(disk: &Disk, path: &Path, bytes: &[u8]) -> Result<()> {
    disk.replace(path, None, |out| out.write_all(bytes)).map_err(Failure::cannot("write", path))
}

/// Writes `value` as indented JSON to the file that the user has stated.
pub fn write_stated_json(disk: &Disk, path: &Path, value: &impl Serialize) -> Result<()> {
    write_stated(disk, path, json(value)).map_err(Failure::cannot("write", path))
}

/// Writes `bytes` to the file that the user has stated.
pub fn write_stated_bytes(disk: &Disk, path: &Path, bytes: &[u8]) -> Result<()> {
    write_stated(disk, path, |out| out.write_all(bytes)).map_err(Failure::cannot("write", path))
}

fn json(value: &impl Serialize) -> impl FnOnce(&mut (dyn Write + Send)) -> io::Result<()> {
    move |out: &mut (dyn Write + Send)| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    }
}

/// Replaces the file that the user has stated by the output of `write`. Links are followed. A device or a pipe, such as
/// `/dev/stdout`, is written to directly.
pub fn write_stated<T, E: From<io::Error>>(
    disk: &Disk,
    path: &Path,
    write: impl FnOnce(&mut (dyn Write + Send)) -> std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    // Files there belong to the kernel or to this process's streams. `/dev/shm` has plain files.
    let is_kernels = ["/dev", "/proc"].iter().any(|folder| path.starts_with(folder));
    let is_kernels = is_kernels && !path.starts_with("/dev/shm");
    if is_kernels || path.metadata().is_ok_and(|of| !of.is_file() && !of.is_dir()) {
        let mut out = BufWriter::new(disk.open_named(path)?);
        let written = write(&mut out)?;
        out.flush()?;
        return Ok(written);
    }
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    disk.replace(&target, None, write)
}

/// Makes a folder and those above it, as far as they are missing.
pub fn make_folder(disk: &Disk, folder: &Path) -> Result<()> {
    disk.create_folder(folder).map_err(Failure::cannot("make", folder))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use paceline_host::disk::faults::{Fault, at_each_operation};

    #[test]
    fn after_a_fault_at_any_operation_each_output_is_whole_or_as_before() {
        let write = |disk: &Disk, folder: &Path, of: &str| {
            write_json(disk, &folder.join("results.json"), &[of, of])?;
            write_bytes(disk, &folder.join("rows.csv"), of.as_bytes())?;
            let files = ["csv", "html", "json", "md"].map(|ending| (ending, of.to_owned()));
            write_report(disk, &folder.join("report"), "summary", &files)
        };
        let contents = |folder: &Path| {
            let mut files = Vec::new();
            for folder in [folder.to_owned(), folder.join("report")] {
                for entry in fs::read_dir(folder).into_iter().flatten() {
                    let path = entry.unwrap().path();
                    if path.is_file() {
                        files.push((path.file_name().unwrap().to_owned(), fs::read(path).unwrap()));
                    }
                }
            }
            files.sort();
            files
        };
        let fresh = |of: &str| {
            let folder = tempfile::tempdir().unwrap();
            write(&Disk::default(), folder.path(), of).unwrap();
            contents(folder.path())
        };
        let (before, after) = (fresh("before"), fresh("after"));
        assert_eq!(before.len(), 6);
        let num_operations = at_each_operation(|disk, fault| {
            let folder = tempfile::tempdir().unwrap();
            write(&Disk::default(), folder.path(), "before").unwrap();
            let outcome = write(disk, folder.path(), "after");
            assert_eq!(outcome.is_err(), disk.has_failed());
            if let Err(error) = outcome {
                assert!(matches!(error, Failure::Run(_)), "{error:?}");
                let text = error.to_string();
                assert!(text.contains(&folder.path().display().to_string()), "{text}");
                assert!(text.contains("no space left"), "{text}");
            }
            let mut found = contents(folder.path());
            if fault == Fault::Stops {
                // The process ended before it could clean up. No reader takes such a file.
                found.retain(|(name, _)| name.to_string_lossy().ends_with(".partial"));
                assert!(found.len() <= 1, "{found:?}");
                found = contents(folder.path());
                found.retain(|(name, _)| !name.to_string_lossy().ends_with(".partial"));
            }
            assert_eq!(found.len(), before.len(), "a file is missing, or one is left behind");
            for ((found, before), after) in found.iter().zip(&before).zip(&after) {
                assert!(found == before || found == after, "{:?} is not whole", found.0);
            }
            // The next command is not disturbed.
            write(&Disk::default(), folder.path(), "after").unwrap();
            assert_eq!(contents(folder.path()), after);
        });
        assert!(num_operations > 6 * 5, "{num_operations} operations");
    }

    #[test]
    fn stated_devices_stay_devices_and_stated_links_stay_links() {
        let disk = Disk::default();
        write_stated_json(&disk, Path::new("/dev/null"), &1).unwrap();
        assert!(!Path::new("/dev/null").metadata().unwrap().is_file());
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "before").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_stated_bytes(&disk, &link, b"after").unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "after");
        // A name that this program chooses is not the user's.
        write_bytes(&disk, &link, b"own").unwrap();
        assert!(link.symlink_metadata().unwrap().is_file());
        assert_eq!(fs::read_to_string(&file).unwrap(), "after");
        let full =
            write_stated_bytes(&disk, Path::new("/dev/full"), b"text").unwrap_err().to_string();
        assert!(full.starts_with("cannot write /dev/full: No space left"), "{full}");
    }
}
