//! Why traces cannot be read, analyzed or merged.

use std::path::PathBuf;
use std::{fmt, io};

use paceline_files::Printable;

/// Why traces cannot be read, analyzed or merged. Every message names the file.
#[derive(thiserror::Error)]
pub enum TraceError {
    /// The files are not the traces of one run, are damaged, or have nothing that is looked for. The message says what to pass
    /// instead.
    #[error("{0}")]
    Unfit(String),
    /// A file is no JSON, so it is no trace.
    #[error("{0}")]
    NoJson(String),
    /// A file or folder cannot be opened or read.
    #[error("{}: {source}", path.printable())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The merged traces cannot be written.
    #[error(transparent)]
    Write(#[from] io::Error),
}

impl fmt::Debug for TraceError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
