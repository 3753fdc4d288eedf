//! The folder of a run: its configuration, one line per step, its summary, and scalars for TensorBoard.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::config::TrainConfig;
use crate::metrics::tensorboard::EventFile;
use crate::{Failure, Result};

/// The variable that names another place for run folders.
pub const RUNS_VARIABLE: &str = "PACELINE_RUNS";

/// Where run folders are made: `runs` below the current folder, unless [`RUNS_VARIABLE`] says
/// otherwise.
pub fn runs() -> PathBuf {
    let named = std::env::var_os(RUNS_VARIABLE).filter(|name| !name.is_empty());
    named.map_or_else(|| "runs".into(), PathBuf::from)
}

/// An open run folder.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    metrics: BufWriter<File>,
    /// If they were asked for.
    tensorboard: Option<EventFile>,
}

/// Makes `runs/<time>-<model>-<strategy>/` with the configuration in it, and returns its path.
pub fn create(config: &TrainConfig) -> Result<PathBuf> {
    let path = create_named(config.model.name(), config.strategy.name.name())?;
    write_json(&path.join("config.json"), config)?;
    Ok(path)
}

/// Makes `runs/<time>-<model>-<what>/` and returns its path. A folder that exists is never touched: a
/// number is added to the name instead.
pub fn create_named(model: &str, what: &str) -> Result<PathBuf> {
    let time = jiff::Zoned::now().strftime("%Y%m%d-%H%M%S");
    let (runs, name) = (runs(), format!("{time}-{model}-{what}"));
    let fail = |e: std::io::Error| {
        Failure::Usage(format!("the run folder {}/{name}: {e}", runs.display()))
    };
    fs::create_dir_all(&runs).map_err(fail)?;
    let names = std::iter::once(name.clone()).chain((2..).map(|n| format!("{name}-{n}")));
    for name in names {
        let path = runs.join(name);
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(fail(e)),
        }
    }
    unreachable!("some number is free")
}

/// Writes `value` as indented JSON.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let fail =
        |e: &dyn std::fmt::Display| Failure::io(format!("cannot write {}", path.display()), e);
    let mut text = serde_json::to_string_pretty(value).map_err(|e| fail(&e))?;
    text.push('\n');
    fs::write(path, text).map_err(|e| fail(&e))
}

impl RunFolder {
    /// Opens a folder that [`create`] made for this run.
    pub fn open(path: PathBuf, config: &TrainConfig) -> Result<Self> {
        let file = path.join("metrics.jsonl");
        let metrics = File::create(&file)
            .map_err(|e| Failure::io(format!("cannot write {}", file.display()), e))?;
        let tensorboard = config.tensorboard.then(|| EventFile::create(&path.join("tensorboard")));
        Ok(Self { path, metrics: BufWriter::new(metrics), tensorboard: tensorboard.transpose()? })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a line to `metrics.jsonl`, visible at once to whoever follows the file.
    pub fn add_metrics(&mut self, line: &impl Serialize) -> Result<()> {
        let fail = |e: &dyn std::fmt::Display| Failure::io("cannot write metrics.jsonl", e);
        serde_json::to_writer(&mut self.metrics, line).map_err(|e| fail(&e))?;
        self.metrics.write_all(b"\n").and_then(|()| self.metrics.flush()).map_err(|e| fail(&e))
    }

    /// Adds scalars of a step to TensorBoard's file, if there is one.
    pub fn add_scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        let Some(events) = &mut self.tensorboard else { return Ok(()) };
        events.add_scalars(step, scalars)
    }
}
