//! The folder of a run: its path, and the configuration in it.

use std::path::{Path, PathBuf};

use paceline_failure::outputs::{check_folder, write_json};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_settings::config::TrainConfig;
use paceline_settings::spec::FILE_NAME;

/// The environment variable that names another place for run folders.
pub const RUNS_VARIABLE: &str = "PACELINE_RUNS";

/// The longest name of a run; file systems allow 255 bytes, and a number may follow.
const MAX_NAME_BYTES: usize = 200;

/// The folder of run folders: `stated` by `--run-dir`, or that of [`RUNS_VARIABLE`], or else `runs`.
pub fn runs(stated: Option<&Path>) -> PathBuf {
    let of_variable = || std::env::var_os(RUNS_VARIABLE).filter(|name| !name.is_empty());
    stated.map(Path::to_owned).or_else(|| of_variable().map(PathBuf::from)).unwrap_or("runs".into())
}

/// Checks that run folders can be made.
pub fn check_runs(stated: Option<&Path>) -> Result<()> {
    let (what, fix) = match stated {
        Some(_) => ("--run-dir", "pass a folder that you can write to"),
        None => {
            ("the run folder", "start from a folder that you can write to, or pass --run-dir DIR")
        }
    };
    check_folder(what, &runs(stated), fix)
}

/// Makes the folder of a run in `runs`, with its configuration, and returns its path. See [`name_of`] for its name.
///
/// # Errors
///
/// If the folder or the configuration cannot be written. Then no folder is left.
pub fn create(disk: &Disk, runs: &Path, config: &TrainConfig) -> Result<PathBuf> {
    let name = name_of(config, config.strategy.name());
    let path = create_named(disk, runs, &name)?;
    write_json(disk, &path.join(FILE_NAME), &config.to_json()).inspect_err(|_| {
        // The first error is reported. The configuration may have its name already.
        let _ = disk.remove(&path.join(FILE_NAME));
        let _ = disk.remove_folder(&path);
    })?;
    Ok(path)
}

/// Removes the folder of a run whose ranks refused to begin, if it holds only the configuration.
pub fn remove_unused(disk: &Disk, folder: &Path) {
    let holds_more =
        |entries: std::fs::ReadDir| entries.flatten().any(|of| of.file_name() != FILE_NAME);
    if std::fs::read_dir(folder).is_ok_and(|entries| !holds_more(entries)) {
        let _ = disk.remove(&folder.join(FILE_NAME));
        let _ = disk.remove_folder(folder);
    }
}

/// The name of a run's folder: that of `--name`, by default `<time>-<model>-<what>`.
pub fn name_of(config: &TrainConfig, what: &str) -> String {
    let time = paceline_host::text::now("%Y%m%d-%H%M%S");
    config.output.name.clone().unwrap_or_else(|| format!("{time}-{}-{what}", config.model.name()))
}

/// Checks that `--name` can be the name of a folder.
pub fn check_name(name: &str) -> Result<()> {
    let is_name = !name.is_empty() && ![".", ".."].contains(&name) && name.len() <= MAX_NAME_BYTES;
    if is_name && !name.contains(|c: char| c == '/' || c.is_control()) {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "--name {name:?}: a folder gets this name; pass 1 to {MAX_NAME_BYTES} bytes without /, and the folder in which \
         it is made as --run-dir DIR"
    )))
}

/// Makes a folder of this name in `runs` and returns its path. If it exists, a number is added to the name.
pub fn create_named(disk: &Disk, runs: &Path, name: &str) -> Result<PathBuf> {
    let fail = |e: std::io::Error| {
        Failure::Usage(format!("the run folder {}/{name}: {e}", runs.printable()))
    };
    disk.create_folder(runs).map_err(fail)?;
    let names = std::iter::once(name.to_owned()).chain((2..).map(|n| format!("{name}-{n}")));
    for name in names {
        let path = runs.join(name);
        match disk.create_new_folder(&path) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(fail(e)),
        }
    }
    unreachable!("some number is free")
}
