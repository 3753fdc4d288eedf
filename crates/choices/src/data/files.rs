//! The common part of data sets that are stored in files: the folder, and the download.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use paceline_data::{DataError, Dataset, Split};
use paceline_failure::{Failure, Result, usage};
use paceline_hub::published::Source;
use serde::Serialize;
use serde_json::{Value, json};

use super::{DataSettings, RunNeeds};

/// The folder.
#[derive(Clone, Debug, Args, Serialize)]
#[command(next_help_heading = "Data")]
pub(super) struct FolderFlag {
    /// Folder of the data set's files; for texts also one file, or a data set of the Hugging Face Hub (paceline fetch data)
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

impl FolderFlag {
    /// The folder of the data set `name`, whose files are `files`.
    pub fn of(&self, name: &str, files: &str) -> Result<&Path> {
        let lacks = || Failure::Usage(format!("--data {name} needs --data-dir, {files}"));
        self.data_dir.as_deref().ok_or_else(lacks)
    }
}

/// The flags of data sets that are published.
#[derive(Clone, Debug, Args, Serialize)]
#[command(next_help_heading = "Data")]
pub(super) struct FileFlags {
    #[command(flatten)]
    #[serde(flatten)]
    folder: FolderFlag,
    /// Download the data set's files into --data-dir first, unless they are there
    #[arg(long, help_heading = "Files and addresses")]
    download: bool,
    /// Download them from this URL instead of the usual one
    #[arg(long, value_name = "URL", requires = "download", help_heading = "Files and addresses")]
    mirror: Option<String>,
}

/// Opens a part of the data set in a folder.
pub(super) type Open = fn(PathBuf, Split) -> std::result::Result<Arc<dyn Dataset>, DataError>;

/// A data set in files, with its settings.
#[derive(Debug)]
pub(super) struct Files {
    pub name: &'static str,
    pub flags: FileFlags,
    pub source: &'static Source,
    pub open: Open,
}

impl Files {
    /// Checks the flags.
    pub fn check(self, run: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
        let name = self.name;
        run.check_images(name)?;
        self.flags.folder.of(name, "the folder of its files")?;
        if let Some(mirror) = &self.flags.mirror
            && !["http://", "https://"].iter().any(|scheme| mirror.starts_with(scheme))
        {
            return usage(format!("--mirror {mirror}: pass an address that begins with https://"));
        }
        Ok(Arc::new(self))
    }

    fn folder(&self) -> PathBuf {
        self.flags.folder.data_dir.clone().unwrap_or_default()
    }
}

impl DataSettings for Files {
    fn to_json(&self) -> Value {
        json!(self.flags)
    }

    fn open(&self, _: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        (self.open)(self.folder(), split).map_err(|e| Failure::Usage(format!("--data-dir: {e}")))
    }

    /// A file has one byte per element, and so has the data set in memory.
    fn resident_bytes(&self, dataset: &dyn Dataset) -> f64 {
        let elems: usize = dataset.input_shape().iter().product();
        dataset.len() as f64 * elems as f64
    }

    fn prepare(&self, quiet: bool) -> Result<()> {
        if !self.flags.download {
            return Ok(());
        }
        let address = self.flags.mirror.as_deref().unwrap_or(self.source.address);
        self.source.fetch(address, &self.folder(), quiet).map_err(|problem| {
            Failure::Usage(format!("--download: {problem} and leave --download out"))
        })
    }

    /// The files may lie in another folder.
    fn identity(&self) -> Option<Vec<(&'static str, String)>> {
        Some(Vec::new())
    }
}
