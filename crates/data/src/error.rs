//! The errors of this crate: in files, in settings, and in a data set that the user wrote.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use paceline_files::Printable;
use paceline_memory::MemoryError;

use crate::text::TextError;

/// An error of this crate.
#[derive(thiserror::Error)]
pub enum DataError {
    /// The data directory is missing, is not a directory, or is not readable.
    #[error("cannot read the data directory {}: {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The reason that the system gave.
        source: io::Error,
    },
    /// A file does not exist under any of its possible names.
    #[error("found no {} in {}; {hint}", names.join(" or "), paths(directories))]
    Missing {
        /// The names that were looked for.
        names: Vec<String>,
        /// Where they were looked for.
        directories: Vec<PathBuf>,
        /// Where the files come from.
        hint: &'static str,
    },
    /// A file is there but cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason that the system gave.
        source: io::Error,
    },
    /// A file does not have the contents that its format or its data set needs.
    #[error("{}: {problem}", path.display())]
    Format {
        /// The file or the folder.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A file or a folder of the user's does not have what a data set needs.
    #[error("{} {problem}", path.printable())]
    Content {
        /// The file or the folder.
        path: PathBuf,
        /// The problem, as the end of a sentence.
        problem: String,
    },
    /// An image has another size than the first one.
    #[error(
        "{} has height, width and channels {found:?}, and the first image has {expected:?}",
        path.printable()
    )]
    ImageSize {
        /// The file.
        path: PathBuf,
        /// Its height, width and channels.
        found: [usize; 3],
        /// Those of the first image.
        expected: [usize; 3],
    },
    /// A setting has an invalid value.
    #[error("{setting} must be {needs}, got {got}")]
    Setting {
        /// The name of the setting.
        setting: &'static str,
        /// The values that are possible.
        needs: String,
        /// The value.
        got: usize,
    },
    /// A data set of this size does not fit into memory.
    #[error("out of memory: a data set of {num_elems} elements does not fit")]
    TooLarge {
        /// Elements of all inputs together.
        num_elems: u128,
    },
    /// The user's data set gave a class or another number outside the range that it announced.
    #[error("sample {index} of epoch {epoch} has {problem}")]
    OutOfRange {
        /// The epoch that was read.
        epoch: u64,
        /// The sample that was read.
        index: usize,
        /// The number, where it is, and the range.
        problem: String,
    },
    /// No batch can be made of the fields of a data set.
    #[error("the fields of the data set: {problem}")]
    Fields {
        /// The problem.
        problem: String,
    },
    /// A data set panicked.
    #[error("the data set panicked when sample {index} of epoch {epoch} was read: {message}")]
    Panicked {
        /// The epoch that was read.
        epoch: u64,
        /// The sample that was read.
        index: usize,
        /// The panic's message.
        message: String,
    },
    /// The loader's thread could not be started.
    #[error(
        "the system refuses a thread for the loader ({0}); allow more processes (ulimit -u, or pids.max of the control group)"
    )]
    Thread(#[source] io::Error),
    /// The loader's thread panicked outside of the data set's `read`.
    #[error("the loader thread panicked: {message}")]
    ThreadPanicked {
        /// The panic's message.
        message: String,
    },
    /// Files of text, a tokenizer, or the cache of tokens.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The batches do not fit into memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl fmt::Debug for DataError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl DataError {
    /// A problem of a file or a folder of the user's.
    pub(crate) fn content(path: &Path, problem: impl Into<String>) -> Self {
        Self::Content { path: path.to_owned(), problem: problem.into() }
    }

    /// A file whose contents are not those that its format or its data set needs.
    pub(crate) fn format(path: &Path, problem: impl Into<String>) -> Self {
        Self::Format { path: path.to_owned(), problem: problem.into() }
    }

    /// Errors if a setting is zero.
    pub(crate) fn at_least_one(setting: &'static str, got: usize) -> Result<(), Self> {
        if got == 0 {
            return Err(Self::Setting { setting, needs: "at least 1".to_owned(), got });
        }
        Ok(())
    }
}

fn paths(paths: &[PathBuf]) -> String {
    let shown: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    shown.join(" or ")
}
