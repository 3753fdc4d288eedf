//! The folder of a run: its path, and the configuration in it. This file does not know what training
//! writes there.

use std::path::{Path, PathBuf};

use crate::disk::Disk;
use crate::outputs::write_json;
use crate::run::config::TrainConfig;
use crate::run::spec::FILE_NAME;
use crate::{Failure, Result};

/// The environment variable that names another place for run folders.
pub const RUNS_VARIABLE: &str = "PACELINE_RUNS";

/// The folder in which run folders are made: that of [`RUNS_VARIABLE`], or by default `runs` in the
/// current folder.
pub fn runs() -> PathBuf {
    let named = std::env::var_os(RUNS_VARIABLE).filter(|name| !name.is_empty());
    named.map_or_else(|| "runs".into(), PathBuf::from)
}

/// Makes `<time>-<model>-<strategy>/` in the folder `runs`, with the configuration in it, and returns its path.
///
/// # Errors
///
/// If the folder or the configuration cannot be written. Then no folder is left.
pub fn create(disk: &Disk, runs: &Path, config: &TrainConfig) -> Result<PathBuf> {
    let path = create_named(disk, runs, config.model.name(), config.strategy.name())?;
    write_json(disk, &path.join(FILE_NAME), &config.to_json()).inspect_err(|_| {
        // The error that is reported is the first one. The configuration may have its name already.
        let _ = disk.remove(&path.join(FILE_NAME));
        let _ = disk.remove_folder(&path);
    })?;
    Ok(path)
}

/// Makes `<time>-<model>-<what>/` in the folder `runs` and returns its path. A folder that exists is never touched: a
/// number is added to the name instead.
pub fn create_named(disk: &Disk, runs: &Path, model: &str, what: &str) -> Result<PathBuf> {
    let time = crate::text::now("%Y%m%d-%H%M%S");
    let name = format!("{time}-{model}-{what}");
    let fail = |e: std::io::Error| {
        Failure::Usage(format!("the run folder {}/{name}: {e}", runs.display()))
    };
    disk.create_folder(runs).map_err(fail)?;
    let names = std::iter::once(name.clone()).chain((2..).map(|n| format!("{name}-{n}")));
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
